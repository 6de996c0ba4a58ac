/* SPDX-License-Identifier: Apache-2.0 */
/** @file Memory for copies of a step: pages of this process, or of files without names. */
#ifndef CACHE_MEMORY_H
#define CACHE_MEMORY_H

#include <fanin/error.h>
#include <stdint.h>

typedef struct cache_memory {
    uint8_t *bytes; /**< NULL: none */
    size_t size;
} cache_memory;

/** Whether files can be made in @p directory; NULL, which is this process's own memory, is fine.
    FANIN_ERR_IO. */
fanin_status cache_memory_check(const char *directory, fanin_error *error);

/**
 * Makes each of @p list @p size bytes large; what was in it is gone. They are all there, or are
 * refused before any is written: FANIN_ERR_MEMORY, FANIN_ERR_IO, which tell what all need. Files
 * have no names, so that nothing is left of them however the process ends.
 */
fanin_status cache_memory_take(const char *directory, cache_memory *const *list,
                               size_t count, uint64_t size, fanin_error *error);

/** Nothing may use it any more. */
void cache_memory_free(cache_memory *memory);

#endif
