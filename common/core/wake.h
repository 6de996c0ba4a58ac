/* SPDX-License-Identifier: Apache-2.0 */
/** @file An eventfd that a thread sleeps on; what the thread then looks at is its own business. */
#ifndef WAKE_H
#define WAKE_H

#include <sys/eventfd.h>

/** -1: errno says why not. */
static inline int wake_open(void)
{
    return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
}

/** The thread looks around (again). Any thread, any lock held; does not block. */
static inline void wake_up(int fd)
{
    (void)eventfd_write(fd, 1);
}

/** For the thread, before it looks. */
static inline void wake_heard(int fd)
{
    eventfd_t count;
    (void)eventfd_read(fd, &count);
}

#endif
