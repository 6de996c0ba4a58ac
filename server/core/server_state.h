/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * What the parts of the server share.
 *
 * Threads: the trainer's threads (public functions), the control thread (listeners,
 * control sessions, UCX) and the data thread (data connections). Locks, in the order in
 * which they are taken: a publication's `writer`, then `lock`, then that of commit.c. The
 * registrar's lock is taken under `writer` or alone, never together with `lock`. Under
 * `lock` no function of the GPU is called and no catalog is freed (commit_discard()).
 */
#ifndef SERVER_STATE_H
#define SERVER_STATE_H

#include "clock.h"
#include "core/rules.h"
#include "gpu.h"
#include "log.h"
#include "messages.h"
#include "shards/shard_catalog.h"
#include "shards/shard.h"
#include "socket.h"
#include "ucx.h"
#include <fanin/server.h>

#include <pthread.h>
#include <stdatomic.h>

/* Caps of one control session (PROTOCOL.md, "Limits"). */
#define SESSION_LEASES 64
#define SESSION_WAITS 16
#define SESSION_WATCHES 16
#define SESSION_DATA 16

#define HELLO_MS 2000    /**< from accept to hello */
#define STALL_MS 10000   /**< a peer that owes room for bytes so long is dropped */
#define LINGER_MS 1000   /**< a refused peer gets so long to read why */
#define REFUSED_PEERS 16 /**< connections that are only told why, beyond max_sessions */
#define OUTPUT_PAUSE (2 << 20) /**< queued bytes beyond which no request is taken */
#define OUTPUT_MOST (8 << 20)  /**< queued bytes beyond which a session is dropped */
#define HISTORY 32             /**< state changes that a watcher may lag behind */
#define STABLE_SAMPLES 8
#define REASON_SIZE 256  /**< of a pause, with its NUL */
#define NAMES_MOST 65536 /**< publications' names in one server's life */

typedef enum publication_state {
    STATE_UNPUBLISHED = WIRE_STATE_UNPUBLISHED,
    STATE_STABLE = WIRE_STATE_STABLE,
    STATE_DRAINING = WIRE_STATE_DRAINING,
    STATE_WRITING = WIRE_STATE_WRITING,
    STATE_PAUSED = WIRE_STATE_PAUSED,
} publication_state;

typedef struct publication publication;
typedef struct reader reader;

/** A reader's right to the bytes of one epoch. It exists while the epoch stands. */
typedef struct lease {
    uint8_t token[16];
    publication *of; /**< NULL: this slot is free */
    uint64_t epoch;
    shard_catalog *catalog; /**< that it is for, with a reference */
    uint32_t first_region;  /**< of the arena that it is for (messages.h, begin_ok) */
    deadline expires;       /**< when begin_update stops waiting for it */
    reader *holder;
    struct lease *older, *newer; /**< of the publication */
} lease;

/** A lease whose epoch has gone. */
typedef struct void_lease {
    uint8_t token[16];
    publication *of; /**< NULL: this slot was never used */
} void_lease;

/** What a control session and its data connections share. Guarded by the server's lock. */
struct reader {
    uint8_t id[16]; /**< session id */
    unsigned references, n_data, n_leases;
    bool closed;
    uint64_t active_ns; /**< when bytes last went to it over a data connection */
    reader *next;
    lease leases[SESSION_LEASES];
    unsigned n_void; /**< ever; the last ones are remembered */
    void_lease gone[SESSION_LEASES];
};

typedef struct state_change {
    uint64_t step;
    publication_state state;
} state_change;

/** Whether a publication's commits publish the shards themselves or copies of them. */
typedef enum publication_mode {
    MODE_UNKNOWN, /**< no commit has taken effect yet */
    MODE_REFERENCE,
    MODE_SNAPSHOT,
} publication_mode;

/** Reads of published memory by the data thread that are under way, by their lease's epoch. */
typedef struct reading {
    uint64_t epoch;
    unsigned count; /**< 0: this slot is free */
} reading;
#define READING_EPOCHS 4 /**< more than can stand at a time */

struct commit;

/** Never freed before the server: its name's last step outlives a removal. */
struct publication {
    char name[PUBLICATION_NAME_SIZE];

