/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The listeners of the control thread: TCP, and the Unix socket beside it. To accept strangers
 * takes a share of a CPU at most, however many they are. Beyond that who has used up its own share
 * is closed as it comes, so that others do not wait behind it in the kernel's queue. When that
 * takes as much again the listener rests. The control thread's, all.
 */
#ifndef LISTENERS_H
#define LISTENERS_H

#include "control/session.h"

/** Takes both; @p unix_fd may be -1. False: they cannot be waited for, errno says why, and they
    stay the caller's. */
bool listeners_start(struct control *c, int tcp_fd, int unix_fd);
/** Takes what has come, or some of it. */
void listener_accept(struct control *c, listener *l);
/** When listeners_resume() is to be called; UINT64_MAX: never. */
deadline listeners_due(const struct control *c);
/** Listens again where it has rested for long enough, and tells of what could not be taken. */
void listeners_resume(struct control *c);
/** Nobody connects any more. */
void listeners_close(struct control *c);

#endif
