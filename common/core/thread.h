/* SPDX-License-Identifier: Apache-2.0 */
/** @file Threads that take no signals, how many there is room for, and waiting for them. */
#ifndef THREAD_H
#define THREAD_H

#include "clock.h"
#include <fanin/error.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>

/** Blocks all signals while threads are started, which inherit the mask; what was blocked before,
    for signals_restore(). */
sigset_t signals_block(void);
void signals_restore(const sigset_t *before);

/** Where a thread cannot be started. */
#define THREAD_REMEDY                                                                  \
    "raise ulimit -u, or the limit of processes of the container or service "          \
    "(--pids-limit, TasksMax=)"

/** Starts a thread that blocks all signals. FANIN_ERR_LIMIT. */
fanin_status thread_start(pthread_t *thread, const char *name, void *(*run)(void *),
                          void *cookie, fanin_error *error);

/** Starts @p run(@p cookie) with all signals blocked and a small stack; to be joined. False:
    there is no thread, and the caller does the work itself. Does not block. */
bool worker_thread_start(pthread_t *thread, void *(*run)(void *), void *cookie);

/** Up to @p wanted of these, fewer if no more can be had: how many. To be ended by
    worker_threads_join(). */
unsigned worker_threads_start(pthread_t *threads, unsigned wanted, void *(*run)(void *),
                              void *cookie);
void worker_threads_join(const pthread_t *threads, unsigned count);

/** CPUs that this process may use, at least 1. */
unsigned usable_cpus(void);

/** A condition variable for condition_wait(). */
void condition_init(pthread_cond_t *condition);
/** Waits with @p lock held until somebody signals, or for no reason; false: @p until has passed. */
bool condition_wait(pthread_cond_t *condition, pthread_mutex_t *lock, deadline until);

/* --------------------------------------------------------------- descriptors */

/* Descriptors 0 to 2 of a process that closed them. */

/**
 * Takes those of the numbers 0 to 2 that are closed, for good. Else a connection or a file gets
 * such a number, and whoever writes to standard output or error writes into it. What holds them
 * fails each read and write with EBADF, as a closed descriptor does, and ends at exec.
 */
void standard_descriptors_hold(void);

#endif
