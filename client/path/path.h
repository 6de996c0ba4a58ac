/* SPDX-License-Identifier: Apache-2.0 */
/** @file Which path each rank's bytes take: by what both ends can do, proven by a probe read. */
#ifndef PATH_H
#define PATH_H

#include "catalog/tables.h"

/** Where the bytes are to go, and what that led to. */
typedef struct path_goal {
    const memory_range *ranges;
    size_t n_ranges;
    int gather_device; /**< out: that collects what cuda_ipc brings to host memory; -1: none */
    uint64_t map_ns; /**< out: spent on mapping other processes' memory */
} path_goal;

/**
 * Decides the path of every peer with want[i] that has none yet for this publication and sets it
 * up (endpoint, regions, remote keys, mappings); for those that have one, brings keys and
 * mappings to the current tables and the goal's devices. Sets peer.path and peer.reason.
 * FANIN_ERR_UNSUPPORTED: the path that the configuration forces does not work (says why). With
 * FANIN_PATH_AUTO what fails falls back to stream and peer.reason says why.
 */
fanin_status path_prepare(fanin_client *client, publication *p, const bool *want,
                          path_goal *goal, deadline at, fanin_error *error);

#endif
