/* SPDX-License-Identifier: Apache-2.0 */
/** @file A source's pieces as the read requests that ask for them. */
#ifndef READ_LIST_H
#define READ_LIST_H

#include "messages.h"
#include "plan/plan.h"

/** A group of pieces that one read request asks for. */
typedef struct read_request {
    uint64_t first_piece;
    uint32_t n_pieces;
    uint32_t n_entries; /**< of the message */
    uint64_t first_entry;
    uint64_t bytes;
    /** some pieces are several ranges: read_list_spread() makes the entries of the message of those
        that are kept, one a piece or for several that are whole boxes */
    bool spread;
} read_request;

/** How one source of a plan is read by stream: made once, used by every pull. */
typedef struct read_list {
    read_request *requests;
    uint64_t n_requests;
    read_entry *entries;
} read_list;

/** Requests for the pieces of source @p index: neighbouring whole boxes become one entry. Linear.
    */
fanin_status read_list_build(const plan *plan, size_t index, const box_table *boxes,
                             const key_table *keys, work_stop *stop, read_list *out,
                             fanin_error *error);
/** @p out: r->n_entries of them. */
void read_list_spread(const read_list *list, const read_request *r, const plan *plan,
                      const plan_rank *pieces, read_entry *out);

#endif
