/* SPDX-License-Identifier: Apache-2.0 */
/** @file Moving the bytes: all ranks at once, each by its path, until all are in place. */
#ifndef READ_PHASE_H
#define READ_PHASE_H

#include "pull/plan_cache.h"
#include "pull/rank_watch.h"

/** What the reads need; one read of an attempt. */
typedef struct read_phase {
    fanin_client *client;
    publication *publication;
    plan_part *part;
    const reader_lease *leases; /**< one a peer */
    destination *destination;
    uint8_t *base;
    const memory_range *ranges; /**< of the destination */
    size_t n_ranges;
    const fanin_pull_options *options;
    fanin_result *result; /**< adds to served[], scatter_ns; first/last times below */
    read_progress *progress;
    bool final; /**< out: a device failed, another attempt would not mend it */
    uint64_t first_ns, last_ns; /**< out: first read posted, last byte in place */
} read_phase;

/**
 * Reads and waits. FANIN_OK: everything is in place.
 * FANIN_ERR_STALE: a token was refused. FANIN_ERR_CLOSED, UNREACHABLE, TRANSPORT: a rank's
 * path was lost (it is dropped; try again). Others are final.
 * When it returns nothing writes the destination any more, or destination->leak is set.
 */
fanin_status read_phase_run(read_phase *r, deadline at, fanin_error *error);

/**
 * After read_phase_run() and before the leases end: every rank digests the boxes that it served,
 * this process what has landed. FANIN_OK: all are equal. FANIN_ERR_STALE: a lease has gone. Errors
 * of a lost rank as of read_phase_run(). Final, with r->final set: FANIN_ERR_TRANSPORT (unequal:
 * names
 * rank and key), FANIN_ERR_UNSUPPORTED (a rank that cannot), FANIN_ERR_MEMORY.
 */
fanin_status verify_run(read_phase *r, deadline at, fanin_error *error);

#endif
