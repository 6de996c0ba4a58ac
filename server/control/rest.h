/* SPDX-License-Identifier: Apache-2.0 */
/** @file Sessions whose peer has had its share of CPU time rest: nothing is read from them until it
    is their turn. Everything here belongs to the control thread. */
#ifndef REST_H
#define REST_H

#include "control/session.h"

/** What the thread does from now on is for this session. */
void work_begin(session *s);
/** ... and was so until now; it goes on. */
void work_charge(session *s);
/** As work_charge() after some requests: where others wait its turn is over. */
void work_look(session *s);
/** Whether its requests have to wait: then it rests from now on. */
bool must_rest(session *s);
/** Takes it out of the queue of those that rest, if it is there. */
void rest_leave(session *s);
/** Calls @p turn for those whose peers may go on; they rest no longer. */
void rest_turns(struct control *c, void (*turn)(session *));

#endif
