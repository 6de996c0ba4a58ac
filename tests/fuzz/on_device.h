/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Memory of CUDA devices for both ends of one process: of the driver that FANIN_CUDA_LIBRARY names,
 * or of the stand-in (fake_cuda.h), by which a process maps its own memory, too. Whatever fails
 * ends the process.
 */
#ifndef ON_DEVICE_H
#define ON_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum device_of { DEVICE_OF_RANKS, DEVICE_OF_READERS } device_of;

/** False: built without CUDA, or no driver. Loads it the first time, before any other thread is
    started. */
bool device_is_there(void);
/** For the rest of the process; of another device than the others', if there are two. */
void *device_room(device_of whose, size_t size);
/** Between the host and what device_room() gave, done when it returns. Thread: any. */
void device_copy(device_of whose, void *to, const void *from, size_t size);
/** Mapped allocations, as the stand-in counts them; of another driver 0. */
uint64_t device_mappings(void);

#endif
