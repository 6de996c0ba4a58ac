/* SPDX-License-Identifier: Apache-2.0 */
/** @file Which paths a session may use, and the server's ends of those that are one-sided. */
#ifndef OPEN_PATH_H
#define OPEN_PATH_H

#include "control/session.h"

/** Paths that open_path would grant this session, as bits. */
uint32_t offered_paths(const session *s);
/** Whether the session may have remote keys of that path. */
bool has_path(const session *s, int32_t path);
/** As other requests: not FANIN_OK if the body is refused. */
fanin_status handle_open_path(session *s, uint64_t request, body *in);
/** Lets UCX work; true: it wants to be called again before the thread sleeps. */
bool progress_ucx(struct control *c);

#endif
