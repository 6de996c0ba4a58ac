/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Makes the patch (patch.h) between two arenas while one of them is being filled: threads compare
 * what they have just copied, while it is in their caches. Then one thread packs what they found.
 */
#ifndef PATCH_MAKER_H
#define PATCH_MAKER_H

#include <stdint.h>

typedef struct patch_maker patch_maker;
/** What one thread has found of a segment so far. */
typedef struct patch_finds patch_finds;

/**
 * From the arena @p before, of @p length bytes, to one that is shown in @p stretches stretches.
 * Each of them ascends. The patch may have @p most bytes, its directory included. NULL: no memory,
 * or no room for a directory.
 */
patch_maker *patch_maker_open(const uint8_t *before, uint64_t length,
                              uint64_t stretches, uint64_t most);
/** NULL is fine. */
void patch_maker_close(patch_maker *m);

/** One a thread; NULL: no memory, then there is no patch. */
patch_finds *patch_finds_open(patch_maker *m);
/** NULL is fine. */
void patch_finds_close(patch_finds *f);
/** Shows bytes of the new arena from @p at on, where a box begins or those before end. A box that
    ends with half a word is taken to have 0 as its other half. */
void patch_maker_compare(patch_maker *m, patch_finds *f, uint64_t at,
                         const uint8_t *after, uint64_t length);
/** The stretch ends: what the thread compares next may lie anywhere. */
void patch_maker_keep(patch_maker *m, patch_finds *f);
/** When all is kept: the directory and *@p changes bytes behind it, to be freed. NULL: too
    large, or no memory. */
uint8_t *patch_maker_pack(const patch_maker *m, uint64_t *changes);

#endif
