/* SPDX-License-Identifier: Apache-2.0 */
/** @file The pull as a whole: which state follows, when to try again, what is told of its end. */
#ifndef PULL_H
#define PULL_H

#include "pull/states.h"

/** Checks struct_size, publication's form, rule, timeout; copies over defaults. */
fanin_status pull_options_read(const fanin_pull_options *in, fanin_pull_options *out,
                               fanin_error *error);
/** The client, and then these. */
fanin_status pull_check(const fanin_client *client, const fanin_pull_options *in,
                        fanin_pull_options *out, fanin_error *error);

/** From its options to its result. */
fanin_status pull_run(fanin_client *client, const fanin_pull_options *options,
                      destination *d, fanin_result **result_out, fanin_error *error);

/** The key table of a publication that was fetched last, valid until the client fetches another
    one; NULL: none. */
const key_table *pull_known_keys(fanin_client *client, const char *name);

/* ------------------------------------------------------------- for sessions */

/** What a pull needs besides; @p p has client, options and destination. */
fanin_status pull_open(pull *p, fanin_error *error);
/** Steps until it is in @p until, FANIN_OK, or PULL_FAILED. */
fanin_status pull_go(pull *p, pull_state until, fanin_error *error);
/** Of a session that had its leases and ended with @p why: the same, with what helps if reading
    takes longer than a lease lasts, so that trying again would not. */
fanin_status pull_overtaken(pull *p, const fanin_error *why, fanin_error *error);
/** Tells trace and log of the call, or of a session's begin: from started_ns until now. @p error:
    why it failed, may be NULL. */
void pull_ended(pull *p, trace_name name, fanin_status status,
                const fanin_error *error);
/** Gives leases back that are still held. */
void pull_release(pull *p);

#endif