    pthread_mutex_t writer; /**< put, remove, set_metadata, commit: one at a time */
    shard_set shards;       /**< guarded by writer */
    fanin_pair *pairs;      /**< guarded by writer; one allocation */
    size_t n_pairs;
    uint64_t revision; /**< guarded by writer: grows whenever a new catalog is due */

    /* Guarded by the server's lock. */
    bool present; /**< it is there; false: removed */
    publication_state state;
    publication_mode mode;
    fanin_dtype cast; /**< of a snapshot publication's commits */
    bool update_open; /**< between begin_update and commit or abort */
    bool aborted;     /**< the last update of a snapshot publication was */
    /** between pause and resume; unreadable unless it is stable, which a snapshot stays */
    bool paused;
    bool was_stable; /**< when it was paused */
    char reason[REASON_SIZE];
    uint64_t
        epoch; /**< odd: unreadable; of snapshots the published arena's generation */
    /** the generation that still stands of an arena that is not published any more; 0: none */
    uint64_t previous;
    unsigned arena;                  /**< the published one, 0 or 1 */
    const struct arena_set *filling; /**< that holds the arena being filled, or NULL */
    unsigned filling_arena;
    unsigned waiting; /**< threads that wait for leases to end, other than draining */
    struct commit
        *pending; /**< a commit that has not taken effect yet, with a reference */
    bool has_step;
    uint64_t step;
    shard_catalog
        *catalog;      /**< of the last commit, or NULL; changed under both locks */
    uint64_t n_shards; /**< for statistics */
    lease *oldest, *newest;
    reading reading[READING_EPOCHS];
    uint64_t entered_at; /**< clock_ns() when it came into its state, or anew into it */
    uint64_t committed_at;      /**< clock_ns() of the last commit */
    uint64_t committed_unix_ns; /**< the same as the time of day */
    uint64_t stable_ns[STABLE_SAMPLES];
    unsigned n_stable;
    uint64_t changes; /**< ever; change i is history[i % HISTORY] */
    state_change history[HISTORY];
};

/** Connections of one address; those of the server's own user are not counted. */
typedef struct peer_count {
    uint8_t address[17]; /**< family and bytes */
    unsigned connections;
    struct peer_count *next;
} peer_count;

struct control;
struct stream;
struct commit_hub;

struct fanin_server {
    pid_t pid;
    char name[128];
    uint8_t world_id[16], incarnation[16];
    uint32_t rank, world_size, flags, lease_ms, max_sessions, idle_ms;
    uint64_t max_memory;
    socket_address address; /**< that it listens on, with the port */
    uint16_t port;
    network *allow;
    size_t n_allow;
    logger log;
    ucx *ucx;
    char ucx_why[512];  /**< why there is no UCX, "" otherwise */
    bool ucx_failed;    /**< ... although there should be */
    _Atomic(gpu *) gpu; /**< NULL until device memory is put */
    char host[64];

    int wake; /**< the control thread's (core/wake.h): something changed that sessions may wait
                 for, or is to be tidied */
    struct control *control;
    struct stream *stream;
    registrar registrar;

    atomic_uint_fast64_t memory; /**< of all connections */

    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t freed; /**< a lease or a send ended, or a drain; CLOCK_MONOTONIC */
    uint64_t counter;     /**< of epochs and catalog versions; never goes back */
    publication **publications; /**< ascending by name */
    size_t n_publications, publications_capacity;
    reader *readers;
    peer_count *peers;
    unsigned listeners; /**< parked waits and watches: whether a change wakes anybody */
    unsigned n_leases;
    struct commit_hub *hub;   /**< does not change */
    struct commit *commits;   /**< pending, or withdrawn with a stream still to come */
    struct commit *untold;    /**< withdrawn or failed, to be logged by commit_tidy() */
    shard_catalog *garbage;   /**< without references, to be freed by commit_tidy() */
    bool stopping;            /**< no begins any more */
    fanin_server_stats stats; /**< counters; gauges are filled in when asked for */
};

/* ------------------------------------------------------ server_state.c */

