/* SPDX-License-Identifier: Apache-2.0 */
/** @file Arithmetic of N-dimensional blocks and of strided copies. Pure. */
#ifndef BLOCK_H
#define BLOCK_H

#include "worker_pool.h"
#include <fanin/types.h>

/** A block of a tensor, in elements. n_dims 0: the one element of a scalar. */
typedef struct block {
    uint32_t n_dims;
    uint64_t offset[FANIN_MAX_DIMS], extent[FANIN_MAX_DIMS];
} block;

bool block_volume(const block *b, uint64_t *elements_out); /**< false: overflow */
bool block_is_empty(const block *b);
bool block_equal(const block *a, const block *b);
bool block_inside(const block *b, const uint64_t *shape); /**< overflow-safe */
/** False: nothing in common. @p out may be one of the inputs or NULL. */
bool block_intersect(const block *a, const block *b, block *out);

/**
 * The rows that torch.chunk gives to part @p index of @p world on dimension @p dim
 * (chunks of ceil(n / world); later parts may be empty, extent 0).
 */
block block_chunk(uint32_t n_dims, const uint64_t *shape, uint32_t dim, uint32_t world,
                  uint32_t index);

/**
 * The same, written where it is wanted: a copy of what has just been written by words is read in
 * vectors, which a processor holds back until the stores before are through, and tables have
 * hundreds of thousands of blocks. @p shape is not in @p out.
 */
void block_set_chunk(block *out, uint32_t n_dims, const uint64_t *shape, uint32_t dim,
                     uint32_t world, uint32_t index);

/**
 * Whether @p count non-empty blocks tile @p shape exactly. Identical blocks count as
 * replicas (that is fine); any other overlap is a conflict. *fault_out (may be NULL): a
 * block nobody holds, or the overlap; a_out/b_out: indexes of conflicting blocks, -1 for a
 * hole. O(n log n) along one dimension, O(2^k n log n) when k dimensions are cut. A block
 * that is empty or reaches outside counts as a conflict with itself.
 *
 * TILING_LIMIT: more corners than are ever compared (TILING_CORNERS_MAX). TILING_STOPPED: @p stop
 * (may be NULL) said so.
 */
#define TILING_CORNERS_MAX ((size_t)1 << 24) /**< 128 MiB of work space */
typedef enum block_tiling {
    TILING_EXACT,
    TILING_HOLE,
    TILING_CONFLICT,
    TILING_MEMORY,
    TILING_LIMIT,
    TILING_STOPPED
} block_tiling;
block_tiling block_tiles(uint32_t n_dims, const uint64_t *shape, const block *blocks,
                         size_t count, work_stop *stop, block *fault_out, long *a_out,
                         long *b_out);

/**
 * The block in units of a packed dtype (dtype_get_unit): last offset and extent divided by
 * @p unit_elements. False: they fall inside a unit, or a scalar of a packed dtype.
 */
bool block_in_units(const block *b, uint32_t unit_elements, block *out);

/** Byte strides of packed row-major storage of @p extent; stride[n-1] is the unit. For
    packed dtypes (F4, F6) the last dimension is counted in units: see block_in_units(). */
void block_packed_strides(uint32_t n_dims, const uint64_t *extent, uint64_t unit_bytes,
                          int64_t *stride_out);

/**
 * Where the bytes of a strided block that is not empty lie, and the end of the last; @p first: its
 * first element. False: the addresses wrap, or are more than half of all.
 */
bool block_range(uint32_t n_dims, const uint64_t *extent_units, const int64_t *stride,
                 uint64_t unit_bytes, const void *first, uint64_t *low_out,
                 uint64_t *high_out);

/**
 * A copy of an N-d block between two strided layouts, walked in contiguous runs: neighbouring
 * dimensions that are contiguous on both sides are fused. Offsets are relative to the
 * first element on either side.
 */
typedef struct strided {
    uint32_t n_dims;
    uint64_t extent[FANIN_MAX_DIMS];                  /**< units */
    int64_t from[FANIN_MAX_DIMS], to[FANIN_MAX_DIMS]; /**< bytes between neighbours */
    uint64_t run; /**< bytes of one contiguous run after fusing, on the source's side */
    uint32_t convert; /**< CONVERT_... (convert.h): what becomes of the elements */
} strided;

/** Fuses; extents must be > 0. After it n_dims counts the dimensions around the run. */
void strided_init(strided *s, uint32_t n_dims, const uint64_t *extent_units,
                  const int64_t *from, const int64_t *to, uint64_t unit_bytes);
uint64_t strided_runs(const strided *s); /**< number of runs */
/** Of all runs, on the source's side, without what lies between them. */
uint64_t strided_bytes(const strided *s);
/** Offsets of run @p index (0 .. strided_runs()-1); either out may be NULL. */
void strided_run(const strided *s, uint64_t index, int64_t *from_out, int64_t *to_out);
/** Copies, and converts, everything, from the first source element to the first destination
    one. */
void strided_copy(const strided *s, void *to, const void *from);

#endif
