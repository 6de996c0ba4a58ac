/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Reading by cuda_ipc: a kernel on each destination device reads all ranks' mapped memory and
 * writes the final places. What goes to host memory is gathered in chunks on one device or
 * several, each of which copies its own by its copy engine, straight to the destination if CUDA may
 * write it, else by way of pinned chunks that threads empty. The servers take no part.
 */
#ifndef DEVICE_READER_H
#define DEVICE_READER_H

#include "device/ipc_map.h"
#include "ipc/device_plan.h"
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

#endif
