/* SPDX-License-Identifier: Apache-2.0 */
/** @file Sessions that nobody uses make room for others when there is none. */
#ifndef EVICT_H
#define EVICT_H

#include "control/session.h"

/** A session that has said nothing for so long may go; a pull is never silent so long without a
    lease or a wait, but for work of its own. */
#define EVICT_IDLE_MS 10000

/** Closes the session that has been idle for longest, without lease, wait or watch, and tells it
    why. For one more of @p newcomer: a session of its own, or, if it is not its share that is used
    up, of a network peer that has more of them. False: there is none. By the control thread. */
bool evict_idle(struct control *c, peer_share *newcomer, admission_room room);

#endif
