/* SPDX-License-Identifier: Apache-2.0 */
#include "thread.h"

#include "error_set.h"
#include <signal.h>

/* Plenty for what these threads do. The default is several megabytes, and where the kernel
   gives huge pages unasked the first touch of such a stack takes two of them. */
#define STACK_BYTES ((size_t)1 << 20)

bool worker_thread_start(pthread_t *thread, void *(*run)(void *), void *cookie)
{
    pthread_attr_t attributes;
    sigset_t all, before;
    if (pthread_attr_init(&attributes) != 0)
        return false;
    (void)pthread_attr_setstacksize(&attributes, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = pthread_create(thread, &attributes, run, cookie) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return started;
}

fanin_status thread_start(pthread_t *thread, const char *name, void *(*run)(void *),
                          void *cookie, fanin_error *error)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = pthread_create(thread, NULL, run, cookie);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code != 0)
        return error_set_errno(error, FANIN_ERR_LIMIT, code, NULL,
                               "cannot start the thread %s", name);
    pthread_setname_np(*thread, name);
    return FANIN_OK;
}
