/* SPDX-License-Identifier: Apache-2.0 */
#include "adapter/file_limit.h"

#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <time.h>

static sigset_t the_signal(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGXFSZ);
    return set;
}

file_limit_guard file_limit_enter(void)
{
    file_limit_guard g;
    sigset_t set = the_signal(), pending;
    pthread_sigmask(SIG_BLOCK, &set, &g.before);
    g.pending = sigpending(&pending) == 0 && sigismember(&pending, SIGXFSZ) == 1;
    return g;
}

void file_limit_leave(const file_limit_guard *g)
{
    static const struct timespec at_once = {0, 0};
    sigset_t set = the_signal();
    int code = errno;
    if (!g->pending)
        while (sigtimedwait(&set, NULL, &at_once) < 0 && errno == EINTR)
            ;
    pthread_sigmask(SIG_SETMASK, &g->before, NULL);
    errno = code;
}
