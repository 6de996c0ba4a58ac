/* SPDX-License-Identifier: Apache-2.0 */
/** @file The room's own: making the plans that a reader reads patches by. */
#ifndef DELTA_INTERNAL_H
#define DELTA_INTERNAL_H

#include "delta/delta.h"
#include "patch_kernel.h"

extern const char delta_too_large[];

/** Where the piece's bytes have landed, for a kernel or the calling thread. */
patch_landing delta_landing(const plan *plan, const box_table *boxes, const piece *p,
                            const uint8_t *base);

/** FANIN_ERR_PROTOCOL: the source's rank tells of a patch @p lie. */
fanin_status delta_blame(const delta *d, size_t source, fanin_error *error,
                         const char *lie);
/** Bytes [@p offset, @p offset + @p length) of a box of the source come next, behind what was named
    before in this plan. */
fanin_status delta_read_range(delta *d, size_t source, uint64_t box, uint64_t offset,
                              uint64_t length, fanin_error *error);
/** The plan is whole: makes room for what it brings. *@p because: that is too much. */
fanin_status delta_end_plan(delta *d, const char **because, fanin_error *error);

#endif
