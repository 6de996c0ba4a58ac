/* SPDX-License-Identifier: Apache-2.0 */
/** @file The control thread as its server sees it. */
#ifndef CONTROL_H
#define CONTROL_H

#include "core/server_state.h"

/** Owns both listeners (unix_fd may be -1) once it succeeds. */
fanin_status control_create(fanin_server *s, int tcp_fd, int unix_fd,
                            fanin_error *error);
/** Closes the listeners and ends parked waits, as soon as the thread gets to it. */
void control_stop_listening(fanin_server *s);
/** CPU time that the control thread has taken. Any thread. */
uint64_t control_cpu_ns(const fanin_server *s);
/** Joins; closes all sessions. */
void control_destroy(fanin_server *s);

#endif
