/* SPDX-License-Identifier: Apache-2.0 */
#include "thread.h"

#include "error_set.h"
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <time.h>
#include <unistd.h>

/* Plenty for what these threads do. The default is several megabytes, and where the kernel
   gives huge pages unasked the first touch of such a stack takes two of them. */
#define STACK_BYTES ((size_t)1 << 20)

sigset_t signals_block(void)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    return before;
}

void signals_restore(const sigset_t *before)
{
    pthread_sigmask(SIG_SETMASK, before, NULL);
}

bool worker_thread_start(pthread_t *thread, void *(*run)(void *), void *cookie)
{
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) != 0)
        return false;
    (void)pthread_attr_setstacksize(&attributes, STACK_BYTES);
    const sigset_t before = signals_block();
    bool started = pthread_create(thread, &attributes, run, cookie) == 0;
    signals_restore(&before);
    pthread_attr_destroy(&attributes);
    return started;
}

fanin_status thread_start(pthread_t *thread, const char *name, void *(*run)(void *),
                          void *cookie, fanin_error *error)
{
    static const error_place place = {.remedy = THREAD_REMEDY};
    const sigset_t before = signals_block();
    int code = pthread_create(thread, NULL, run, cookie);
    signals_restore(&before);
    if (code != 0)
        return error_set_errno(error, FANIN_ERR_LIMIT, code, &place,
                               "cannot start the thread %s", name);
    pthread_setname_np(*thread, name);
    return FANIN_OK;
}

unsigned worker_threads_start(pthread_t *threads, unsigned wanted, void *(*run)(void *),
                              void *cookie)
{
    unsigned count = 0;
    while (count < wanted && worker_thread_start(&threads[count], run, cookie))
        count++;
    return count;
}

void worker_threads_join(const pthread_t *threads, unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
}

unsigned usable_cpus(void)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return n > 0 ? (unsigned)n : 1;
}

void condition_init(pthread_cond_t *condition)
{
    /* Of the attribute and the condition, the C library allocates nothing: these cannot fail. */
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

bool condition_wait(pthread_cond_t *condition, pthread_mutex_t *lock, deadline until)
{
    struct timespec at = {.tv_sec = (time_t)(until / UINT64_C(1000000000)),
                          .tv_nsec = (long)(until % UINT64_C(1000000000))};
    return pthread_cond_timedwait(condition, lock, &at) == 0;
}

/* --------------------------------------------------------------- descriptors */

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
