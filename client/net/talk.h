/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Requests with one handler each on a connection, its end, and detection of a peer that fell
 * silent.
 */
#ifndef TALK_H
#define TALK_H

#include "net/connection.h"

/** Closes it as one whose rank does not answer, see connection_fail(). */
void connection_give_up(connection *c);
/** Closes it; pending handlers run with type 0. @p fault is remembered (copied). */
void connection_fail(connection *c, const fanin_error *fault);

/** "rank 3 at host:port" in @p name, "the rank at host:port" if it never said which. */
#define CONNECTION_NAME 96
const char *connection_name(const connection *c, char name[CONNECTION_NAME]);
/** Fills place fields rank and address. */
struct error_place connection_place(const connection *c, const char *phase);

/** The frame that was encoded into connection_out() under c->next_request goes out; @p fn gets the
    reply (NULL: nobody waits for it). Only when READY. */
buffer *connection_out(connection *c);
void connection_ask(connection *c, reply_fn fn, void *cookie);
/** Forgets the handlers that have this cookie (their replies are dropped). */
void connection_forget(connection *c, const void *cookie);
/** Keeps the handlers that have this cookie for more replies (watch). */
void connection_keep(connection *c, const void *cookie);

/** While true the rank counts as owing an answer even without a pending request: it is
    reading phase, and silence must be noticed. */
void connection_set_owing(connection *c, bool owing);
/** Whether somebody waits for an answer of this rank. */
bool connection_owes(const connection *c);

/** Pings a silent peer, gives it up; returns when to call again. */
deadline connection_tick(connection *c);

/** Turns a MSG_ERROR body, a lost connection (type 0) or an unexpected reply into an error
    with rank and address. Returns its status, never FANIN_OK. */
fanin_status connection_reply_error(connection *c, const char *phase, message_type type,
                                    body *b, fanin_error *error);

/* ------------------------------------------------------------ for connect.c */

/** Closes it because of what it was found to do, or not to be: "rank 3 at host:port @p what".
    EBADMSG is for who decides whether to try again; its words tell nothing. */
void connection_fail_for(connection *c, fanin_status status, int sys_errno,
                         const char *phase, const char *remedy, const char *what);
/** Nobody else's fault. */
void connection_fail_for_memory(connection *c);
/** No handler runs. */
void connection_shut(connection *c);
/** What it has to write. */
void connection_flush(connection *c);
/** What has come, to handlers. */
void connection_read(connection *c);

#endif
