/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Patches (patch.h) between two arenas on a device: kernels compare them behind the copies, and
 * write into pinned host memory. With the publication's writer lock.
 */
#ifndef DEVICE_PATCH_H
#define DEVICE_PATCH_H

#include "shards/arena.h"

/** Before the copies into @p arena of a publication that keeps patches: what is between boxes is
    zeroed once, in the order of the part's stream, as it is compared as well. */
void device_patch_prepare(arena_plan *plan, uint32_t part, unsigned arena);

/**
 * Queues the making of the patch from the arena @p before to @p after behind the copies. Of pinned
 * memory for @p most bytes, made by the first call, the patch may have what is free. *@p packed:
 * its directory, in a block of the part's room that is the caller's then; its changes are behind
 * it. *@p made: how many those are when the stream gets there, or PATCH_TOO_LARGE. False: none is
 * made; @p why is set the first time that the device or the host refuses what all patches need.
 */
bool device_patch_queue(arena_plan *plan, uint32_t part, unsigned before,
                        unsigned after, uint64_t most, uint8_t **packed,
                        const uint64_t **made, fanin_error *why);

#endif
