/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Leases, begun and ended on all ranks at once. Some come with the announcements, so that a pull
 * which has everything at hand asks its ranks once before it reads. What follows the agreement may
 * then take no time: who would fetch tables, plan or try paths under a lease would hold up the
 * trainer for nothing.
 */
#ifndef LEASE_H
#define LEASE_H

#include "pull/states.h"

/** What to ask of the ranks that the cached plan reads from; NULL: something is not at hand. */
early_begin *early_lease_ask(pull *p);
/** After the agreement: gives the leases back if the plan does not fit what was agreed upon. */
void early_lease_keep(pull *p);

fanin_status pull_begin(pull *p, fanin_error *error); /**< PULL_BEGIN */
fanin_status pull_end(pull *p, fanin_error *error);   /**< PULL_END */

/**
 * Conditional begins (step, catalog version) on all peers that are needed and whose lease is not
 * held yet; one that is held of another peer is given back. FANIN_OK: all granted.
 * FANIN_ERR_STALE: a rank has moved on (says which; not a stale read); what was granted stays
 * and must be given back with lease_round_abandon().
 */
fanin_status lease_round_begin(pull *p, fanin_error *error);

/** Ends all held leases, and tells each rank what of the bytes it did not see. FANIN_ERR_STALE: a
    rank's epoch has gone, the bytes must not be used. */
fanin_status lease_round_end(pull *p, fanin_error *error);

/** Asks those that have served whether all that was read so far is of the step for good; the leases
    stay. Errors as of the end, and FANIN_ERR_UNSUPPORTED: a rank of an older release. */
fanin_status lease_round_confirm(pull *p, fanin_error *error);

/** One that is not waited for: @p fn hears of it, in the loop, once. */
typedef void (*confirmed_fn)(void *cookie, fanin_status status, const fanin_error *why);
typedef struct confirmation confirmation;
/** Asks as lease_round_confirm(). Until all have answered it is in *@p list, which must stay.
    After an error @p fn is not called. */
fanin_status lease_confirm_later(pull *p, confirmed_fn fn, void *cookie,
                                 confirmation **list, fanin_error *error);
/** Those of the list are not waited for any more, and their functions not called. */
void lease_confirm_forget(fanin_client *client, confirmation **list);

/** Ends all held leases as lease_round_end(), of bytes that are confirmed: waits for no answer. */
void lease_round_leave(pull *p);
/** Gives leases back without waiting for an answer. */
void lease_round_abandon(fanin_client *client, reader_lease *leases);
/** The same of one peer's, if it is held. */
void lease_give_back(fanin_client *client, size_t peer, reader_lease *lease);
/** The same of one that came too late for the caller. */
void lease_refuse(connection *c, const uint8_t token[16]);
/** The same of what the request may still bring; the connection is READY. */
void lease_refuse_begun(connection *c, uint64_t request);

#endif
