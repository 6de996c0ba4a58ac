/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A publication: shards under a name, and what readers get of them.
 *
 * What readers get changes in two ways only:
 *
 *   - publication_take_effect(): a catalog is readable from now on, under a new even epoch;
 *   - publication_advance(): what was readable is not any more, and what was read under the
 *     epoch before is worth nothing. A commit that fills an arena does the same to the copy
 *     that is not published any more.
 *
 * commit_settle() (commit.h) decides whether a commit whose streams have got there takes effect.
 */
#ifndef PUBLICATION_H
#define PUBLICATION_H

#include "clock.h"
#include "core/server_state.h"
#include "messages.h"
#include "shards/shard_catalog.h"
#include "trace.h"

#define HISTORY 32 /**< state changes that a watcher may lag behind */
#define STABLE_SAMPLES 8
#define TAKEN_BACK 64
#define REASON_SIZE 256  /**< of a pause, with its NUL */
#define READING_EPOCHS 4 /**< more than can stand at a time */

typedef enum publication_state {
    STATE_UNPUBLISHED = WIRE_STATE_UNPUBLISHED,
    STATE_STABLE = WIRE_STATE_STABLE,
    STATE_DRAINING = WIRE_STATE_DRAINING,
    STATE_WRITING = WIRE_STATE_WRITING,
    STATE_PAUSED = WIRE_STATE_PAUSED,
} publication_state;

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

/** Reads of published memory by the data threads that are under way, by their lease's epoch. */
typedef struct reading {
    uint64_t epoch;
    unsigned count; /**< 0: this slot is free */
} reading;

/** Which boxes may be read of a publication that fills (filling.h). Zeroed: it does not. */
typedef struct proofs {
    bool fills;
    uint8_t *bits;     /**< one a box; NULL: none is proven */
    landed_range *log; /**< all that are, in the order in which they were */
    size_t n_log, capacity;
} proofs;

/** Never freed before the server: its name's last step outlives a removal. */
struct publication {
    char name[PUBLICATION_NAME_SIZE];

    pthread_mutex_t writer; /**< put, remove, set_metadata, commit: one at a time */
    shard_set shards;       /**< guarded by writer */
    fanin_pair *pairs;      /**< guarded by writer; one allocation */
    size_t n_pairs;
    uint64_t revision;    /**< guarded by writer: grows whenever a new catalog is due */
    bool told_no_patches; /**< guarded by writer */

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
    uint64_t epoch; /**< odd: unreadable; of snapshots the arena's generation */
    /** the generation that still stands of an arena that is not published any more; 0: none */
    uint64_t previous;
    unsigned arena;                  /**< the published one, 0 or 1 */
    const struct arena_set *filling; /**< that holds the arena being filled, or NULL */
    unsigned filling_arena;
    struct drain *drain; /**< while a thread waits for leases to end, or NULL */
    commit *pending;     /**< that has not taken effect yet, with a reference */
    bool has_step;
    uint64_t step;
    uint64_t taken_back[TAKEN_BACK]; /**< the last steps that were withdrawn */
    unsigned n_taken_back;           /**< ever */
    shard_catalog *catalog; /**< of the last commit, or NULL; under both locks */
    struct patch *patches;  /**< newest first (patches.h) */
    uint32_t deltas;        /**< how many of them the last commit keeps */
    bool had_deltas;        /**< ... or any one before has kept */
    /** commits to come that make a patch although no reader is connected that wants it: one that
        has asked may come back for it */
    uint32_t expected;
    proofs proofs;
    uint64_t n_shards; /**< for statistics */
    struct lease *oldest, *newest;
    unsigned n_leases;
    reading reading[READING_EPOCHS];
    uint64_t entered_at; /**< clock_ns() when it came into its state, or anew into it */
    uint64_t update_at;  /**< ... when its last begin_update was called */
    uint64_t committed_at;      /**< clock_ns() of the last commit */
    uint64_t committed_unix_ns; /**< the same as the time of day */
    uint64_t bytes_left;        /**< that readers have got since */
    uint64_t stable_ns[STABLE_SAMPLES];
    unsigned n_stable;
    uint64_t changes; /**< ever; change i is history[i % HISTORY] */
    uint64_t told;    /**< of these, that the control thread has looked at */
    state_change history[HISTORY];
};

/* ------------------------------------------------------------------- by name */

/** How every call that names a publication begins: server_check(), publication_name_check(). */
fanin_status publication_call_check(const fanin_server *server, const char *name,
                                    fanin_error *error);
/** Lock held. NULL: no such name was ever used. */
publication *publication_find(const fanin_server *s, const char *name);
/** Lock held. Whether @p step was published and then withdrawn, or is so old that nobody
    remembers. */
