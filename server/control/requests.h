/* SPDX-License-Identifier: Apache-2.0 */
/** @file Requests that are answered at once. Not FANIN_OK: the body is refused, in->why. */
#ifndef REQUESTS_H
#define REQUESTS_H

#include "control/session.h"

/** hello.c: opens the session, hands the connection over to a data thread, or rejects it. */
void handle_hello(session *s, const frame *f, body *in);
/** What the rank is at, and its counters; who holds leases for those alone that may know. */
fanin_status handle_stats(session *s, uint64_t request, body *in);
fanin_status handle_list(session *s, uint64_t request, body *in);
/** A page of keys, boxes or regions. */
fanin_status handle_blob(session *s, uint64_t request, message_type type, body *in);
fanin_status handle_begin(session *s, uint64_t request, body *in);
/** Grants a lease on @p p to the request, or says why not, in *reply or *error. Lock held. */
void answer_begin(session *s, publication *p, uint64_t request, const msg_begin *m,
                  msg_begin_ok *reply, fanin_error *error);
fanin_status handle_end(session *s, uint64_t request, body *in);

/* ----------------------------------------------------------------------- TLS */

/** Goes on with it. True: the session may receive. Else it waits, is being told why it is refused,
    or is closed. */
bool session_secure(session *s);

#endif
