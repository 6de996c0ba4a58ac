/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Catalogs the client keeps between pulls: the key table once a publication, each rank's box and
 * region tables by incarnation and catalog version, and the plan made from them.
 */
#ifndef TABLES_H
#define TABLES_H

#include "client_state.h"

/** What a rank announced for a publication (reply to a wait). */
typedef struct announcement {
    bool valid;
    uint64_t step, version, stable_ns;
    digest keys;
} announcement;

/** A rank's tables at one catalog version of one incarnation. */
typedef struct shard_table {
    uint64_t generation, version; /**< of the connection and the catalog; 0: nothing */
    box_table *boxes;
    region_table *regions; /**< NULL until a one-sided path needs them */
    fanin_path regions_path;
    ucx_rkey **rkeys; /**< one a region; belong to the peer's endpoint */
} shard_table;

/** A group of pieces that one read request asks for. */
typedef struct read_request {
    uint64_t first_piece;
    uint32_t n_pieces, n_entries;
    uint64_t first_entry;
    uint64_t bytes;
} read_request;

/** How one source of a plan is read by stream: made once, used by every pull. */
typedef struct read_list {
    read_request *requests;
    uint64_t n_requests;
    read_entry *entries;
} read_list;

/** A plan and what it was made from. */
typedef struct plan_cache {
    bool valid;
    digest made_from; /**< of tables, participants and destination layout */
    plan *plan;
    plan_source *sources;
    size_t *peer_of; /**< source -> peer */
    size_t n_sources;
    read_list *lists;   /**< a source, made when first read by stream */
    plan_spans **spans; /**< a source, made when first read one-sidedly */
} plan_cache;

struct publication {
    publication *next;
    char name[80];
    key_table *keys;
    shard_table *shards; /**< one a peer */
    size_t n_peers;
    plan_cache plans[2]; /**< memory, adapter */
};

/** The cache of @p name, made if need be. NULL: out of memory. */
publication *tables_of(fanin_client *client, const char *name);
void tables_free_all(fanin_client *client);
/** The endpoint of peer @p index is about to go, and its remote keys with it. */
void tables_forget_rkeys(fanin_client *client, size_t index);
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

/** The same for the region tables of peers with want[i], for @p path. */
fanin_status tables_sync_regions(fanin_client *client, publication *p, const bool *want,
                                 fanin_path path, deadline at, fanin_error *error);

#endif
