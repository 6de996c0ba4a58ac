/* SPDX-License-Identifier: Apache-2.0 */
/** @file Agreeing on a step: waiting, without any lease, until ranks announce a common one. */
#ifndef AGREE_H
#define AGREE_H

#include "pull/states.h"

/** What the caller is going to read. */
typedef struct agree_need {
    /** *@p vain: the ranks with @p use[i] can't serve it for want of one that is gone; returned is
        that rank's error. Their tables are at hand. */
    fanin_status (*without)(void *cookie, const bool *use, bool *vain,
                            fanin_error *error);
    void *cookie;
    bool deltas; /**< ranks are to tell which patches they have */
} agree_need;

/**
 * Asks all READY ranks to announce a stable step by the options' rule and waits until all of
 * them, or a sufficient set of them (replicas), announce one. announced[i] and use[i]
 * (one a peer) say who did; the step is announced[i].step of any with use[i].
 *
 * @p early (NULL: none are asked for): the leases of ranks that are used may be held then, at that
 * step and of those catalogs, as if they had been begun; all are given back if no agreement comes
 * within EARLY_MS of the first: a trainer whose ranks wait for each other is not held up by a
 * reader that waits.
 *
 * FANIN_ERR_SUPERSEDED, FANIN_ERR_NOT_FOUND (no such run), FANIN_ERR_PAUSED (by a rank without
 * which the others, as soon as they have answered, do not suffice), FANIN_ERR_TIMEOUT (names the
 * ranks that are gone, silent or behind, and their steps), FANIN_ERR_CANCELLED, connection errors
 * if no rank is left, or one is gone without which @p need (NULL: not asked) can't be met.
 */
fanin_status agree(fanin_client *client, publication *p,
                   const fanin_pull_options *options, const agree_need *need,
                   early_begin *early, deadline at, announcement *announced, bool *use,
                   fanin_error *error);

/** The rank to blame for what the ranks with @p use[i], whose tables are at hand, do not hold: one
    that is gone and without which the others do not suffice, as far as the tables of those that are
    gone are known. n_peers: none is gone. */
size_t agree_culprit(fanin_client *client, const publication *p, const bool *use,
                     deadline at);

/** *@p enough: the ranks with @p use[i] hold the whole publication. Their tables are at hand.
    False if it is not known by @p at. */
fanin_status agree_sufficient(fanin_client *client, const publication *p,
                              const bool *use, deadline at, bool *enough,
                              fanin_error *error);
/** Whether they do, and it is known by @p at. */
bool agree_suffice(fanin_client *client, const publication *p, const bool *use,
                   deadline at);

#endif
