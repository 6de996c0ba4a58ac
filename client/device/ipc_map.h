/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * CUDA memory of other processes, mapped for kernels of this one: each allocation once a device,
 * however many regions lie in it, and kept while some region table lists it. Opening costs some
 * 100 us, so what is not used any more is closed by a sweep, not when it is let go: tables that
 * are replaced by newer ones mostly list the same allocations again. One thread.
 */
#ifndef IPC_MAP_H
#define IPC_MAP_H

#include "gpu.h"
#include "ipc_key.h"

typedef struct ipc_map ipc_map;
typedef struct ipc_mapping ipc_mapping;

/** NULL: out of memory. */
ipc_map *ipc_map_create(gpu *g);
/** Unmaps everything, also what has not been let go; NULL is fine. After ipc_map_abandon()
    nothing is unmapped. */
void ipc_map_destroy(ipc_map **map);

/**
 * The allocation that @p key names, of the process life @p incarnation, for kernels of
 * @p device; to be let go once per call. What a dead process left is never found again, since its
 * successor has another incarnation. Sweeps if it cannot be mapped, and tries again. Errors of
 * gpu_map(); FANIN_ERR_MEMORY.
 */
fanin_status ipc_map_open(ipc_map *map, int device, const uint8_t incarnation[16],
                          const ipc_key *key, ipc_mapping **out, fanin_error *error);
/** Where the allocation starts in this process. */
uint64_t ipc_mapping_base(const ipc_mapping *mapping);
/** *mapping NULL is fine. It stays mapped until the next sweep. */
void ipc_mapping_release(ipc_mapping **mapping);

/** Unmaps what nobody holds. No work that reads it may be under way. */
void ipc_map_sweep(ipc_map *map);
/** Work that reads the mappings may never end: they stay for good. */
void ipc_map_abandon(ipc_map *map);
/** Allocations mapped now. */
size_t ipc_map_count(const ipc_map *map);

#endif
