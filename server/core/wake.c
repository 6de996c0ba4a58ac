/* SPDX-License-Identifier: Apache-2.0 */
#include "core/wake.h"

#include <sys/eventfd.h>
#include <unistd.h>

bool wake_open(int *fd_out)
{
    *fd_out = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return *fd_out >= 0;
}

void wake_up(int fd)
{
    (void)eventfd_write(fd, 1);
}

void wake_heard(int fd)
{
    eventfd_t count;
    (void)eventfd_read(fd, &count);
}

void wake_close(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}
