/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Whether what has landed is what the ranks hold. Ranks are asked under their leases. What they say
 * is compared as it comes, or kept until patches are applied.
 */
#ifndef VERIFY_H
#define VERIFY_H

#include "pull/states.h"

/**
 * PULL_VERIFY: every rank digests the boxes that it served, this process what has landed. FANIN_OK:
 * all are equal. FANIN_ERR_STALE: a lease has gone. Errors of a lost rank as of pull_read(). No
 * other attempt mends FANIN_ERR_TRANSPORT (unequal: names rank and key), FANIN_ERR_UNSUPPORTED (a
 * rank that cannot), FANIN_ERR_MEMORY.
 *
 * Where the pull reads patches: the ranks' digests are in p->kept.
 */
fanin_status pull_verify(pull *p, fanin_error *error);

typedef struct verifier verifier;
/** *@p equal: the destination holds what the ranks had digested; else @p why says of which rank and
    key it does not. FANIN_ERR_MEMORY. */
fanin_status verify_kept(verifier *v, bool *equal, fanin_error *why);
/** Of a pull that is over, or begins anew; *@p out NULL is fine. */
void verify_forget(verifier **out);

#endif
