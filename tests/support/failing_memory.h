/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Allocations of the calling thread that fail when a test says so; other threads have memory. For
 * programs linked with failing_memory.c and --wrap of malloc, calloc and realloc.
 */
#ifndef FAILING_MEMORY_H
#define FAILING_MEMORY_H

#include <stdbool.h>

/** The allocation after the next @p after fails, with @p all_after also all behind it. */
void failing_memory_start(long after, bool all_after);
/** From now on none fails. Whether one did. */
bool failing_memory_stop(void);

#endif
