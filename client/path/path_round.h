/* SPDX-License-Identifier: Apache-2.0 */
/** @file What deciding about paths needs, whichever they are. */
#ifndef PATH_ROUND_H
#define PATH_ROUND_H

#include "catalog/tables.h"

/* A probe on a healthy path takes microseconds on one host, milliseconds over a fabric
   (the first get also connects). */
#define PROBE_MS 3000
/* Turns of UCX in which answers that have come are taken, and one more for each rank. */
#define PROBE_TURNS 64

/** Where the bytes are to go, and what that led to. */
typedef struct path_goal {
    const memory_range *ranges;
    size_t n_ranges;
    int gather_device; /**< out: that collects what cuda_ipc brings to host memory; -1: none */
    uint64_t map_ns; /**< out: spent on mapping other processes' memory */
} path_goal;

/** One call of path_prepare(). */
typedef struct path_round {
    fanin_client *client;
    publication *publication;
    const bool *want;
    path_goal *goal;
    deadline at;
    int devices[GPU_MAX_DEVICES]; /**< that the destination is on */
    size_t n_devices;
    bool host;            /**< some of the destination is host memory */
    fanin_error *refused; /**< one a peer, for tables_sync_regions() */
} path_round;

/** What a rank's regions are. */
typedef enum region_kinds { KINDS_HOST, KINDS_CUDA, KINDS_BOTH } region_kinds;
region_kinds region_kinds_of(const region_table *regions);

/** The peer's path for this publication from now on, and why. */
void path_set(path_round *r, size_t index, fanin_path path, const char *reason);
/** path_set(), and the log told. */
void path_choose(path_round *r, size_t index, fanin_path path, const char *reason);
/** One rank's better path did not come about: stream, or an error if it was forced or if the
    rank itself was lost. */
fanin_status path_give_up(path_round *r, size_t index, const char *why,
                          fanin_error *error);
/** Region tables of peers with mask[i] for @p path; who refuses them is given up and its mask
    cleared. */
fanin_status path_regions(path_round *r, bool *mask, fanin_path path,
                          fanin_error *error);

/* ---- UCX: cma and rdma (path_ucx.c) ---- */

/** Endpoints, remote keys and a probe for the undecided peers with fresh[i]. */
fanin_status path_try_ucx(path_round *r, bool *fresh, fanin_path path,
                          fanin_error *error);
/** Regions and remote keys of peers with mask[i], whose endpoints are there. */
fanin_status path_ucx_keys(path_round *r, bool *mask, fanin_path path,
                           fanin_error *error);

/* ---- CUDA IPC (path_ipc.c) ---- */

/** Mappings and a probe for the undecided peers with fresh[i], and what is missing for those
    that are on the path already. */
fanin_status path_try_ipc(path_round *r, bool *fresh, fanin_error *error);

#endif
