/* SPDX-License-Identifier: Apache-2.0 */
/** @file Threads that copy and hash for a client. */
#ifndef WORKER_THREAD_H
#define WORKER_THREAD_H

#include <pthread.h>
#include <stdbool.h>

/** Starts @p run(@p cookie) with all signals blocked and a small stack; to be joined. False:
    there is no thread, and the caller does the work itself. Does not block. */
bool worker_thread_start(pthread_t *thread, void *(*run)(void *), void *cookie);

#endif
