/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Catalogs the client keeps between pulls: the key table once a publication, each rank's box and
 * region tables by incarnation and catalog version, and the plan made from them.
 */
#ifndef TABLES_H
#define TABLES_H

#include "device/ipc_map.h"
#include "array.h"
#include "net/client_state.h"
#include "plan/read_list.h"

/** What a rank announced for a publication (reply to a wait). */
typedef struct announcement {
    bool valid;
    uint64_t step, version, stable_ns;
    digest keys;
} announcement;

/** A rank's regions as kernels of one device see them (path cuda_ipc). */
typedef struct ipc_view {
    int device;
    ipc_mapping **mappings; /**< one a region */
} ipc_view;

/** A rank's tables at one catalog version of one incarnation. */
typedef struct shard_table {
    uint64_t generation, version; /**< of the connection and the catalog; 0: nothing */
    box_table *boxes;
    region_table *regions; /**< NULL until the choice of a path needs them */
    fanin_path regions_path;
    ucx_rkey **rkeys;  /**< one a region; belong to the peer's endpoint */
    ipc_key *ipc_keys; /**< one a region, of path cuda_ipc; NULL: not decoded yet */
    ipc_view *views;   /**< one a device that reads this rank's regions */
    size_t n_views, view_capacity;
    fanin_path path; /**< how these regions are read; FANIN_PATH_AUTO: not decided */
    char reason[PATH_REASON];
} shard_table;

/** A plan and what it was made from. */
typedef struct plan_cache {
    bool valid;
    bool lacks_rank;  /**< there is none for want of a rank that is gone */
    digest made_from; /**< of tables, participants and destination layout */
    plan *plan;
    plan_source *sources;
    size_t *peer_of; /**< source -> peer */
    size_t n_sources;
    read_list *lists;     /**< a source, made when first read by stream */
    plan_spans **spans;   /**< a source, made when first read one-sidedly */
    fanin_path *spans_of; /**< a source: the path that its spans were cut for */
    memory_range *ranges; /**< the destination's, if they follow from its layout */
    size_t n_ranges;
    struct device_plan *device; /**< copy tables of path cuda_ipc; NULL: none yet */
} plan_cache;

struct publication {
    publication *next;
    char name[80];
    key_table *keys;
    shard_table *shards; /**< one a peer */
    size_t n_peers;
    uint64_t used_ns;         /**< when the last pull of it began, clock_ns() */
    plan_cache plans[2];      /**< memory, adapter */
    int gather_device_plus_1; /**< collects cuda_ipc's bytes for host memory; 0: none yet */
};

/** The cache of @p name, made if need be. NULL: out of memory. */
publication *tables_of(fanin_client *client, const char *name);
void tables_free_all(fanin_client *client);
/** The ranks do not publish it any more: drops what is known of it, and unmaps its memory. */
void tables_forget(fanin_client *client, publication *p);
/** The publication is paused: unmaps its memory, which the trainer wants to free, and keeps the tables.
    No kernel may be under way. */
void tables_unmap(fanin_client *client, publication *p);
/** The regions of @p s as @p device sees them, NULL: not mapped for it. */
const ipc_view *tables_view(const shard_table *s, int device);
/** Unmaps the memory of publications of which no pull has begun since @p since_ns: their owners may
    want to free it, and a removal is told only to who asks for it. No kernel may be under way. */
void tables_unmap_idle(fanin_client *client, uint64_t since_ns);
/** The endpoint of peer @p index is about to go, and its remote keys with it: nothing is decided
    about its paths any more. */
void tables_forget_paths(fanin_client *client, size_t index);
void plan_cache_clear(plan_cache *cache);

/**
 * Brings the tables of all peers with use[i] to what they announced; asks only for what
 * changed, each rank in parallel, the key table from one rank. FANIN_ERR_STALE: a rank's
 * catalog moved on meanwhile. FANIN_ERR_MISMATCH: key tables that differ (says how),
 * FANIN_ERR_PROTOCOL, FANIN_ERR_LIMIT (client's max_catalog), and connection errors.
 */
fanin_status tables_sync(fanin_client *client, publication *p,
                         const announcement *announced, const bool *use, deadline at,
                         fanin_error *error);

/** The same for the region tables of peers with want[i], for @p path. @p refused (may be NULL,
    else one a peer, initialized): a rank that is there and gives none gets its error there, and
    the others go on. */
fanin_status tables_sync_regions(fanin_client *client, publication *p, const bool *want,
                                 fanin_path path, deadline at, fanin_error *refused,
                                 fanin_error *error);

#endif
