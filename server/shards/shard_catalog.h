/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A published catalog: made at a commit that changed the shards, read-only afterwards,
 * shared by everybody who serves from it.
 */
#ifndef SHARD_CATALOG_H
#define SHARD_CATALOG_H

#include "array.h"
#include "catalog.h"
#include "shards/registration.h"
#include "shards/shard.h"

#include <stdatomic.h>

struct arena_plan;
struct catalog_parts;

#define VIEW_PACKED UINT32_MAX

/** One box to serve bytes from; boxes are numbered as in the box table. */
typedef struct source_box {
    const uint8_t *first; /**< its first element */
    uint64_t start;       /**< bytes of all boxes before it */
    uint32_t view;        /**< VIEW_PACKED, or an index of views */
    uint32_t region;      /**< that holds it */
} source_box;

typedef struct shard_catalog {
    atomic_uint references;
    uint64_t version; /**< catalog version */
    digest key_digest;
    uint32_t n_keys;
    uint64_t n_boxes, bytes;
    source_box *boxes; /**< n_boxes and one more, whose start is the sum of all bytes */
    strided *views;    /**< from: memory, to: packed */
    buffer keys_blob, boxes_blob;
    struct catalog_parts
        *parts; /**< of the control thread, shard_catalog.c; NULL: none yet */
    /** likewise, by whether the own user asks: PARTS_... of shard_catalog.c, as the pages of one
        answer have to fit together */
    uint8_t parts_for[2];
    region_set regions;
    bool
        has_device; /**< some of it is device memory, which digests are made of at a go */
    registrar *registrar;
    uint64_t revision; /**< of the publication whose catalog it is */
    /** of a snapshot publication: what its commits copy, into which arenas; NULL: by reference.
        The boxes are those of arena 0, see shard_catalog_box_first() for the other one */
    struct arena_plan *plan;
    uint32_t arena_regions;             /**< regions of one arena, 0: by reference */
    uint8_t *packed;                    /**< of a patch: its boxes' memory; else NULL */
    struct patch_room *room;            /**< that lends it; NULL: it is freed */
    struct shard_catalog *next_garbage; /**< guarded by the server's lock */
} shard_catalog;

/** What a catalog says. */
typedef struct catalog_contents {
    const shard_set *shards;
    const fanin_pair *pairs;
    uint32_t n_pairs, rank, world_size;
    uint64_t version;
} catalog_contents;

/**
 * Builds a catalog; regions of @p before (may be NULL) are kept. Blocks for
 * as long as that takes, holds no lock meanwhile. FANIN_ERR_MEMORY, FANIN_ERR_LIMIT.
 */
fanin_status shard_catalog_build(registrar *r, const catalog_contents *what,
                                 const shard_catalog *before, shard_catalog **out,
                                 fanin_error *error);

/** Two boxes to serve bytes from, of @p first and @p second bytes, in @p packed, a block of @p room
    (NULL: to be freed), which is the catalog's then; there are no tables of them. NULL: no memory.
    */
shard_catalog *shard_catalog_of_patch(registrar *r, uint8_t *packed,
                                      struct patch_room *room, uint64_t first,
                                      uint64_t second);
/** The second box of a patch that nobody has seen has @p bytes; its block ends there. */
void shard_catalog_end_patch(shard_catalog *s, uint64_t bytes);

shard_catalog *shard_catalog_retain(shard_catalog *s);
/** May take the registrar's lock and free arenas: not to be called under the server's lock. NULL
    is fine. */
void shard_catalog_release(shard_catalog *s);
/** The same in two parts: true if that was the last reference, then it is to be freed. */
bool shard_catalog_drop(shard_catalog *s);
void shard_catalog_free(shard_catalog *s);

/** The first element of a box. The regions at @p first_region and behind it (an arena) hold the
    same bytes at the same offsets as those at 0. */
static inline const uint8_t *shard_catalog_box_first(const shard_catalog *s,
                                                     const source_box *b,
                                                     uint32_t first_region)
{
    region *const *regions = s->regions.regions;
    if (first_region == 0)
        return b->first;
    /* As numbers: C subtracts no pointers into two objects, and this one may lie below. */
    uint64_t offset = (uintptr_t)b->first - regions[b->region]->base;
    return (const uint8_t *)(uintptr_t)(regions[b->region + first_region]->base +
                                        offset);
}

/** The CUDA device that holds a box, -1: the host. */
static inline int shard_catalog_box_device(const shard_catalog *s, const source_box *b,
                                           uint32_t first_region)
{
    const region *r = s->regions.regions[b->region + first_region];
    return r->memory.kind == FANIN_MEMORY_CUDA ? r->memory.device : -1;
}

/** Says that a tensor's memory cannot be read, FANIN_ERR_TRANSPORT, and what would help. */
void shard_unreadable(const char *name, uint32_t rank, fanin_error *error);
/** Says that a byte of that box cannot be read, likewise. */
void shard_catalog_unreadable(const shard_catalog *s, uint64_t box, uint32_t rank,
                              fanin_error *error);

/** Bytes of one box. */
static inline uint64_t shard_catalog_box_bytes(const shard_catalog *s, uint64_t box)
{
    return s->boxes[box + 1].start - s->boxes[box].start;
}

/* ------------------------------------------------------------------ parts */

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

#endif
