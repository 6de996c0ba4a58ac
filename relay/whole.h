/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * What a reader wants, as it lies in what holders of all tensors whole hand on. Such a holder cuts
 * them as parts.h says. So the trainer's catalog alone tells its holding and its parts.
 */
#ifndef WHOLE_H
#define WHOLE_H

#include "catalog.h"
#include "parts.h"
#include <fanin/client.h>

/** Which parts of a holder bring which units of the reader. Each unit is some tensors of
    `destination`: pieces of the holder's parts, and their place in the reader's memory. */
typedef struct unit_map {
    size_t n_parts;                 /**< that the holder has */
    fanin_destination *destination; /**< NULL: nothing is brought */
    /** a unit's first tensor of `destination`, one more than units */
    uint32_t *unit_first;
    /** a part's first one in used_by, one more than parts; NULL: each part has one */
    uint32_t *used_first;
    uint32_t *used_by; /**< units that need the part, as often as they do */
} unit_map;

/** Holders of all tensors whole. */
typedef struct whole {
    digest catalog_id; /**< of the trainer's, from which this follows */
    digest holding;    /**< of all of them */
    unit_map map;
} whole;

/**
 * @p unit_bytes: as of parts_cut(). Nothing is brought to who wants all tensors whole, and has one
 * holding with such holders; to who wants what the catalog has not; where it is too much to look
 * for, or memory is short.
 */
void whole_find(whole *out, const parts *wanted, const key_table *keys,
                uint64_t unit_bytes);
void whole_free(whole *w);

#endif
