/* SPDX-License-Identifier: Apache-2.0 */
/** @file This host's address on the way to others. */
#ifndef ROUTE_H
#define ROUTE_H

#include "fetch/target.h"

enum { ROUTE_ADDRESS = 64 };

/**
 * The address by which this host reaches the first of the target's ranks that is on no loopback
 * address. Sends nothing; a name is looked up, which may block. FANIN_ERR_ARGUMENT: it lies in none
 * of @p networks ("10.0.0.0/8,fd00::/8"), or there is none.
 */
fanin_status route_within(const target *t, const char *networks,
                          char out[ROUTE_ADDRESS], fanin_error *error);

#endif
