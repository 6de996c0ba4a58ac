/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The digests (digest.h) of what is at a destination: made by a kernel where it lies on a
 * device that has it, by the calling thread otherwise, for which memory of devices is read back.
 */
#ifndef HELD_DIGEST_H
#define HELD_DIGEST_H

#include "block.h"
#include "digest.h"
#include "clock.h"
#include "gpu.h"
#include "array.h"

/** What one digest is of. */
typedef struct held_part {
    const uint8_t *at;    /**< of the view's first element, or of the bytes */
    const strided *view;  /**< NULL: `length` bytes */
    uint64_t first, runs; /**< of the view */
    uint64_t length;
} held_part;

/** Of part @p index. */
typedef held_part (*held_part_fn)(void *cookie, uint64_t index);

typedef struct held held;

/** For a destination in @p ranges, which are kept; @p g NULL: host memory only. NULL: no memory. */
held *held_create(gpu *g, const memory_range *ranges, size_t n_ranges);
/** Waits for devices that still work. False: one has not ended until @p at; nothing was freed, and
    what it reads must not be either. NULL is fine. */
bool held_free(held *h, deadline at);

/**
 * The digests of parts from @p first on, before @p end, to @p out: of one if the calling thread
 * makes them, of as many as one kernel takes otherwise. How many is in *n_out, 1 at least. Blocks
 * until they are there. FANIN_ERR_TIMEOUT: @p until has passed and a device still works, which
 * held_free() waits for. FANIN_ERR_TRANSPORT: a device has failed. FANIN_ERR_MEMORY.
 */
fanin_status held_digest(held *h, held_part_fn part, void *cookie, uint64_t first,
                         uint64_t end, deadline until, digest *out, uint64_t *n_out,
                         fanin_error *error);

#endif
