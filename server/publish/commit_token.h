/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * What a commit's call, the streams it waits for and whoever waits for it share: counts, and the
 * function that the driver calls. What a commit means is none of this file's business.
 *
 * The driver's threads only count here and wake the control thread; whoever looks at the
 * publication next, under the server's lock, lets the commit take effect (publication_settle()).
 * A token outlives even the server, until the last of its streams has got there.
 */
#ifndef COMMIT_TOKEN_H
#define COMMIT_TOKEN_H

#include "clock.h"
#include <fanin/error.h>
#include <stdbool.h>

typedef struct commit_hub commit_hub;

/** The first member of what was allocated with malloc(): freed with the last reference. Guarded by
    the hub's lock. */
typedef struct commit_token {
    commit_hub *hub; /**< does not change */
    unsigned references;
    unsigned
        awaited; /**< streams that have not got there, and 1 for the call itself; each
                         has a reference */
    bool device_failed;
    bool concluded;
} commit_token;

/** One a server; @p wake is its control thread's. FANIN_ERR_MEMORY. */
fanin_status commit_hub_make(int wake, commit_hub **out, fanin_error *error);
/** The server goes: nobody is woken any more. The hub goes with its last token. */
void commit_hub_leave(commit_hub *h);

/** With @p references for whoever knows it, and one for the call, which is awaited. */
void commit_token_init(commit_token *t, commit_hub *h, unsigned references);
void commit_token_retain(commit_token *t);
void commit_token_release(commit_token *t);
/** One more stream is to get there; it calls commit_token_arrive(). */
void commit_token_expect(commit_token *t);
/** A gpu_reached_fn; @p token: a commit_token. A stream got there, or cannot be asked to; or the
    call has done all it had to. Wakes whoever may care. */
void commit_token_arrive(void *token, bool failed);
/** Waits until at most @p left is awaited (0, or 1 for the caller itself), or until it is
    concluded if that is enough. FANIN_ERR_TIMEOUT without a text. */
fanin_status commit_token_await(commit_token *t, unsigned left, bool or_concluded,
                                deadline at);
/** Nothing is awaited. *failed_out (may be NULL): whether a device has failed. */
bool commit_token_is_due(commit_token *t, bool *failed_out);
/** What was awaited makes no difference from now on. Gives a reference back. */
void commit_token_conclude(commit_token *t);

#endif
