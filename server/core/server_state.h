/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A server: what all rooms share of it.
 *
 * Threads: the trainer's threads (public functions), the control thread (listeners,
 * control sessions, UCX) and the data threads (data connections). Locks, in the order in
 * which they are taken: a publication's `writer`, then `lock`, then the commit hub's. The
 * registrar's lock is taken under `writer` or `collecting` or alone, never together with `lock`.
 * Under `lock` no function of the GPU is called and no catalog is freed (catalog_discard()).
 */
#ifndef SERVER_STATE_H
#define SERVER_STATE_H

#include "core/bucket.h"
#include "gpu.h"
#include "log.h"
#include "shards/registration.h"
#include "socket.h"
#include "tls.h"
#include "ucx.h"
#include <fanin/server.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

typedef struct publication publication;
typedef struct reader reader;
typedef struct commit commit;
typedef struct commit_hub commit_hub;
typedef struct peer_share peer_share;

/** What is to be logged of updates that readers held up. Guarded by the server's lock. */
typedef struct held_up_note {
    atomic_bool due; /**< read under no lock */
    bool cut;        /**< a peer was not waited for */
    unsigned times;  /**< updates since the last line */
    uint64_t ns;     /**< of the longest, and whose leases, and of what */
    char by[64], publication[80];
    uint64_t next; /**< when another line may come */
} held_up_note;

struct fanin_server {
    pid_t pid;
    char name[128];
    uint8_t world_id[16], incarnation[16];
    uint8_t *witness; /**< incarnation, of no forked child (below); NULL: no cma */
    uint32_t rank, world_size, flags, lease_ms, max_sessions, idle_ms, data_threads;
    uint32_t peer_cpu;     /**< thousandths of a CPU, 0: no limit (guests/peer.h) */
    uint32_t stranger_cpu; /**< the same of tensors sent to strangers, never 0 */
    uint32_t own_share_ms, stranger_share_ms; /**< of a minute (publish/lease.h) */
    bool is_nice; /**< its threads have the value nice; false: that of their creator */
    int nice;
    bool sessions_limited;                     /**< ... by the limit of open files */
    uint64_t max_memory, max_bytes_per_second; /**< 0: no limit (stream/stream.h) */
    socket_address address;                    /**< that it listens on, with the port */
    uint16_t port;
    bool has_unix; /**< its own user comes by a socket of its own */
    network *allow;
    size_t n_allow;
    logger log;
    tls_end *tls; /**< NULL: there is no secret */
    ucx *ucx;
    char ucx_why[512];  /**< why there is no UCX, "" otherwise */
    bool ucx_failed;    /**< ... although there should be */
    _Atomic(gpu *) gpu; /**< NULL until device memory is put */
    char host[64];

    int wake; /**< the control thread's (wake.h): something changed that sessions may wait
                 for, or is to be tidied */
    struct control *control;
    struct stream *stream;
    registrar registrar;

    atomic_uint_fast64_t memory;           /**< of all connections */
    atomic_uint_fast64_t parts;            /**< of that: shards/shard_catalog.h */
    atomic_uint_fast64_t network_memory;   /**< of that: all but the own user's */
    bucket lines[2];                       /**< of all peers together: guests/peer.h */
    atomic_uint_fast64_t unsaid, tell_at;  /**< lines left out, and when to tell */
    bucket strangers_work, strangers_sent; /**< guests/peer.h */
    atomic_uint_fast64_t rests;            /**< guests/peer.h */

    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t freed; /**< a lease or a send ended, or a drain; CLOCK_MONOTONIC */
    uint64_t counter;     /**< of epochs and catalog versions; never goes back */
    publication **publications; /**< ascending by name */
    size_t n_publications, publications_capacity;
    reader *readers;
    peer_share **peers; /**< ascending by key (guests/peer.h) */
    size_t n_peers, peers_capacity;
    uint64_t unsaid_forgotten;    /**< of peers that are not remembered any more */
    unsigned network_connections; /**< not of the own user */
    unsigned control_sessions, network_sessions; /**< all, and not of the own user */
    unsigned listeners; /**< parked waits and watches: whether a change wakes anybody */
    bool is_woken; /**< for changes that the control thread has not looked at yet */
    unsigned delta_sessions; /**< that have asked for patches */
    unsigned n_leases;
    bucket strangers_held_up; /**< what all strangers have had of their shares */
    held_up_note held_up;
    commit_hub *hub; /**< does not change */
    commit *commits; /**< pending, or withdrawn with a stream still to come */
    commit *untold;  /**< withdrawn or failed, to be logged by commit_tidy() */
    struct shard_catalog *garbage; /**< for garbage_collect() */
    pthread_mutex_t collecting; /**< held while some are freed; taken without `lock` */
    bool collects;              /**< a thread is at it, or will be */
    pthread_t collector;
    bool has_collector;       /**< to be joined; the control thread's alone */
    bool stopping;            /**< no begins any more */
    fanin_server_stats stats; /**< counters; gauges are filled in when asked for */
};

/** FANIN_OK, or FANIN_ERR_ARGUMENT or FANIN_ERR_FORKED with a sentence. */
fanin_status server_check(const fanin_server *s, fanin_error *error);
/** Lock held. The next number of the server's one counter. */
static inline uint64_t next_odd(fanin_server *s)
{
    s->counter += 1 + s->counter % 2;
    return s->counter;
}
static inline uint64_t next_even(fanin_server *s)
{
    s->counter += 2 - s->counter % 2;
    return s->counter;
}

/* ------------------------------------------------------------------- witness */

/* The proof for clients of cma that the process which they read is this server's. */

/** A copy of @p incarnation in a page of its own. A forked child, which may get the rank's number
    when the rank has died, lacks this page. NULL: there is none to be had. */
uint8_t *witness_make(const uint8_t incarnation[16]);
/** Also of a child, which does not have it. */
void witness_free(uint8_t **witness);

/* ------------------------------------------------------------------ yielding */

/* How much the server's threads let others of the process, and of the host, go first. */

/** The nice value of threads that have @p more than the calling one. */
int yielding_value(int32_t more);
/** For a thread of the server at its beginning: takes the server's nice value, if it has one. */
void yielding_begin(const fanin_server *s);

#endif
