/* SPDX-License-Identifier: Apache-2.0 */
#include "block.h"

#include <string.h>

bool block_volume(const block *b, uint64_t *elements_out)
{
    if (block_is_empty(b)) {
        *elements_out = 0;
        return true;
    }
    uint64_t volume = 1;
    for (uint32_t i = 0; i < b->n_dims; i++)
        if (__builtin_mul_overflow(volume, b->extent[i], &volume))
            return false;
    *elements_out = volume;
    return true;
}

bool block_is_empty(const block *b)
{
    for (uint32_t i = 0; i < b->n_dims; i++)
        if (b->extent[i] == 0)
            return true;
    return false;
}

bool block_equal(const block *a, const block *b)
{
    size_t size = a->n_dims * sizeof a->offset[0];
    return a->n_dims == b->n_dims && memcmp(a->offset, b->offset, size) == 0 &&
           memcmp(a->extent, b->extent, size) == 0;
}

bool block_inside(const block *b, const uint64_t *shape)
{
    for (uint32_t i = 0; i < b->n_dims; i++)
        if (b->offset[i] > shape[i] || b->extent[i] > shape[i] - b->offset[i])
            return false;
    return true;
}

bool block_intersect(const block *a, const block *b, block *out)
{
    block common = {.n_dims = a->n_dims};
    for (uint32_t i = 0; i < a->n_dims; i++) {
        uint64_t a_end = a->offset[i] + a->extent[i];
        uint64_t b_end = b->offset[i] + b->extent[i];
        uint64_t start = a->offset[i] > b->offset[i] ? a->offset[i] : b->offset[i];
        uint64_t end = a_end < b_end ? a_end : b_end;
        if (start >= end)
            return false;
        common.offset[i] = start;
        common.extent[i] = end - start;
    }
    if (out)
        *out = common;
    return true;
}

void block_set_chunk(block *out, uint32_t n_dims, const uint64_t *shape, uint32_t dim,
                     uint32_t world, uint32_t index)
{
    *out = (block){.n_dims = n_dims};
    for (uint32_t i = 0; i < n_dims; i++)
        out->extent[i] = shape[i];
    if (dim >= n_dims || world == 0)
        return;
    uint64_t rows = shape[dim];
    uint64_t chunk = rows / world + (rows % world != 0);
    bool any = chunk != 0 && index <= rows / chunk;
    uint64_t first = any ? index * chunk : rows, left = rows - first;
    out->offset[dim] = first;
    out->extent[dim] = left < chunk ? left : chunk;
}

block block_chunk(uint32_t n_dims, const uint64_t *shape, uint32_t dim, uint32_t world,
                  uint32_t index)
{
    block b;
    block_set_chunk(&b, n_dims, shape, dim, world, index);
    return b;
}

bool block_in_units(const block *b, uint32_t unit_elements, block *out)
{
    *out = *b;
    if (unit_elements <= 1)
        return unit_elements == 1;
    if (b->n_dims == 0)
        return false;
    uint32_t last = b->n_dims - 1;
    out->offset[last] /= unit_elements;
    out->extent[last] /= unit_elements;
    return b->offset[last] % unit_elements == 0 && b->extent[last] % unit_elements == 0;
}

void block_packed_strides(uint32_t n_dims, const uint64_t *extent, uint64_t unit_bytes,
                          int64_t *stride_out)
{
    uint64_t stride = unit_bytes;
    for (uint32_t i = n_dims; i-- > 0;) {
        stride_out[i] = (int64_t)stride;
        stride *= extent[i];
    }
}

bool block_range(uint32_t n_dims, const uint64_t *extent_units, const int64_t *stride,
                 uint64_t unit_bytes, const void *first, uint64_t *low_out,
                 uint64_t *high_out)
{
    uint64_t below = 0, above = unit_bytes, at = (uintptr_t)first;
    for (uint32_t i = 0; i < n_dims; i++) {
        uint64_t step = stride[i] < 0 ? -(uint64_t)stride[i] : (uint64_t)stride[i];
        uint64_t reach;
        uint64_t *side = stride[i] < 0 ? &below : &above;
        if (__builtin_mul_overflow(extent_units[i] - 1, step, &reach) ||
            __builtin_add_overflow(*side, reach, side))
            return false;
    }
    return !__builtin_sub_overflow(at, below, low_out) &&
           !__builtin_add_overflow(at, above, high_out) &&
           *high_out - *low_out <= INT64_MAX;
}
