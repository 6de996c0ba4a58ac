/* SPDX-License-Identifier: Apache-2.0 */
/** @file What a box table is made of: for those who make, cut and join them. */
#ifndef BOX_TABLE_H
#define BOX_TABLE_H

#include "catalog.h"
#include "number_column.h"

#define RULE_PART 2 /* added to a box_rule: the table is of some keys only */

/* Keys whose boxes are known, and which the first of them is: its slot, and its number among all of
   the rank's. A whole table has one run. */
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
    box_run *runs;  /* ascending by keys, slots and ordinals; neighbours may touch */
    uint32_t shift; /* all offsets are multiples of 1 << shift */
    /* A slot a box, ascending by key. Boxes lie one behind the other and are alike mostly, so that
       their columns take few bits. */
    uint64_t count;
    number_column key_of, region_of,
        offset_of; /* the key less the slot; offset >> shift */
    /* Explicit boxes: where in words a box's offsets, extents and, if the lowest bit says so,
       strides begin, times two. Boxes that are alike share them. */
    number_column form_of;
    uint64_t *words;
    uint64_t n_words;
};

bool box_table_add(box_table *table, uint32_t key, uint32_t region, uint64_t offset);

static inline uint32_t box_table_key(const box_table *table, uint64_t slot)
{
    return (uint32_t)(number_column_get(&table->key_of, slot) + slot);
}

/* Nothing is added from here on. False: no memory. */
bool box_table_close(box_table *table);

/* The slot behind a run's last. */
static inline uint64_t box_run_end(const box_table *table, uint32_t run)
{
    return run + 1 < table->n_runs ? table->runs[run + 1].slot : table->count;
}

#endif
