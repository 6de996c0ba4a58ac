/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The cut of tensors over ranks, as torch.chunk does it; and a rank's shards in memory of a device,
 * laid out as PyTorch's caching allocator lays out tensors that are made one after the other, and
 * rewritten in place.
 */
#ifndef DEVICE_SHARDS_H
#define DEVICE_SHARDS_H

#include "trainer/models.h"

#include "gpu.h"
#include <fanin/error.h>

/** Memory is the host's. */
#define DEVICE_HOST (-1)

/** gpu_load(), for who asked for a device: without a driver FANIN_ERR_TRANSPORT and words for the
    command line. */
fanin_status device_load(gpu **out, fanin_error *error);

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

typedef struct device_shards device_shards;

/**
 * Allocates memory on @p device for @p count shards, by the allocator's rules: sizes rounded up to
 * 512 bytes; up to 1 MiB out of segments of 2 MiB, below 10 MiB out of segments of 20 MiB, larger
 * ones by themselves, rounded up to 2 MiB; a segment is one allocation of the driver's.
 * memory_out[i] is where shard i lies, NULL if it is empty. @p shards and @p memory_out must
 * outlive the result. Errors are device_load()'s and gpu.h's. *out is to be freed also after one.
 */
fanin_status device_shards_make(int device, const shard *shards, size_t count,
                                void **memory_out, device_shards **out,
                                fanin_error *error);
/** Waits for the work under way. NULL and *shards == NULL are fine. */
void device_shards_free(device_shards **shards);

/** Host memory for what the shards are to hold, one a shard. Waits until the copies under way have
    read it. */
fanin_status device_shards_images(const device_shards *s, void ***out,
                                  fanin_error *error);
/** Queues its copy to the device on the shards' stream, one a segment. */
fanin_status device_shards_send(const device_shards *s, fanin_error *error);

/** The stream on which they are written. */
gpu_stream *device_shards_stream(const device_shards *s);

#endif
