/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The interface of the kernels that make a patch between two copies on a device, and of the one
 * that applies a patch there. Plain C, shared by the kernels' source, their caller, and whatever
 * else carries them out. What a patch is: proto/patch.h.
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

/* -------------------------------------------------------------------- applying */

#define PATCH_APPLY_NAME "fanin_patch_apply"
#define PATCH_DIMS 8 /**< FANIN_MAX_DIMS */

/** Bytes [from, end) of a copy, and where they have landed. */
typedef struct patch_landing {
    uint64_t from, end;
    uint64_t to;     /**< of the first byte */
    uint32_t n_dims; /**< 0: contiguous */
    uint32_t even;   /**< every word of it lies in one run, at an even address */
    /* the view's, from the first byte on; strides of the copy descend */
    uint64_t run; /**< bytes of a run */
    uint64_t extent[PATCH_DIMS], from_step[PATCH_DIMS];
    int64_t to_step[PATCH_DIMS];
} patch_landing;

/** The changes of one segment. */
typedef struct patch_run {
    /** places, then words; pinned host memory, aligned to 2. They are read by vectors of 16 bytes,
        with what lies beside them in the first and last one */
    const uint8_t *changes;
    uint64_t start; /**< of the segment in the copy */
    uint32_t count;
    uint32_t first, n; /**< landings that may reach into the segment */
} patch_run;

/** The only parameter of the kernel, by value. */
typedef struct patch_apply_parameters {
    const patch_landing *landings; /**< on the device, as are: */
    const patch_run *runs;         /**< none of which names a word of another */
    uint64_t count;                /**< of runs */
} patch_apply_parameters;

#endif
