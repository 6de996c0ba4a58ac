/* SPDX-License-Identifier: Apache-2.0 */
/** @file What a session's bytes, its socket's events and its deadlines lead to. */
#ifndef DISPATCH_H
#define DISPATCH_H

#include "control/session.h"

/** Handles what epoll said. */
void session_handle_event(session *s, uint32_t events);
/** Takes the requests that are there, sends what there is to send. After any output. */
void session_serve(session *s);
/** As if bytes had just come: one that rested may go on. */
void session_take_turn(session *s);
/** The thread wakes no later than when something of this one is due. */
void session_note_due(session *s);
/** Does what is due now. */
void session_expire(session *s);

#endif
