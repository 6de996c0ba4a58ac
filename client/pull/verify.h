/* SPDX-License-Identifier: Apache-2.0 */
/** @file Whether what has landed is what the ranks hold. */
#ifndef VERIFY_H
#define VERIFY_H

#include "pull/states.h"

/**
 * PULL_VERIFY: every rank digests the boxes that it served, this process what has landed. FANIN_OK:
 * all are equal. FANIN_ERR_STALE: a lease has gone. Errors of a lost rank as of pull_read(). No
 * other attempt mends FANIN_ERR_TRANSPORT (unequal: names rank and key), FANIN_ERR_UNSUPPORTED (a
 * rank that cannot), FANIN_ERR_MEMORY.
 */
fanin_status pull_verify(pull *p, fanin_error *error);

#endif
