/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * One commit, from its call until it has taken effect or never will; and whoever waits for it.
 *
 * The driver's threads only count here and wake the control thread. Whoever looks at the
 * publication next, under the server's lock, lets the commit take effect (commit_settle()).
 */
#ifndef COMMIT_H
#define COMMIT_H

#include "publish/publication.h"

/** How long a commit waits for one that has not taken effect, and for itself if it is asked to;
    and whoever changes shards for a copy of them that is under way. */
#define COMMIT_WAIT_MS 60000

/** What the caller asks for. */
typedef struct commit_terms {
    uint64_t step;
    publication_mode mode;
    fanin_dtype cast;
    bool on_stream;
    bool fills;      /**< readers get boxes as they are proven (filling.h) */
    uint32_t deltas; /**< patches to keep (patches.h) */
} commit_terms;

typedef enum commit_outcome {
    COMMIT_PENDING,
    COMMIT_EFFECTIVE,
    COMMIT_WITHDRAWN,
    COMMIT_FAILED, /**< a device has failed, or the call itself */
} commit_outcome;

/** It is kept, with the catalog and so the arenas that it uses, until the last of its streams has
    got there, also when it was withdrawn; its own memory even after the server. */
struct commit {
    commit_hub *hub;

    /* Guarded by the hub's lock. */
    unsigned references; /**< freed with the last */
    unsigned
        awaited; /**< streams that have not got there, and 1 for the call itself; each
                         has a reference */
    bool device_failed;
    bool concluded; /**< what is awaited makes no difference any more */

    /* Fixed once it is the pending one. */
    publication *of;
    commit_terms terms;
    uint64_t closing; /**< the publication's epoch when it was made */
    bool was_open, was_aborted;

    /* Guarded by the server's lock. */
    commit_outcome outcome;
    shard_catalog *catalog; /**< that takes effect; NULL: not built yet */
    uint64_t generation;
    unsigned arena;
    bool wants_patch;
    struct patch *patch;   /**< that leads to it, until it takes effect */
    const char *why;       /**< it was withdrawn */
    commit *next, *untold; /**< of the server's lists */
};

/* ------------------------------------------------------ commit.c */

/**
 * The publication's catalog as @p terms will have it, NULL: by reference; its last one if nothing
 * has changed. With a reference. With the writer lock, which also keeps p->catalog from changing;
 * builds outside of the server's lock. FANIN_ERR_MEMORY, FANIN_ERR_LIMIT.
 */
fanin_status make_catalog(fanin_server *s, publication *p, const commit_terms *terms,
                          shard_catalog **out, fanin_error *error);

/** fanin_server_commit() without a stream, and without waiting for the effect: by reference it has
    taken effect then. */
fanin_status commit_plainly(fanin_server *s, const char *name,
                            const commit_terms *terms, fanin_error *error);

/* ---------------------------------- streams and waits: pending_commit.c */

/** One a server; @p wake is its control thread's. FANIN_ERR_MEMORY. */
fanin_status commit_hub_make(int wake, commit_hub **out, fanin_error *error);

/** Lock held, nothing pending. Makes the publication's pending commit, with a reference for the
    caller, whose call is awaited. FANIN_ERR_MEMORY. */
fanin_status commit_make(fanin_server *s, publication *p, const commit_terms *terms,
                         commit **out, fanin_error *error);
void commit_release(commit *c);
/** One more stream is to get there; it calls commit_arrive(). */
void commit_expect(commit *c);
/** A gpu_reached_fn; @p cookie: a commit. A stream got there, or cannot be asked to; or the
    call has done all it had to. Wakes whoever may care. */
void commit_arrive(void *cookie, bool failed);
/** Waits until at most @p left is awaited (0, or 1 for the caller itself), or until it is
    concluded if that is enough. FANIN_ERR_TIMEOUT without a text. */
fanin_status commit_await(commit *c, unsigned left, bool or_concluded, deadline at);
/** Whether a device has failed. */
bool commit_has_failed(commit *c);

/** Takes the writer lock, then the lock, once nothing is pending; waits at most COMMIT_WAIT_MS for
    that. FANIN_ERR_TIMEOUT: none is held. */
fanin_status commit_enter(fanin_server *s, publication *p, fanin_error *error);
/** Waits, at most COMMIT_WAIT_MS, until no copy of the publication's shards is under way. With
    the writer lock. FANIN_ERR_TIMEOUT. */
fanin_status commit_wait_for_copies(fanin_server *s, publication *p,
                                    fanin_error *error);

/* ------------------------------------------- its end; all with the lock held */

/** Lets the pending commit take effect if its streams have got there. */
void commit_settle(fanin_server *s, publication *p);
/** The pending commit, unless it can take effect now, never will. @p why completes
    "was not published: ..."; static. */
void commit_withdraw(fanin_server *s, publication *p, const char *why);
/** The commit's call has failed: it is over, and the update open again. */
void commit_fail(commit *c);

/* ------------------------------------- the lock is not held, a writer's may be */

/** Settles what can be settled, logs and frees what was put off. Who gives the shards' memory back
    to the trainer calls it too: catalogs of before may still have it registered. */
void commit_tidy(fanin_server *s);
/** The same for the control thread, which does not wait for what is freed. */
void commit_tidy_and_leave(fanin_server *s);
/** Withdraws everything; streams that get there later find nothing. */
void commit_stop(fanin_server *s);
/** After commit_stop() and the threads' ends. A server without a hub is fine. */
void commit_destroy(fanin_server *s);

#endif
