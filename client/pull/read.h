/* SPDX-License-Identifier: Apache-2.0 */
/** @file Moving the bytes: all ranks at once, each by its path, until all are in place. */
#ifndef READ_H
#define READ_H

#include "pull/states.h"

/**
 * PULL_READ. FANIN_OK: the part is in place. FANIN_ERR_STALE: a token was refused.
 * FANIN_ERR_CLOSED, UNREACHABLE, TRANSPORT: a rank's path was lost (it is dropped; try again).
 * Others are final. When it returns nothing writes the destination any more, or
 * destination->leak is set.
 */
fanin_status pull_read(pull *p, fanin_error *error);
/** Reads @p part into other memory than the destination, at @p to. Errors likewise. */
fanin_status pull_read_aside(pull *p, plan_part *part, uint8_t *to, fanin_error *error);
/** All bytes of the part are here: what follows. */
void pull_read_follows(pull *p);
/** The part counts as read: what follows. */
void pull_read_ended(pull *p);

#endif