bool publication_has_taken_back(const publication *p, uint64_t step);
/** Lock held. 1 and the last such step; 0: none. */
uint64_t publication_last_taken_back(const publication *p);
/** Takes the lock for it. */
publication *publication_look_up(fanin_server *s, const char *name);
/** Lock held. Finds or makes the object; *out may be absent (present false).
    FANIN_ERR_MEMORY, FANIN_ERR_LIMIT. */
fanin_status publication_obtain(fanin_server *s, const char *name, publication **out,
                                fanin_error *error);
/** Lock held. Marks it as there, unpublished. FANIN_ERR_LIMIT. */
fanin_status publication_appear(fanin_server *s, publication *p, fanin_error *error);
/** FANIN_ERR_NOT_FOUND. */
fanin_status publication_absent(const char *phase, const char *name,
                                fanin_error *error);
/** Takes the writer lock of a publication that is there. FANIN_ERR_NOT_FOUND. */
fanin_status publication_lock_present(fanin_server *s, const char *name,
                                      const char *phase, publication **out,
                                      fanin_error *error);
/** Lock held. Writes names of publications, comma-separated, cut to @p size. */
void publication_names(const fanin_server *s, char *out, size_t size);
void publications_free(fanin_server *s);
/** What a call of the publication @p about, from @p began until now, tells the trace (trace.h);
    nothing where there is none. @p step: 0, not told. */
void publication_span(const fanin_server *s, trace_name name, uint64_t began,
                      const char *about, uint64_t step, fanin_status outcome);

/* ------------------------------- what readers get; all with the lock held */

/** Its epoch is @p epoch from now on, and the catalog what readers get. */
void publication_take_effect(fanin_server *s, publication *p, shard_catalog *catalog,
                             uint64_t epoch);
/** Nothing is proven any more; @p fills: nobody reads a box before it is proven (filling.h). */
void publication_reset_proofs(publication *p, bool fills);
/**
 * From any state but draining to an odd epoch and the state @p to: voids the leases, waits for
 * sends (the lock is given up meanwhile). On the way to STATE_WRITING and STATE_PAUSED readers
 * have the lease time to finish; not to STATE_UNPUBLISHED.
 */
void publication_advance(fanin_server *s, publication *p, publication_state to);
/** Whether the trainer may write the shards while readers go on, or wait for, a copy of them. */
bool publication_has_copies(const publication *p);
/** Whether bytes may still be read under a lease of that epoch. */
static inline bool publication_stands(const publication *p, uint64_t epoch)
{
    return epoch == p->epoch || (epoch == p->previous && epoch != 0);
}
/** Whether readers are told that it is paused. */
bool publication_is_away(const publication *p);
/** FANIN_ERR_STATE: it is paused. */
fanin_status publication_refuse_paused(const publication *p, const char *phase,
                                       fanin_error *error);
/** Wakes the control thread, if anybody waits for a change of a publication. */
void publication_tell(fanin_server *s);
/** "stable", ...: static. */
const char *state_name(publication_state state);
/** Mean time that it was stable between its last commits, 0: unknown. */
uint64_t publication_stable_ns(const publication *p);

/** Announces that a data thread reads memory under that epoch; false: it has gone, or
    too many others are still being read: then its leases are void, as if it had gone.
    Every read that was announced is to be left, also when the epoch has gone meanwhile. */
bool publication_read_enter(fanin_server *s, publication *p, uint64_t epoch);
void publication_read_leave(fanin_server *s, publication *p, uint64_t epoch);
/** Given up while waiting: until nothing is read under an epoch that has gone. */
void publication_wait_for_reads(fanin_server *s, publication *p);
/** ... until no other thread is in begin_update of it. */
void publication_wait_for_drain(fanin_server *s, publication *p);

/* ------------------------------------------------------------------- garbage */

/* Catalogs without references, until somebody may wait while they go, and with them arenas and
   registered memory. CUDA frees memory of a device when all that is queued there has ended, which
   may be the trainer's, or never, where a collective hangs: no thread that serves readers may. */

/** Gives a reference back; garbage_collect() frees what is left without one. NULL is fine. Lock
    held. */
void catalog_discard(fanin_server *s, shard_catalog *catalog);
/** The same, lock not held: for the threads that serve readers. */
void catalog_retire(fanin_server *s, shard_catalog *catalog);
/** No lock held but a writer's. May block for as long as deregistering memory takes. What was left
    without a reference before the call is freed when it returns, by whichever thread. */
void garbage_collect(fanin_server *s);
/** For the control thread: lets a thread collect, if there is anything, and does not wait. */
void garbage_leave(fanin_server *s);
/** Waits for that thread. The control thread has ended. */
void garbage_join(fanin_server *s);

#endif
