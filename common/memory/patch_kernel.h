/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The interface of the kernels that make a patch between two copies on a device. Plain C, shared by
 * the kernels' source, their caller, and whatever else carries them out. What a patch is:
 * proto/patch.h.
 */
#ifndef PATCH_KERNEL_H
#define PATCH_KERNEL_H

#include "convert.h"
#include <stdint.h>

/* ---------------------------------------------------------------------- making */

/* They run one behind the other: count, scan, emit. */
#define PATCH_COUNT_NAME "fanin_patch_count"
#define PATCH_SCAN_NAME "fanin_patch_scan"
#define PATCH_EMIT_NAME "fanin_patch_emit"

/** Threads of a block; every warp of them takes shares of its own. */
#define PATCH_KERNEL_THREADS 256
#define PATCH_KERNEL_WARPS (PATCH_KERNEL_THREADS / 32)
/** The scan has one block, of one warp. */
#define PATCH_SCAN_THREADS 32

#define PATCH_KERNEL_SEGMENT 131072 /**< bytes: PATCH_SEGMENT */
#define PATCH_SHARES 8              /**< of a segment */
#define PATCH_SHARE_WORDS (PATCH_KERNEL_SEGMENT / 2 / PATCH_SHARES)

/** In `made`: the patch would have more changes than `most`, and there are none. */
#define PATCH_TOO_LARGE UINT64_MAX

/** The only parameter of each of them, by value. */
typedef struct patch_parameters {
    const uint8_t *before, *after; /**< device memory, aligned to 16 */
    uint64_t bytes;                /**< of each copy */
    uint64_t most;                 /**< changes that the patch may have */
    /* on the device, for the kernels alone: */
    uint16_t
        *counts; /**< changes of each share: PATCH_SHARES a segment; aligned to 16 */
    uint64_t *first; /**< changes before each segment, and before the end */
    /* pinned host memory: */
    uint32_t *directory; /**< changes of each segment */
    uint8_t *changes;    /**< for each segment its places, then its words */
    uint64_t *made;      /**< changes of the patch */
} patch_parameters;

/** Of a copy of @p bytes. */
CONVERT_CODE uint64_t patch_kernel_segments(uint64_t bytes)
{
    return bytes / PATCH_KERNEL_SEGMENT + (bytes % PATCH_KERNEL_SEGMENT > 0);
}

/** Device memory that `counts`, and `first` behind them, take. */
CONVERT_CODE uint64_t patch_kernel_scratch(uint64_t bytes)
{
    uint64_t n = patch_kernel_segments(bytes);
    return n * PATCH_SHARES * sizeof(uint16_t) + (n + 1) * sizeof(uint64_t);
}

#endif
