/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * CUDA memory of other processes, mapped for kernels of this one: each allocation once a device,
 * however many regions lie in it, and kept while some region table lists it. Opening costs 100 us
 * to a millisecond, so what is not used any more is closed by a sweep, not when it is let go:
 * tables that
 * are replaced by newer ones mostly list the same allocations again. One thread may open while
 * another one takes and lets go; all else is that one's, and for when nothing is being opened.
 */
#ifndef IPC_MAP_H
#define IPC_MAP_H

#include "gpu.h"
#include "ipc_key.h"
#include "worker_pool.h"

typedef struct ipc_map ipc_map;
typedef struct ipc_mapping ipc_mapping;

/** NULL: out of memory. */
ipc_map *ipc_map_create(gpu *g);
/** Unmaps everything, also what has not been let go; NULL is fine. After ipc_map_abandon()
    nothing is unmapped. */
void ipc_map_destroy(ipc_map **map);

/**
 * The allocation that @p key names, of the process life @p incarnation, for kernels of
 * @p device; to be let go once per call. It is mapped by the next ipc_map_open(), unless it is
 * mapped already. What a dead process left is never found again, since its successor has another
 * incarnation. FANIN_ERR_MEMORY.
 */
fanin_status ipc_map_take(ipc_map *map, int device, const uint8_t incarnation[16],
                          const ipc_key *key, ipc_mapping **out, fanin_error *error);
/** Whether ipc_map_open() has anything to do. */
bool ipc_map_is_behind(ipc_map *map);
/** Whether @p more will be taken while ipc_map_open() runs, or is about to: as long as it is so,
    that waits for it. */
void ipc_map_expect(ipc_map *map, bool more);
/**
 * Maps what was taken and is not mapped, in that order, one after the other: the driver takes some
 * 50 us to a millisecond for each, and several threads at once wait for one another in it
 * (docs/lab/first-pull.md). Sweeps if something cannot be mapped, and tries that again. How
 * each ended says ipc_mapping_check(). FANIN_ERR_TIMEOUT: @p stop; the rest is not opened. In any
 * thread, one at a time.
 */
fanin_status ipc_map_open(ipc_map *map, work_stop *stop, fanin_error *error);
/** Of opening, in the driver, since the map was made. */
uint64_t ipc_map_spent_ns(ipc_map *map);
/** FANIN_OK: it is mapped. Else why it could not be: errors of gpu_map(). */
fanin_status ipc_mapping_check(const ipc_mapping *mapping, fanin_error *error);
/** Where the allocation starts in this process. */
uint64_t ipc_mapping_base(const ipc_mapping *mapping);
/** *mapping NULL is fine. It stays mapped until the next sweep. */
void ipc_mapping_release(ipc_mapping **mapping);

/** Unmaps what nobody holds. No work that reads it may be under way. */
void ipc_map_sweep(ipc_map *map);
/** Work that reads the mappings may never end: they stay for good. */
void ipc_map_abandon(ipc_map *map);

#endif
