/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A pull's leases. Some come with the announcements, so that a pull which has everything at hand
 * asks its ranks once before it reads. What follows the agreement may then take no time: who would
 * fetch tables, plan or try paths under a lease would hold up the trainer for nothing.
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

#endif
