/* SPDX-License-Identifier: Apache-2.0 */
/** @file Begin and end of a pull on all its ranks at once. */
#ifndef LEASE_ROUND_H
#define LEASE_ROUND_H

#include "path/path.h"

/**
 * Conditional begins (step, catalog version) on all peers with use[i] whose lease is not held yet;
 * one that is held of another peer is given back. FANIN_OK: all granted.
 * FANIN_ERR_STALE: a rank has moved on (says which; not a stale read); what was granted stays
 * in @p leases and must be given back with lease_round_abandon().
 */
fanin_status lease_round_begin(fanin_client *client, const publication *p,
                               const announcement *announced, const bool *use,
                               reader_lease *leases, deadline at, fanin_error *error);

/** Ends all held leases, and tells each rank what of @p served, one a peer, it did not see.
    FANIN_ERR_STALE: a rank's epoch has gone, the bytes must not be used. */
fanin_status lease_round_end(fanin_client *client, const publication *p,
                             const announcement *announced, reader_lease *leases,
                             const served *served, deadline at, fanin_error *error);

/** Gives leases back without waiting for an answer. */
void lease_round_abandon(fanin_client *client, reader_lease *leases);
/** The same of one peer's, if it is held. */
void lease_give_back(fanin_client *client, size_t peer, reader_lease *lease);
/** The same of one that came too late for the caller. */
void lease_refuse(connection *c, const uint8_t token[16]);
/** The same of what the request may still bring; the connection is READY. */
void lease_refuse_begun(connection *c, uint64_t request);

#endif
