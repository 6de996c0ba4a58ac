/* SPDX-License-Identifier: Apache-2.0 */
/** @file What of a rank's regions is mapped for kernels of which device. */
#ifndef MAPPED_REGIONS_H
#define MAPPED_REGIONS_H

#include "ipc/device_reader.h"

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
void regions_let_go(const regions_use *r);

#endif
