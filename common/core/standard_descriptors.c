/* SPDX-License-Identifier: Apache-2.0 */
#include "standard_descriptors.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

void standard_descriptors_hold(void)
{
    int saved = errno;
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++) {
        if (fcntl(fd, F_GETFD) >= 0)
            continue;
        int got = open("/", O_PATH | O_CLOEXEC); /* the lowest that is free */
        if (got > STDERR_FILENO)
            close(got); /* another thread was faster */
    }
    errno = saved;
}
