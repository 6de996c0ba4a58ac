/* SPDX-License-Identifier: Apache-2.0 */
/** @file Pulls of several reads: leases that are held between calls. */
#ifndef PULL_SESSION_H
#define PULL_SESSION_H

#include "pull/destination.h"

/** Begins a session of @p count tensors, into @p d, whose ranges last and whose functions are not
    called any more when this returns. Errors as of pull_run(). */
fanin_status pull_session_open(fanin_client *client, const fanin_pull_options *options,
                               const destination *d, size_t count, fanin_session **out,
                               fanin_error *error);
/** The client's connections go: its session, if there is one, has failed. */
void pull_session_orphan(fanin_client *client);

#endif
