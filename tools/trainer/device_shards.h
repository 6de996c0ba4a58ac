/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A rank's shards in memory of a device, laid out as PyTorch's caching allocator lays out tensors
 * that are made one after the other, and rewritten in place by a kernel.
 */
#ifndef DEVICE_SHARDS_H
#define DEVICE_SHARDS_H

#include "trainer/models.h"
#include "trainer/shard.h"

#include <fanin/error.h>

typedef struct device_shards device_shards;

/**
 * Allocates memory on @p device for the shards of all tensors of @p list, by the allocator's
 * rules: sizes rounded up to 512 bytes; up to 1 MiB out of segments of 2 MiB, below 10 MiB out
 * of segments of 20 MiB, larger ones by themselves, rounded up to 2 MiB; a segment is one
 * allocation of the driver's. memory_out[i] is where shard i lies, NULL if it is empty.
 * @p list, @p shards and @p seeds (of keys, pattern.h) must outlive the result. Blocks for
 * uploads. Errors are device_driver.h's. *out is to be freed also after an error.
 */
fanin_status device_shards_make(int device, const tensor_list *list,
                                const shard *shards, const uint64_t *seeds,
                                void **memory_out, device_shards **out,
                                fanin_error *error);
/** Waits for the work under way. NULL and *shards == NULL are fine. */
void device_shards_free(device_shards **shards);

/** Queues the bytes of @p step on the shards' stream: one kernel, or one copy a segment where
    the tensors have bytes of their own. */
fanin_status device_shards_write(device_shards *s, uint64_t step, fanin_error *error);

/** The stream (CUstream) on which they are written. */
void *device_shards_stream(const device_shards *s);

#endif
