/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Reading before there is a lease. A pull that has everything at hand, and sees by the words of all
 * its ranks that something stands which will most likely do, begins to read while the ranks are
 * still asked; what they grant then decides whether it counts (PROTOCOL.md, "Reading ahead"). It is
 * for paths that bring bytes without this process's doing, into memory whose content a failed pull
 * leaves undefined.
 */
#ifndef READ_AHEAD_H
#define READ_AHEAD_H

#include "pull/attempt.h"

/** Before the ranks are asked, with everything at hand that early_lease_ask() asks for: whether to.
    Looks at the words, so what is begun next is read after it. */
bool read_ahead_may(pull *p);
/** Of everything, prepared. What cannot be begun is read under the leases, which tells why. */
void read_ahead_begin(pull *p, read_phase phase);
/** When leases are held: what is under way, if it is being read under these; else NULL, and it is
    dropped. */
read_phase *read_ahead_take(pull *p);
/** Ends it, if something is under way: nothing writes the destination any more, or
    destination->leak is set. */
void read_ahead_drop(pull *p);
/** FANIN_ERR_TRANSPORT: a device goes on with what was dropped, so nothing may be read there. */
fanin_status read_ahead_gone(pull *p, fanin_error *error);
/** The pull was good: what the next one may go by. */
void read_ahead_learn(pull *p);

#endif
