/* SPDX-License-Identifier: Apache-2.0 */
/** @file Shards as the trainer registered them: copies of descriptions, never of bytes. */
#ifndef SHARD_H
#define SHARD_H

#include "block.h"
#include "gpu.h"
#include "gpu_finder.h"
#include "log.h"
#include <fanin/types.h>
#include <stddef.h>

#define PUBLICATION_NAME_SIZE 80 /**< "lora:" and a run, with the final NUL */

/** One non-empty box of a shard. */
typedef struct shard_box {
    block block;
    bool packed;
    /** bytes between neighbours, also when packed; the
        last one counts units of packed dtypes */
    int64_t stride[FANIN_MAX_DIMS];
    uint8_t *first;     /**< first element */
    uint64_t low, high; /**< addresses of all bytes: [low, high) */
    uint64_t bytes;
    gpu_range in; /**< the allocation that holds it, if it is device memory */
} shard_box;

/** In one piece of memory. */
typedef struct shard {
    char *name; /**< stored behind the boxes */
    fanin_dtype dtype;
    bool keep; /**< a cast leaves it as it is */
    uint32_t n_dims;
    uint64_t shape[FANIN_MAX_DIMS];
    uint64_t shape_bytes;
    fanin_memory memory; /**< of all boxes */
    size_t n_boxes;
    shard_box boxes[];
} shard;

/** Shards ascending by name as bytes, no name twice. */
typedef struct shard_set {
    shard **shards;
    size_t count, capacity;
    uint64_t n_boxes;
} shard_set;

/** "lora:<run>" or "full:<run>" with run = [A-Za-z0-9._-]{1,64}, not "." or "..". */
fanin_status publication_name_check(const char *name, fanin_error *error);

/** What one call of put knows already. Zeroed but for the log; ends with gpu_finder_free(). */
typedef struct memory_probe {
    const logger *log;
    bool asked;        /**< whether the finder's driver is what it is for good */
    bool found_device; /**< some shard is in CUDA memory */
    gpu_finder finder; /**< without a driver: no pointer can be device memory */
} memory_probe;

/**
 * Checks @p count descriptions, finds out where their memory is and makes a set of them. Errors
 * are those of fanin_server_put(), with the key. *out is to be freed also on failure.
 */
fanin_status shard_set_build(memory_probe *probe, const char *publication,
                             const fanin_tensor *tensors, size_t count, shard_set *out,
                             fanin_error *error);

/** How a box that is not packed is walked in the order of its packed bytes: from its own layout to
    the packed one. */
void shard_box_view(const shard *s, const shard_box *b, strided *out);

void shard_set_free(shard_set *set);

/** Tells, once a call, of the shards in @p set whose memory has no IPC handle. */
void shard_set_log_origins(const shard_set *set, const char *publication,
                           const logger *log);

/** The name of one that has a box around @p address, "a tensor" if none has. */
const char *shard_set_holder(const shard_set *set, uint64_t address);
/** Index of @p name, or -1 - (index where it would be inserted). */
ptrdiff_t shard_set_find(const shard_set *set, const char *name);

/** Same dtype, shape, boxes, addresses, allocations and strides. */
bool shard_equal(const shard *a, const shard *b);

#endif
