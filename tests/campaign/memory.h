/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Where the bytes of a campaign lie. Each program is linked with one of the two: memory_host.c, or
 * memory_cuda.c, whose memory the CPU cannot touch at the address that the library is given.
 */
#ifndef CAMPAIGN_MEMORY_H
#define CAMPAIGN_MEMORY_H

#include <stdbool.h>
#include <stddef.h>

/** Whether there are devices, if they are meant. */
bool memory_there(void);

/** @p size bytes (0: some address nevertheless); @p device: which of two, if devices are meant.
    Where a limit leaves no room for them, waits until it is lifted; ends the process after two
    minutes. */
void *memory_get(size_t size, unsigned device);
void memory_free(void *memory, size_t size);
/** The bytes at that address, for the CPU; it may be a copy of them. */
void *memory_bytes(void *memory);
/** What the CPU has written there is at @p memory. */
void memory_send(void *memory, size_t size);
/** The CPU finds there what is at @p memory. */
void memory_fetch(void *memory, size_t size);

/** The same for a destination, @p size of which are fetched at once; if anything is written before
    it or beyond it, the process ends, then or soon. For the process's life. */
void *memory_guarded(size_t size, unsigned device);

/** Whether the library has left something on a device once it has nothing to do any more; says
    what.
    @p own: allocations that are the caller's. */
bool memory_left(size_t own);

#endif
