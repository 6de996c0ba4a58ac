/* SPDX-License-Identifier: Apache-2.0 */
/** @file Pulls of several reads: leases that are held between calls. */
#ifndef PULL_SESSION_H
#define PULL_SESSION_H

#include "pull/pull.h"

/** Begins a session of @p count tensors, into @p d, whose ranges last and whose functions are not
    called any more when this returns. Errors as of pull_run(). */
fanin_status pull_session_open(fanin_client *client, const fanin_pull_options *options,
                               const destination *d, size_t count, fanin_session **out,
                               fanin_error *error);
/** As one fanin_session_read() of all tensors of @p runs, which ascend and have none twice. Nothing
    of it is kept for the next time. */
fanin_status pull_session_read(fanin_session *s, const group_run *runs, size_t n_runs,
                               fanin_error *error);
/** Compares the tensors of @p runs, which somebody else has brought, with the digests that the
    session's ranks make of them. Errors as of a read with options->verify. */
fanin_status pull_session_verify(fanin_session *s, const group_run *runs, size_t n_runs,
                                 fanin_error *error);
/** Asks as fanin_session_confirm(), and goes on: @p fn hears of it during a later call that uses
    the client's loop, unless the session has ended before. After an error it is not called. */
fanin_status pull_session_confirm_later(fanin_session *s, confirmed_fn fn, void *cookie,
                                        fanin_error *error);
/** Ends a session whose bytes are confirmed, as far as they are wanted: waits for no rank. *@p
    result_out (may be NULL): what was read; NULL if it has failed. */
void pull_session_leave(fanin_session **session, fanin_result **result_out);
/** Whether some of it comes over data connections: nothing faster reaches that rank. */
bool pull_session_is_linked(const fanin_session *s);
/** The lease of a peer that the session reads, by which a relay is asked what it has. */
const uint8_t *pull_session_token(const fanin_session *s, size_t peer);
/** The client's connections go: its session, if there is one, has failed. */
void pull_session_orphan(fanin_client *client);

#endif
