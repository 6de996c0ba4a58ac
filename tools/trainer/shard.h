/* SPDX-License-Identifier: Apache-2.0 */
/** @file The cut of tensors over ranks, as torch.chunk does it. */
#ifndef SHARD_H
#define SHARD_H

#include "trainer/models.h"

/**
 * What part @p index of @p parts holds of @p n elements: parts of ceil(n / parts), the last
 * ones smaller or empty. @p multiple: a part begins at a multiple of so many elements.
 */
void shard_chunk(uint64_t n, uint32_t parts, uint32_t index, uint32_t multiple,
                 uint64_t *begin_out, uint64_t *end_out);

typedef struct shard {
    uint64_t offset[FANIN_MAX_DIMS], extent[FANIN_MAX_DIMS];
    uint64_t bytes; /**< 0: empty */
    /* The shard is `runs` runs of `run_bytes`; run i lies at first + i * step of the
       tensor's row-major bytes and at i * run_bytes of the shard's own. */
    uint64_t runs, run_bytes, first, step;
} shard;

/** Cuts @p t in dimension @p dim, or in its last one if it has fewer. A scalar is whole in
    part 0 and empty in the others. */
void shard_cut(const tensor_spec *t, uint32_t dim, uint32_t parts, uint32_t index,
               shard *out);

#endif
