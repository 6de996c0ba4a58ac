/* SPDX-License-Identifier: Apache-2.0 */
/** @file Where the memory of shards is: on the host or on which CUDA device. */
#ifndef SHARD_MEMORY_H
#define SHARD_MEMORY_H

#include "gpu_finder.h"
#include "log.h"
#include "shards/shard.h"

/** What one call of put knows already. Zeroed but for the log; ends with gpu_finder_free(). */
typedef struct memory_probe {
    const logger *log;
    bool asked;        /**< whether the finder's driver is what it is for good */
    bool found_device; /**< some shard is in CUDA memory */
    gpu_finder finder; /**< without a driver: no pointer can be device memory */
} memory_probe;

/**
 * Finds out where the boxes of @p s are (all fields but memory and `in` are set). What @p said is
 * HOST is so unless CUDA contradicts; managed memory is fine then. FANIN_ERR_ARGUMENT (a
 * contradiction, boxes in different places, a box that reaches beyond its allocation),
 * FANIN_ERR_UNSUPPORTED (CUDA memory, but no CUDA); errors name no key.
 */
fanin_status shard_locate(memory_probe *probe, fanin_memory said, shard *s,
                          fanin_error *error);

/** Tells, once a call, of the shards in @p set whose memory has no IPC handle. */
void shard_set_log_origins(const shard_set *set, const char *publication,
                           const logger *log);

#endif