/** FANIN_OK, or FANIN_ERR_ARGUMENT or FANIN_ERR_FORKED with a sentence. */
fanin_status server_check(const fanin_server *s, fanin_error *error);
/* ------------------------------------------------------- publication.c */

/** "stable", ...: static. */
const char *state_name(publication_state state);
/** How every call that names a publication begins: server_check(), publication_name_check(). */
fanin_status publication_call_check(const fanin_server *server, const char *name,
                                    fanin_error *error);
/** Lock held. NULL: no such name was ever used. */
publication *publication_find(const fanin_server *s, const char *name);
/** Lock held. Finds or makes the object; *out may be absent (present false).
    FANIN_ERR_MEMORY, FANIN_ERR_LIMIT. */
fanin_status publication_obtain(fanin_server *s, const char *name, publication **out,
                                fanin_error *error);
/** Lock held. Marks it as there, unpublished. FANIN_ERR_LIMIT. */
fanin_status publication_appear(fanin_server *s, publication *p, fanin_error *error);
/**
 * Lock held, given up while waiting. Drains if readable, turns the epoch odd, voids
 * the leases, waits for sends. FANIN_ERR_STATE: another thread is draining it.
 */
fanin_status publication_open_update(fanin_server *s, publication *p,
                                     fanin_error *error);
/** The same for changes outside of begin_update: waits for another thread's draining; an
    unreadable publication only loses its pending commit, a snapshot publication stays readable.
    Lock held. */
void publication_make_unreadable(fanin_server *s, publication *p);
/** Lock held, given up while waiting; not paused, no update is open. Nothing is granted, and no
    shard is read by this process, any more when it returns. */
void publication_pause(fanin_server *s, publication *p, const char *reason);
/** Lock held. Whether readers are told that it is paused. */
bool publication_is_away(const publication *p);
/** Lock held. FANIN_ERR_STATE if it is paused. */
fanin_status publication_check_paused(const publication *p, const char *phase,
                                      fanin_error *error);
/** Lock held. Nobody reads anything of it afterwards, snapshots neither. */
void publication_close(fanin_server *s, publication *p);
/** Lock held. Whether bytes may still be read under a lease of that epoch. */
bool publication_stands(const publication *p, uint64_t epoch);
/** Lock held. Announces that the data thread reads memory under that epoch; false: it has gone, or
    too many others are still being read: then its leases are void, as if it had gone.
    Every read that was announced is to be left, also when the epoch has gone meanwhile. */
bool publication_read_enter(fanin_server *s, publication *p, uint64_t epoch);
void publication_read_leave(fanin_server *s, publication *p, uint64_t epoch);
/** Lock held, given up while waiting: until nothing is read under an epoch that has gone. */
void publication_wait_for_reads(fanin_server *s, publication *p);
/** Lock held. Waits for s->freed, at most until then. */
void publication_wait(fanin_server *s, deadline at);
/** Lock held. The next number of the server's one counter. */
uint64_t next_odd(fanin_server *s);
uint64_t next_even(fanin_server *s);
/** Lock held. Sets the state, remembers the change and wakes the control thread. */
void publication_enter(fanin_server *s, publication *p, publication_state state);
/** Lock held. Mean time that it was stable between its last commits, 0: unknown. */
uint64_t publication_stable_ns(const publication *p);
/** Lock held. Writes names of publications, comma-separated, cut to @p size. */
void publication_names(const fanin_server *s, char *out, size_t size);
void publications_free(fanin_server *s);

/* ------------------------------------------------------------ commit.c */

/** How long a commit waits for one that has not taken effect, and for itself if it is asked to;
    and whoever changes shards for a copy of them that is under way. */
#define COMMIT_WAIT_MS 60000

fanin_status commit_create(fanin_server *s, fanin_error *error);
/** Takes the writer lock, then the lock, once nothing is pending; waits at most COMMIT_WAIT_MS for
    that. FANIN_ERR_TIMEOUT: none is held. */
fanin_status commit_enter(fanin_server *s, publication *p, fanin_error *error);
/** The catalog of the publication's shards, by reference, with a reference: its last one if
    nothing has changed. With the writer lock. FANIN_ERR_MEMORY, FANIN_ERR_LIMIT. */
