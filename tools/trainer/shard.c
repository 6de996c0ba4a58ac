/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/shard.h"

void shard_chunk(uint64_t n, uint32_t parts, uint32_t index, uint32_t multiple,
                 uint64_t *begin_out, uint64_t *end_out)
{
    uint64_t size = n / parts + (n % parts != 0);
    size = (size + multiple - 1) / multiple * multiple;
    uint64_t begin = size * index;
    *begin_out = begin < n ? begin : n;
    *end_out = n - *begin_out < size ? n : *begin_out + size;
}

void shard_cut(const tensor_spec *t, uint32_t dim, uint32_t parts, uint32_t index,
               shard *out)
{
    uint64_t bits = fanin_dtype_bits(t->dtype);
    uint64_t outer = 1;
    uint64_t inner = 1;
    *out = (shard){0};
    if (t->n_dims == 0) {
        out->bytes = index == 0 ? t->bytes : 0;
        out->runs = 1;
        out->run_bytes = out->bytes;
        return;
    }
    if (dim >= t->n_dims) {
        dim = t->n_dims - 1;
    }
    for (uint32_t d = 0; d < t->n_dims; d++) {
        out->extent[d] = t->shape[d];
        outer *= d < dim ? t->shape[d] : 1;
        inner *= d > dim ? t->shape[d] : 1;
    }
    /* Packed elements are cut on whole bytes. */
    uint32_t multiple = dim + 1 < t->n_dims || bits % 8 == 0 ? 1 : bits == 4 ? 2 : 4;
    uint64_t begin;
    uint64_t end;
    shard_chunk(t->shape[dim], parts, index, multiple, &begin, &end);
    out->offset[dim] = begin;
    out->extent[dim] = end - begin;
    out->runs = outer;
    out->run_bytes = (end - begin) * inner * bits / 8;
    out->first = begin * inner * bits / 8;
    out->step = t->shape[dim] * inner * bits / 8;
    out->bytes = outer * out->run_bytes;
}
