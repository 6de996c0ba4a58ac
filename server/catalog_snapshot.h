/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A published catalog: made at a commit that changed the shards, read-only afterwards,
 * shared by everybody who serves from it.
 */
#ifndef CATALOG_SNAPSHOT_H
#define CATALOG_SNAPSHOT_H

#include "buffer.h"
#include "catalog.h"
#include "region.h"
#include "shard.h"

#include <stdatomic.h>

#define VIEW_PACKED UINT32_MAX

/** One box to serve bytes from; boxes are numbered as in the box table. */
typedef struct source_box {
    const uint8_t *first; /**< its first element */
    uint64_t start;       /**< bytes of all boxes before it */
    uint32_t view;        /**< VIEW_PACKED, or an index of views */
} source_box;

typedef struct snapshot {
    atomic_uint references;
    uint64_t version; /**< catalog version */
    digest key_digest;
    uint32_t n_keys;
    uint64_t n_boxes, bytes;
    source_box *boxes; /**< n_boxes and one more, whose start is the sum of all bytes */
    strided *views;    /**< from: memory, to: packed */
    buffer keys_blob, boxes_blob;
    region_set regions;
    registrar *registrar;
} snapshot;

/**
 * Builds the catalog of @p shards; regions of @p before (may be NULL) are kept. Blocks for
 * as long as that takes, holds no lock meanwhile. FANIN_ERR_MEMORY, FANIN_ERR_LIMIT.
 */
fanin_status snapshot_build(registrar *r, const shard_set *shards,
                            const fanin_pair *pairs, uint32_t n_pairs, uint64_t version,
                            uint32_t rank, uint32_t world_size, const snapshot *before,
                            snapshot **out, fanin_error *error);

snapshot *snapshot_retain(snapshot *s);
/** May take the registrar's lock: not to be called under the server's. NULL is fine. */
void snapshot_release(snapshot *s);

/** Bytes of one box. */
static inline uint64_t snapshot_box_bytes(const snapshot *s, uint64_t box)
{
    return s->boxes[box + 1].start - s->boxes[box].start;
}

#endif
