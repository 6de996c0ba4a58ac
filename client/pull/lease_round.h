/* SPDX-License-Identifier: Apache-2.0 */
/** @file Begin and end of a pull on all its ranks at once. */
#ifndef LEASE_ROUND_H
#define LEASE_ROUND_H

#include "path/reader.h"

/**
 * Conditional begins (step, catalog version) on all peers with use[i]. FANIN_OK: all granted.
 * FANIN_ERR_STALE: a rank has moved on (says which; not a stale read); what was granted stays
 * in @p leases and must be given back with lease_round_abandon().
 */
fanin_status lease_round_begin(fanin_client *client, const publication *p,
                               const announcement *announced, const bool *use,
                               reader_lease *leases, deadline at, fanin_error *error);

/** Ends all held leases. FANIN_ERR_STALE: a rank's epoch has gone, the bytes must not be used. */
fanin_status lease_round_end(fanin_client *client, reader_lease *leases, deadline at,
                             fanin_error *error);

/** Gives leases back without waiting for an answer. */
void lease_round_abandon(fanin_client *client, reader_lease *leases);

#endif
