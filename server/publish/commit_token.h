/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * One commit, from the call until it has taken effect or never will.
 *
 * The driver's threads only count in commit_reached() and wake the control thread; whoever looks
 * at the publication next, under the server's lock, lets the commit take effect
 * (commit_settle()). A commit is kept, with the catalog and so the arenas that it uses, until the
 * last of its streams has got there, also when it was withdrawn; its own memory even after the
 * server.
 */
#ifndef COMMIT_TOKEN_H
#define COMMIT_TOKEN_H

#include "core/server_state.h"
#include "shards/arena.h"

typedef struct commit_hub commit_hub;

typedef enum commit_outcome {
    COMMIT_PENDING,
    COMMIT_EFFECTIVE,
    COMMIT_WITHDRAWN,
    COMMIT_FAILED, /**< a device has failed, or the call itself */
} commit_outcome;

typedef struct commit {
    /* Fixed once it is registered. */
    commit_hub *hub;
    publication *of;
    uint64_t step, closing; /**< closing: the publication's epoch when it was made */
    publication_mode mode;
    fanin_dtype cast;
    bool on_stream, was_open, was_aborted;

    /* Guarded by the server's lock. */
    shard_catalog
        *catalog; /**< that takes effect, with a reference; NULL: not built yet */
    uint64_t generation;
    unsigned arena;
    const char *why;              /**< it was withdrawn */
    struct commit *next, *untold; /**< of the server's lists */

    /* Guarded by the hub's lock; outcome also by the server's while there is one. */
    unsigned references;
    unsigned awaited; /**< streams that have not got there, and 1 for the call itself */
    bool device_failed;
    commit_outcome outcome;
} commit;

/** Lock held, nothing pending. Makes the publication's pending commit, with one reference for the
    caller, who is awaited until commit_arm(). FANIN_ERR_MEMORY. */
fanin_status commit_register(fanin_server *s, publication *p, const commit *terms,
                             commit **out, fanin_error *error);
commit *commit_retain(commit *c);
void commit_release(commit *c);
/** One more stream is to get there; then gpu_notify() with commit_reached() and the commit. */
void commit_expect(commit *c);
/** ... but could not be asked to. */
void commit_unexpect(commit *c);
/** A gpu_reached_fn. */
void commit_reached(void *cookie, bool failed);
/** The call has done all it had to: nothing but streams is awaited now. */
void commit_arm(commit *c);
/** Lock held. The call has failed: the commit is over and the update open again. */
void commit_fail(commit *c);
/** No lock held. Waits until at most @p left is awaited (0, or 1 for the caller itself), or until
    it is not pending any more if @p pending. FANIN_ERR_TIMEOUT without a text. */
fanin_status commit_await(commit *c, unsigned left, bool pending, deadline at);
/** Lock held. */
commit_outcome commit_get_outcome(commit *c);
bool commit_device_failed(commit *c);

#endif
