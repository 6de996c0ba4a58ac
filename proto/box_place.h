/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Where boxes lie, as differences: what encoder and decoder of box tables share. A box is
 * expected right behind the last one of its region, rounded up to the table's alignment.
 */
#ifndef BOX_PLACE_H
#define BOX_PLACE_H

#include "catalog.h"

#define PLACE_SHIFT_MAX 12 /* alignment: 1 << shift bytes */
#define PLACE_REGIONS 1024 /* regions whose last end is remembered */
#define PLACE_END_MAX (UINT64_C(1) << 61)

typedef struct place_state {
    uint32_t shift;
    uint32_t region; /* of the box before */
    uint64_t ends[PLACE_REGIONS];
} place_state;

uint64_t place_expected(const place_state *s, uint32_t region);
void place_advance(place_state *s, uint32_t region, uint64_t end);

/** End of the box's highest byte in its region. False: it begins below the region, ends
    beyond PLACE_END_MAX or cuts a unit of its dtype. */
bool place_end(const key_entry *key, const block *b, const box_place *place,
               uint64_t *end_out);

/** Whether strides say nothing but "packed" (those of extent 1 never matter). */
bool place_strides_packed(const key_entry *key, const block *b, const int64_t *stride);

/** The largest shift that fits all offsets, given their bitwise or. */
uint32_t place_shift(uint64_t all_offsets);

#endif