fanin_status commit_make_catalog(fanin_server *s, publication *p, shard_catalog **out,
                                 fanin_error *error);
/** Lock held. Makes it the publication's. */
void commit_set_catalog(fanin_server *s, publication *p, shard_catalog *catalog);
/** Lock held. Whether it publishes a copy of the shards. */
bool commit_is_copy(const struct commit *c);
/** Lock held. Lets the pending commit take effect if its stream has got there. */
void commit_settle(fanin_server *s, publication *p);
/** Lock held. The pending commit, unless it can take effect now, never will. @p why completes
    "was not published: ..."; static. */
void commit_withdraw(fanin_server *s, publication *p, const char *why);
/** Waits, at most COMMIT_WAIT_MS, until no copy of the publication's shards is under way. With
    the writer lock. FANIN_ERR_TIMEOUT. */
fanin_status commit_wait_for_copies(fanin_server *s, publication *p,
                                    fanin_error *error);
/** Settles what can be settled, logs and frees what was put off. No lock held. */
void commit_tidy(fanin_server *s);
/** Withdraws everything; streams that get there later find nothing. NULL hub is fine. */
void commit_stop(fanin_server *s);
/** After commit_stop() and the threads' ends. */
void commit_destroy(fanin_server *s);
/** Lock held. Gives a reference back; commit_tidy() frees what is left without one. */
void commit_discard(fanin_server *s, shard_catalog *catalog);
/** The same, lock not held: for the threads that serve readers, which should not wait while
    what is freed with a catalog (arenas, registered memory) goes. NULL is fine. */
void commit_retire(fanin_server *s, shard_catalog *catalog);

/* ------------------------------------------------------------- lease.c */

/** All with the lock held. */
reader *reader_make(fanin_server *s); /**< NULL: no memory or random bytes */
reader *reader_find(const fanin_server *s, const uint8_t id[16]);
void reader_close(fanin_server *s, reader *r);   /**< drops its leases */
void reader_release(fanin_server *s, reader *r); /**< frees with the last reference */
/** NULL: all slots are taken, or no random bytes. */
lease *lease_grant(fanin_server *s, reader *r, publication *p);
lease *lease_find(reader *r, const uint8_t token[16]);
/** The publication of a lease that was taken away, NULL: there was none (lately). */
publication *lease_find_void(reader *r, const uint8_t token[16]);
void lease_drop(fanin_server *s, lease *l);
/** Takes a lease away: its end will not be good. */
void lease_void(fanin_server *s, lease *l);
void lease_void_all(fanin_server *s, publication *p);
void lease_void_epoch(fanin_server *s, publication *p, uint64_t epoch);
/** Those whose epoch has gone. */
void lease_void_strays(fanin_server *s, publication *p);

/* ------------------------------------------------------------ messages */

typedef enum kind { KIND_REQUEST, KIND_REPLY, KIND_UNKNOWN } kind;

/** What a server makes of a message's type. */
static inline kind message_kind(unsigned type)
{
    if (type == MSG_ERROR)
        return KIND_REPLY;
    if (type == MSG_AUTH || type == 0 || type > MSG_DIGEST_OK)
        return KIND_UNKNOWN;
    return type % 2 == 1 ? KIND_REQUEST : KIND_REPLY;
}

/* --------------------------------------------------------- admission.c */

/** One network peer gets at most half of the connections, but never less than two: one for
    control and one for data. */
unsigned most_per_peer(const fanin_server *s);
/** Why a connection is refused: FANIN_ERR_AUTH or FANIN_ERR_LIMIT with a sentence. On
    FANIN_OK it is counted; *counted_out may be NULL. Takes the lock. */
fanin_status admit(fanin_server *s, int fd, const socket_address *peer,
                   peer_count **counted_out, fanin_error *error);
/** The connection is gone. Takes the lock. */
void dismiss(fanin_server *s, peer_count *counted);
/** Counts @p now instead of *counted bytes; false: more than max_memory in all. */
bool memory_account(fanin_server *s, size_t *counted, size_t now);
/** Whether @p more bytes still fit. */
bool memory_fits(const fanin_server *s, size_t more);

#endif
