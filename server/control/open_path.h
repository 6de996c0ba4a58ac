/* SPDX-License-Identifier: Apache-2.0 */
/** @file Which paths a session may use, and the server's ends of those that are one-sided. */
#ifndef OPEN_PATH_H
#define OPEN_PATH_H

#include "control/session.h"

/** Paths that open_path would grant this session, as bits. */
uint32_t offered_paths(const session *s);
/** Appends the catalog's region table with the keys of m->path. FANIN_ERR_UNSUPPORTED: the session
    may not have these; others as of region_set_encode_keys(). */
fanin_status encode_regions(session *s, shard_catalog *catalog,
                            const msg_blob_request *m, buffer *out, fanin_error *error);
/** Counts what a reader says that it has read where this process saw nothing of it: no more, of any
    path that the session may use, than there is. Lock held. */
void count_one_sided(session *s, const lease *l, const msg_end *m);
/** As other requests: not FANIN_OK if the body is refused. */
fanin_status handle_open_path(session *s, uint64_t request, body *in);
/** Lets UCX work; true: it wants to be called again before the thread sleeps. */
bool progress_ucx(struct control *c);

#endif
