/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The interface of the kernels that digest: their names and their one parameter each. Plain C,
 * shared by the kernels' source, their caller, and whatever else carries them out.
 */
#ifndef DIGEST_KERNEL_H
#define DIGEST_KERNEL_H

#include "copy_entry.h"

#define DIGEST_KERNEL_NAME "fanin_digest_pieces"

/** Threads of a block; every warp of them takes pieces of its own. */
#define DIGEST_KERNEL_THREADS 256
#define DIGEST_KERNEL_WARPS (DIGEST_KERNEL_THREADS / 32)

/** Bytes of a piece: those of BOX_DIGEST_PIECE. */
#define DIGEST_KERNEL_PIECE 4096

/** Pieces of a row at most. */
#define DIGEST_KERNEL_ROW 16

/**
 * What the bytes of one piece are, in order; what they do not fill counts as zeros. Or several
 * pieces in a row that are parts of one entry of one run.
 */
typedef struct digest_row {
    uint32_t first, count; /**< entries; `to` of each is its place in the piece */
    uint32_t skip;         /**< bytes of the first entry that come before the row */
    uint32_t at, pieces;   /**< its digests: out[at] and those behind it */
} digest_row;

/** Bytes of one run that a piece takes at most. */
#define DIGEST_KERNEL_RUN(convert)                                                     \
    ((convert) == CONVERT_NONE ? DIGEST_KERNEL_PIECE : 2 * DIGEST_KERNEL_PIECE)

/** The only parameter of the kernel, by value: out[i] becomes the XXH3-64 (seed 0) of piece i,
    after its entries have converted what they convert. */
typedef struct digest_parameters {
    const digest_row *rows; /**< device memory or pinned host memory, as are: */
    const copy_entry
        *entries; /**< runs at equal distances; `base` and `to_step` mean nothing */
    uint64_t *out;
    uint64_t count; /**< of rows */
    uint32_t
        share; /**< pieces of a row that one warp takes: a part of DIGEST_KERNEL_ROW */
} digest_parameters;

/* ------------------------------------------------------------- pieces of a file */

#define DIGEST_FILE_KERNEL_NAME "fanin_digest_file"
/** A block is one warp, which takes pieces of its own: few are spread over the whole device. */
#define DIGEST_FILE_KERNEL_THREADS 32
/** Bytes of a piece: DIGEST_PIECE. */
#define DIGEST_FILE_PIECE 4194304

/** out[2 * i] and out[2 * i + 1] become the low and the high word of the XXH3-128 (seed 0) of the
    DIGEST_FILE_PIECE bytes at bytes + i * DIGEST_FILE_PIECE. */
typedef struct digest_file_parameters {
    const char *bytes; /**< aligned to 16 */
    uint64_t *out;     /**< device memory or pinned host memory */
    uint64_t count;    /**< of pieces */
} digest_file_parameters;

#endif
