/* SPDX-License-Identifier: Apache-2.0 */
/** @file What a box table is made of: for those who make, cut and join them. */
#ifndef BOX_TABLE_H
#define BOX_TABLE_H

#include "catalog.h"

#define WITH_STRIDES (UINT64_C(1) << 63)
#define RULE_PART 2 /* added to a box_rule: the table is of some keys only */

typedef struct box_slot {
    uint32_t key, region;
    uint64_t offset;
} box_slot;

/* Keys whose boxes are known, and which the first of them is: its place in slots, and its number
   among all of the rank's. A whole table has one run. */
typedef struct box_run {
    key_range keys;
    uint32_t slot, ordinal;
} box_run;

struct box_table {
    const key_table *keys;
    box_rule rule;
    uint32_t dim, world, index; /* of a chunk rule */
    uint32_t regions;
    bool part;
    uint32_t n_runs;
    box_run *runs; /* ascending by keys, slots and ordinals; neighbours may touch */
    uint64_t count;
    box_slot *slots; /* ascending by key */
    /* Explicit boxes: where in words a box's offsets, extents and, if the position has
       WITH_STRIDES, strides begin. */
    uint64_t *positions;
    uint64_t *words;
    uint64_t n_words;
};

/* The slot behind a run's last. */
static inline uint64_t box_run_end(const box_table *table, uint32_t run)
{
    return run + 1 < table->n_runs ? table->runs[run + 1].slot : table->count;
}

#endif
