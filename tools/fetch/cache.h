/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The last steps of a whole model in memory of this host, each of them handed on by a relay of its
 * own. All are of one launch of the trainer.
 */
#ifndef CACHE_H
#define CACHE_H

#include "fetch/cache_memory.h"
#include "fetch/session.h"
#include "fetch/tensor_directory.h"

#include <fanin/relay.h>

typedef struct cache_copy {
    fanin_relay *relay; /**< NULL: no launch is known */
    cache_memory memory;
    bool held;
    uint64_t step;
} cache_copy;

typedef struct cache {
    session *session;
    const char *directory; /**< NULL: this process's memory */
    const char *networks;  /**< of readers on other hosts; NULL: none */
    const char *place;     /**< of the copies' relays */
    uint64_t rate; /**< bytes a second to readers in the networks; 0: no limit */
    bool trust_containers, verify;
    cache_copy *copies;
    size_t n;      /**< steps that are kept */
    size_t next;   /**< the copy that the next step takes */
    bool any;      /**< a step of this launch was seen */
    uint64_t last; /**< that step */
    uint8_t world_id[FANIN_WORLD_ID_SIZE];
    uint8_t (*incarnations)[16]; /**< of the launch's ranks, zeros: not known */
    size_t n_ranks;
    whole_tensors tensors; /**< their bytes with what lies between them */
} cache;

/** What one pull brought. */
typedef struct cache_step {
    uint64_t step, bytes, total_ns, from_origin, from_relays;
    uint8_t world_id[FANIN_WORLD_ID_SIZE];
    char how[160];
} cache_step;

/**
 * Looks which launch the session's client is connected to. Of another one than before the copies
 * are dropped; *@p dropped_out counts those that were held. Errors are fanin_relay_create()'s, and
 * FANIN_ERR_ARGUMENT: this host is in none of the networks.
 */
fanin_status cache_follow_launch(cache *c, size_t *dropped_out, fanin_error *error);

/** Whether the trainer forbids relays: nobody is to take from the copies. */
bool cache_is_forbidden(const cache *c, fanin_error *error);

/** Waits for a step that is newer than those seen. Errors are fanin_client_wait()'s. */
fanin_status cache_await(cache *c, uint32_t timeout_ms, uint64_t *step_out,
                         fanin_error *error);

/** Drops a step that the trainer has taken back since it was pulled; *@p step_out is that step.
    False: there is none. */
bool cache_drop_withdrawn(cache *c, uint64_t *step_out);

/** Pulls @p step or a later one into the copy of the oldest. Errors are fanin_relay_pull_into()'s
    and cache_memory_take()'s; that copy is lost then. FANIN_ERR_STALE also: the trainer's tensors
    became others meanwhile. */
fanin_status cache_pull(cache *c, uint64_t step, cache_step *out, fanin_error *error);

void cache_free(cache *c);

#endif
