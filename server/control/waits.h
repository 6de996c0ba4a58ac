/* SPDX-License-Identifier: Apache-2.0 */
/** @file Requests that are answered when their time comes: waits and watches. */
#ifndef WAITS_H
#define WAITS_H

#include "control/session.h"

/* ----------------------------------------------------------------- changes */

/** Those that have changed since the last call, which only the control thread makes. Takes the
    lock. True: there are more. */
bool changes_take(fanin_server *s, changes *out);

/* ------------------------------------------------------- waits and watches */

/* As other requests: not FANIN_OK if the body is refused. */
fanin_status handle_wait(session *s, uint64_t request, body *in);
fanin_status handle_watch(session *s, uint64_t request, body *in);

/** Answers waits that can be answered, reports changes to watchers; false: there was nothing to
    say. */
bool waits_answer(session *s, const changes *c);
/** The same by what publications are now: for a session that has missed changes. Takes the lock. */
void waits_review(session *s);
/** When the first wait's time is over. */
deadline waits_due(const session *s);
/** Ends waits whose time is over. */
void waits_expire(session *s);
/** Ends all waits: the server shuts down. */
void waits_cancel(session *s);

#endif
