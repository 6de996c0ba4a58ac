/* SPDX-License-Identifier: Apache-2.0 */
/** @file Cutting copy entries to what one warp of the copy kernel takes. Pure. */
#ifndef COPY_UNITS_H
#define COPY_UNITS_H

#include "copy_entry.h"

/**
 * Writes entries of about COPY_UNIT_BYTES and at most COPY_UNIT_RUNS runs that together copy what
 * @p entry copies, and returns their number. @p out NULL: only counts. Cuts fall where the
 * source's address is aligned, as far as its offset tells.
 */
uint64_t copy_units_cut(const copy_entry *entry, copy_entry *out);

/** In how many shares to cut each of @p n uncut entries, so that @p warps warps have work: the
    `parts` of a copy_parameters. n > 0. */
uint32_t copy_units_parts(const copy_entry *entries, uint64_t n, uint64_t warps);

#endif
