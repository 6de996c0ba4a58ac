/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Reading by cuda_ipc: a kernel on each destination device reads all ranks' mapped memory and
 * writes the final places. Long runs that are read once go by copy engines. What goes to host
 * memory is gathered in chunks on one device or several, each of which copies its own by its copy
 * engine, straight to the destination if CUDA may write it, else by way of pinned chunks that
 * threads empty. The servers take no part.
 */
#ifndef IPC_H
#define IPC_H

#include "device/ipc_map.h"
#include "ipc/device_plan.h"
#include "net/threads.h"
#include "path/path.h"
#include "plan/plan.h"

/** A rank's regions as kernels of one device see them. */
typedef struct ipc_view {
    int device;
    bool whole;             /**< what the plan `covers` reads is mapped */
    digest covers;          /**< id of a path_plan; zeros: anything */
    ipc_mapping **mappings; /**< one a region; NULL: nothing has read it yet */
} ipc_view;

/** A rank's regions, as kernels read them. */
typedef struct ipc_regions {
    path_hold hold; /**< first: what the path keeps */
    const region_table *regions;
    ipc_key *keys;   /**< one a region */
    ipc_view *views; /**< one a device that reads them */
    size_t n_views, view_capacity;
} ipc_regions;

/** The regions as @p device sees them, NULL: not mapped for it. */
const ipc_view *ipc_view_of(const ipc_regions *r, int device);
/** Lets go of its first @p n mappings, as far as there are. */
void ipc_view_drop(ipc_view *view, uint32_t n);
/** Of a hold: lets go of all, and frees it. */
void ipc_regions_drop(fanin_client *client, size_t peer, path_hold *hold);

/** Where the bytes of a source are. */
typedef struct device_source {
    const ipc_regions *regions;
    uint32_t first_region; /**< as in reader_lease */
} device_source;

typedef struct device_reader device_reader;

/** Begins; kernels are queued by the step that finds the work of r->after done. @p sources: one a
    source, those in the plan are filled in. All that is given outlives the reader. Errors of the
    GPU; FANIN_ERR_MEMORY; FANIN_ERR_PROTOCOL: of a region or arena there is less than is read. On
    an error *out may be there nevertheless: it is to be destroyed. */
fanin_status device_reader_start(const path_reading *r, const device_plan *plan,
                                 const device_source *sources, device_reader **out,
                                 fanin_error *error);
/**
 * Lands what has come and queues what comes next; waits until @p until at most if nothing has
 * happened (0: does not wait). *done_out: everything is in place. FANIN_ERR_TRANSPORT: a device
 * failed.
 */
fanin_status device_reader_step(device_reader *r, deadline until, bool *done_out,
                                fanin_error *error);
uint64_t device_reader_bytes(const device_reader *r); /**< in place so far */
uint64_t device_reader_scatter_ns(const device_reader *r);
/** Waits for kernels and copies that are under way: they are short and cannot be recalled. False:
    a device does not end them; then the plan, the mappings and the destinations must never be
    freed. NULL is fine. */
bool device_reader_destroy(device_reader **r);

/* -------- What of a rank's regions is mapped for kernels of which device. */

/** Kernels of one device that are to read one rank's regions. */
typedef struct regions_use {
    path_round *round;
    size_t index; /**< the rank's peer */
    ipc_regions *shard;
    uint32_t rank;
    int device;
    bool fresh; /**< the rank's path is not decided yet */
} regions_use;

/** What is kept of the peer's regions; NULL: nothing yet. */
ipc_regions *regions_kept(const path_round *r, size_t peer);
/** Makes it from s->regions if need be. FANIN_ERR_UNSUPPORTED: some have no IPC handle;
    FANIN_ERR_PROTOCOL. */
fanin_status regions_hold(path_state *s, uint32_t rank, fanin_error *error);

/** Names what the round's plan reads. */
digest regions_plan_id(const path_round *r);
/** NULL: nothing was taken for the device. */
ipc_view *regions_view(const regions_use *r);
/** Whether all is mapped that the plan reads. */
bool regions_covered(const regions_use *r);
/** Whether the plan, which may be none, reads the region. */
bool regions_needed(const regions_use *r, uint32_t region);
/** Takes what the plan reads and is not taken, without a plan all; ipc_map_open() then maps it.
    FANIN_ERR_UNSUPPORTED: the device does not reach a GPU that holds some of it. */
fanin_status regions_take(const regions_use *r, fanin_error *error);
/** The path is given up: what was taken for the device is let go. */
void regions_release(const regions_use *r);

/* Other processes' memory is mapped beside what else a first pull does: the driver maps one
   allocation after the other, so a thread waits for it. It begins when ranks have announced a
   catalog whose tables are not here yet; their regions are asked for before those. */

/** The thread that opens what is taken. Zeroed: none. */
typedef struct map_opener {
    const fanin_client *client;
    ipc_map *map;
    workers *thread;
    uint64_t before_ns; /**< spent by openers before it */
} map_opener;

/** @p threads false: the caller does it in map_opener_finish(). False: no memory. */
bool map_opener_start(map_opener *o, fanin_client *client, deadline at, bool threads);
/** Nothing is taken any more; returns when all is opened, or was tried. FANIN_ERR_TIMEOUT,
    FANIN_ERR_CANCELLED. */
fanin_status map_opener_finish(map_opener *o, uint64_t *spent_ns, fanin_error *error);
/** Stops it where it is. */
void map_opener_close(map_opener *o);

/** Begins to map what ranks have announced, which goes on beside all that is done until the probe.
    It fails silently: then the probe has more to do. NULL: nothing is begun. @p self: this path. */
void *map_ahead_begin(const path_reader *self, fanin_client *client, publication *p,
                      const path_foresight *known, deadline at);
/* Of all these @p ahead may be NULL. */
/** Stops it where it is. */
void map_ahead_free(void *ahead);
/** No region is waited for any longer. */
void map_ahead_settle(void *ahead);
/** NULL: there is none. */
map_opener *map_ahead_opener(void *ahead);
/** Stops opening. */
void map_ahead_close(void *ahead);

extern const path_reader ipc_reader;

/** See path_reader. */
fanin_status ipc_probe(path_round *r, bool *open, fanin_error *error);
void ipc_unmap(fanin_client *client, publication *p);

#endif
