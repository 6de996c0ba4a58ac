/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Pinned host memory that the patches of a device's arena lie in: kernels write it, data threads
 * send from it. It is made once, as pinning takes its time and may stop the device. How large a
 * patch is, is known when it is there: each is given the longest stretch that is free, and gives
 * back what it does not need.
 */
#ifndef PATCH_ROOM_H
#define PATCH_ROOM_H

#include "gpu.h"

typedef struct patch_room patch_room;

/** For blocks of @p bytes, with one user. NULL, and @p error why: so much cannot be pinned, or no
    memory. */
patch_room *patch_room_make(gpu *g, uint64_t bytes, fanin_error *error);
/** One user less; the last one, or the last block given back, frees. NULL is fine. */
void patch_room_leave(patch_room *r);
/** The longest stretch that is free, of *@p length bytes, aligned to 64. NULL: no memory, or none
    is free. Thread: any, as with the functions below. */
uint8_t *patch_room_take(patch_room *r, uint64_t *length);
/** Of how many bytes that would be. */
uint64_t patch_room_longest(patch_room *r);
/** The block needs its first @p length bytes alone. */
void patch_room_shrink(patch_room *r, const uint8_t *block, uint64_t length);
void patch_room_give(patch_room *r, const uint8_t *block);
/** For the kernels to write how large a patch has become: each in its turn. */
uint64_t *patch_room_made(patch_room *r);

#endif
