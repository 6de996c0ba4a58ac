/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Catalogs the client keeps between pulls: the key table once a publication, each rank's box table
 * by incarnation and catalog version.
 */
#ifndef TABLES_H
#define TABLES_H

#include "catalog.h"
#include "net/client_state.h"
#include "net/threads.h"
#include "patch.h"

/** What a rank announced for a publication (reply to a wait). */
typedef struct announcement {
    bool valid;
    uint64_t step, version, stable_ns;
    uint64_t digest_bytes; /**< that one digest may ask for */
    digest keys;
    patch_offers
        patches; /**< that lead there; of generation 0: it was not asked for them, or has
                               none */
} announcement;

/** A rank's tables at one catalog version of one incarnation. */
typedef struct shard_table {
    uint64_t generation, version; /**< of the connection and the catalog; 0: nothing */
    uint64_t serial; /**< what was made from other tables has another one */
    box_table *boxes;
} shard_table;

/** What a call needs the boxes of. Keys are few of a large table where experts are spread over many
    workers: nobody then fetches, keeps and proves all. */
typedef struct key_need {
    void *cookie;
    /** names the need: equal digests want the same keys of the same key table */
    digest (*name)(void *cookie);
    /** sets marks[key] of each key that is wanted */
    void (*mark)(void *cookie, const key_table *keys, bool *marks);
    /** while threads decode boxes: what follows from the key table alone may be made. NULL: nothing
        */
    void (*meanwhile)(void *cookie, const key_table *keys);
} key_need;

/** Of fewer keys than that all boxes are fetched. */
#define PARTS_FROM 4096
#define NEEDS_KNOWN 4

struct publication {
    publication *next;
    char name[80];
    key_table *keys;
    shard_table *shards; /**< one a peer */
    size_t n_peers;
    /** keys whose boxes are fetched of every rank: what all needs so far came to, growing. Empty:
        not
        known yet */
    key_set wanted;
    digest needs[NEEDS_KNOWN]; /**< names of such that wanted has all of */
    size_t n_needs;            /**< that there were */
    /** of the call that runs, the caller's; NULL: what was wanted before, all at first */
    const key_need *need;
    uint64_t serials;          /**< that tables have had */
    uint64_t used_ns;          /**< when the last pull of it began, clock_ns() */
    struct path_states *paths; /**< of path/; NULL: none yet */
    struct plan_cache *plans;  /**< of pull/; NULL: none yet */
};

/** The cache of @p name, made if need be, which is the client's first from now on. NULL: out of
    memory. */
publication *tables_of(fanin_client *client, const char *name);
/** Takes *@p at out of the client's list, and frees it. */
void tables_free(publication **at);
/** The ranks do not publish it any more: drops their tables. */
void tables_forget(publication *p);

/** Of all keys: for whoever lists a catalog. */
extern const key_need need_all;
/** Whether the peer's boxes of all wanted keys are at hand, of whatever version. */
bool tables_at_hand(const publication *p, size_t peer);

/**
 * Brings the tables of all peers with use[i] to what they announced; asks only for what
 * changed or was not wanted before, each rank in parallel, the key table from one rank. A rank
 * that knows no parts gives all. FANIN_ERR_STALE: a rank's
 * catalog moved on meanwhile. FANIN_ERR_MISMATCH: key tables that differ (says how),
 * FANIN_ERR_PROTOCOL, FANIN_ERR_LIMIT (client's max_catalog), and connection errors.
 */
fanin_status tables_sync(fanin_client *client, publication *p,
                         const announcement *announced, const bool *use, deadline at,
                         fanin_error *error);

/** Of a table of @p p that was not taken: who sent it, or that the call was cancelled. */
fanin_status tables_end_decoding(const client_work *work, const peer *p,
                                 fanin_status status, fanin_error *error);

/** The caller sets peer, type, request and maybe here; the rest is the fetch's. */
typedef struct fetch fetch;
struct fetch {
    size_t peer;
    message_type type; /**< MSG_KEYS, MSG_BOXES, MSG_REGIONS */
    msg_blob_request request;
    key_set keys;   /**< of MSG_BOXES: asked for, empty: all; fetch_free() frees */
    buffer ranges;  /**< as request.keys; likewise */
    buffer data;    /**< the blob; likewise */
    uint64_t total; /**< its size, as the page before said */
    void (*here)(void *cookie, fetch *f); /**< called when it is; may be NULL */
    void *cookie;
    fanin_client *client;
    size_t *left;
    uint64_t asked_ns; /**< 0: it has an end */
    fanin_error error; /**< its status is the fetch's */
};

/** Asks for all: *left is their number, and falls as they end while the loop runs. */
void fetch_ask(fanin_client *client, fetch *fetches, size_t n, size_t *left);
/** None is waited for any longer, for @p status says how the waiting ended; the first error in
    their order. */
fanin_status fetch_settle(fanin_client *client, fetch *fetches, size_t n,
                          fanin_status status, fanin_error *error);

/** All at once; the first error in their order. Bounded by the client's max_catalog. */
fanin_status fetch_all(fanin_client *client, fetch *fetches, size_t n, deadline at,
                       fanin_error *error);
void fetch_free(fetch *fetches, size_t n);

#endif
