/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Leases that come with the announcements, so that a pull which has everything at hand asks its
 * ranks once before it reads. What follows the agreement may then take no time: who would fetch
 * tables, plan or try paths under a lease would hold up the trainer for nothing.
 */
#ifndef EARLY_LEASE_H
#define EARLY_LEASE_H

#include "pull/attempt.h"

/** What to ask of the ranks that the cached plan reads from; NULL: something is not at hand. */
early_begin *early_lease_ask(pull *p);
/** After the agreement: gives the leases back if the plan does not fit what was agreed upon. */
void early_lease_keep(pull *p);
/** Before the begin: whether there are any. Those that are too old are given back. */
bool early_lease_holds(pull *p);

#endif
