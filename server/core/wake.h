/* SPDX-License-Identifier: Apache-2.0 */
/** @file An eventfd that a thread sleeps on; what the thread then looks at is its own business. */
#ifndef WAKE_H
#define WAKE_H

#include <stdbool.h>

/** False: errno says why, and *fd_out is -1. */
bool wake_open(int *fd_out);
/** The thread looks around (again). Any thread, any lock held; does not block. */
void wake_up(int fd);
/** For the thread, before it looks. */
void wake_heard(int fd);
/** -1 is fine. */
void wake_close(int *fd);

#endif
