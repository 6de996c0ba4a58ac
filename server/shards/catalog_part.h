/* SPDX-License-Identifier: Apache-2.0 */
/** @file The box table of some of a catalog's keys, for readers that want few of many. */
#ifndef CATALOG_PART_H
#define CATALOG_PART_H

#include "shards/shard_catalog.h"

#define PART_ROOMS 3

/** What is kept for parts counts as memory for readers, in each of these, up to so much: what it
    leaves is theirs. The counters outlive the catalog. Others have less room than the own user. */
typedef struct part_room {
    struct {
        atomic_uint_fast64_t *used;
        uint64_t most;
    } in[PART_ROOMS];
    bool is_own;
} part_room;

/**
 * The blob that answers a request for the boxes of @p keys (as encoded there); *out is the
 * catalog's, until the next call. The first call for a catalog reads its own tables, later ones
 * take as long as the part is large, and the last part is kept: its pages, and workers that want
 * the same, cost nothing. One thread only: the one that serves control connections.
 *
 * FANIN_ERR_PROTOCOL, with *why: @p keys is malformed, or of keys that are not there. Without the
 * memory for it, or @p room for what is to be kept, *out is the whole table, which answers any such
 * request; then it is so for this catalog, and the own user or all others, from now on, as a table
 * is told in pages.
 */
fanin_status shard_catalog_part(shard_catalog *s, bytes_view keys, part_room room,
                                const buffer **out, const char **why);
/** NULL is fine. */
void catalog_parts_free(struct catalog_parts *p);

#endif
