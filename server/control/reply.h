/* SPDX-License-Identifier: Apache-2.0 */
/** @file What requests of a control session are answered with. */
#ifndef REPLY_H
#define REPLY_H

#include "control/session.h"
#include "publish/publication.h"

/** What who asks for more is told. */
#define SHUTTING_DOWN "the server is shutting down"

/** Answers with an error; does nothing if there is none. */
void reply_error(session *s, uint64_t request, const fanin_error *error);
void reply_fault(session *s, uint64_t request, fanin_status code, const char *message);

/** Since a clock_ns(); at least 1: 0 is "not known". */
uint64_t age_ms(uint64_t since_ns);

/* All with the lock held. */

/** NULL: not there. */
publication *find_present(const fanin_server *server, const char *name);
/** NOT_FOUND that names what there is. */
void describe_missing(const fanin_server *server, const char *name, fanin_error *error);
/** Why readers of a publication get nothing. */
void describe_paused(const char *name, const char *reason, fanin_error *error);
/** As the session's peer knows it: an older one takes paused for writing. */
int32_t state_for(const session *s, publication_state state);

#endif
