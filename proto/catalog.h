/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Catalogs as bytes ("blobs", sent in pages) and as tables: the key table, the same on all
 * ranks and named by the XXH3-128 of its blob; a rank's box table; a rank's regions. Blobs
 * are sequences of msgpack objects, canonical: one table has one encoding.
 */
#ifndef CATALOG_H
#define CATALOG_H

#include "block.h"
#include "array.h"
#include "digest.h"
#include "key_set.h"
#include "worker_pool.h"
#include <fanin/types.h>

/* ------------------------------------------------------------- key table */

typedef struct key_entry {
    const char *name; /**< NUL-terminated, owned by the table */
    fanin_dtype dtype;
    uint32_t n_dims;
    uint64_t shape[FANIN_MAX_DIMS];
    uint64_t bytes; /**< of the whole tensor */
    bool keep; /**< F32 that a reader's conversion leaves as it is; of decoded tables */
} key_entry;

/** The pair of the metadata that names the tensors to keep, one a line. */
#define KEEP_F32_PAIR "keep_f32"

typedef struct key_table {
    key_entry *entries; /**< ascending by name as bytes, no duplicates */
    uint32_t count;
    fanin_pair *pairs; /**< metadata, ascending by key as bytes, no duplicates */
    uint32_t n_pairs;
    digest id;      /**< of the blob */
    uint64_t bytes; /**< of all tensors */
    void *storage;  /**< internal */
} key_table;

/** Appends the canonical blob. Entries and pairs must be sorted and valid (server's duty). */
void key_table_encode(buffer *out, const key_entry *entries, uint32_t count,
                      const fanin_pair *pairs, uint32_t n_pairs);

/**
 * Builds a table from a blob of untrusted bytes; linear time, memory bounded by a small
 * multiple of @p size. FANIN_ERR_PROTOCOL (any deviation from the canonical form), LIMIT,
 * MEMORY, TIMEOUT (@p stop, which may be NULL, as in all decoders here); error names the entry.
 */
fanin_status key_table_decode(const uint8_t *blob, size_t size, work_stop *stop,
                              key_table **out, fanin_error *error);
void key_table_free(key_table **table);
/** Index of @p name, -1: not there. Binary search. */
int64_t key_table_find(const key_table *table, const char *name);
/** The same of names that are asked for in turn, which mostly lie close to one another. *near: 0 at
    first, then kept between calls for one table. */
int64_t key_table_find_near(const key_table *table, const char *name, uint32_t *near);

/* ------------------------------------------------------------- box table */

/** Where a rank's box lies; strides count bytes, the region's base is not part of it. */
typedef struct box_place {
    uint32_t region;
    uint64_t offset; /**< bytes from the region's base to the box's first element */
    bool packed;
    int64_t stride[FANIN_MAX_DIMS]; /**< if not packed */
} box_place;

typedef enum box_rule {
    BOXES_EXPLICIT = 0,
    /** of every key this rank holds block_chunk(dim, world, index), in one packed box,
        or nothing where that is empty */
    BOXES_CHUNK = 1,
} box_rule;

/** Opaque: a byte or two a box that lies as those beside it do. Of all keys, or a part: of some. A
    part knows the boxes of its keys, by the numbers that they have among all. */
typedef struct box_table box_table;

/** What the server gives to the encoder: non-empty boxes in key order, then the order in
    which the shard lists them. key: index into the key table. */
typedef struct box_record {
    uint32_t key;
    block block;
    box_place place;
} box_record;

/** Appends the canonical blob: under a chunk rule if the boxes follow one whose world
    divides @p world_size with index rank mod world (and every key has dims > dim), else
    explicit. Delta-coded: <= 4 bytes a box for equally spaced packed chunks. */
void box_table_encode(buffer *out, const key_entry *keys, uint32_t n_keys,
                      const box_record *boxes, uint64_t n_boxes, uint32_t rank,
                      uint32_t world_size);

/** Appends the canonical blob of a part: of @p wanted, which the table has all of. @p wanted is
    not empty. */
void box_table_encode_part(buffer *out, const box_table *table, const key_set *wanted);

/** Untrusted bytes, of a whole table or a part, against a key table (which must outlive the
    result). Every box lies inside its tensor, is not empty, and offset + extent of its bytes does
    not overflow. */
fanin_status box_table_decode(const uint8_t *blob, size_t size, const key_table *keys,
                              work_stop *stop, box_table **out, fanin_error *error);
void box_table_free(box_table **table);

/** The keys whose boxes are known. False: no memory, and *out is empty. */
bool box_table_keys(const box_table *table, key_set *out);
/** Whether those keys' are. Linear in ranges. */
bool box_table_has(const box_table *table, const key_set *keys);
/** Whether all keys' are. */
bool box_table_is_whole(const box_table *table);
/** Puts the boxes of @p more, of other keys of the same rank, into *table. Both go, whatever comes
    of it; *table is the new one. FANIN_ERR_PROTOCOL: the two contradict each other;
    FANIN_ERR_MEMORY; then *table is NULL. */
fanin_status box_table_join(box_table **table, box_table *more, fanin_error *error);

/** Boxes that are known: of all keys, those numbered 0 .. count - 1. */
uint64_t box_table_count(const box_table *table);
box_rule box_table_rule(const box_table *table, uint32_t *dim_out, uint32_t *world_out,
                        uint32_t *index_out); /**< outs may be NULL */
/** Box @p ordinal, of a key that is known; any out may be NULL. */
void box_table_get(const box_table *table, uint64_t ordinal, uint32_t *key_out,
                   block *block_out, box_place *place_out);
/** First ordinal of @p key and how many follow (0: none, or not known). O(log n). */
uint64_t box_table_of_key(const box_table *table, uint32_t key, uint64_t *count_out);
/** The same of neighbouring keys, all of which are known: their boxes have neighbouring numbers. */
uint64_t box_table_of_keys(const box_table *table, key_range keys, uint64_t *count_out);
/** 1 + highest region id of the boxes that are known, 0: none */
uint32_t box_table_regions(const box_table *table);

/* --------------------------------------------------------------- regions */

typedef struct region_entry {
    uint32_t id;           /**< 0 .. count-1, ascending */
    uint64_t base, length; /**< address in the server's process; base+length fits */
    int32_t memory, device;
    const uint8_t *rkey;
    size_t rkey_size;
} region_entry;

typedef struct region_table {
    region_entry *entries;
    uint32_t count;
    void *storage;
} region_table;

void region_table_encode(buffer *out, const region_entry *entries, uint32_t count);
fanin_status region_table_decode(const uint8_t *blob, size_t size, work_stop *stop,
                                 region_table **out, fanin_error *error);
void region_table_free(region_table **table);

#endif
