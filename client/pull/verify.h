/* SPDX-License-Identifier: Apache-2.0 */
/** @file Comparing what is at the destination with what the ranks hold, under their leases. */
#ifndef VERIFY_H
#define VERIFY_H

#include "pull/read_phase.h"

/**
 * After read_phase_run() and before the leases end: every rank digests the boxes that it served, this
 * process what has landed. FANIN_OK: all are equal. FANIN_ERR_STALE: a lease has gone. Errors of a
 * lost rank as of read_phase_run(). Final, with r->final set: FANIN_ERR_TRANSPORT (unequal: names
 * rank and key), FANIN_ERR_UNSUPPORTED (a rank that cannot), FANIN_ERR_MEMORY.
 */
fanin_status verify_run(read_phase *r, deadline at, fanin_error *error);

#endif
