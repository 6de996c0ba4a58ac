/* SPDX-License-Identifier: Apache-2.0 */
/** @file Threads that take no signals. */
#ifndef THREAD_H
#define THREAD_H

#include <fanin/error.h>
#include <pthread.h>
#include <stdbool.h>

/** Starts a thread that blocks all signals. FANIN_ERR_LIMIT. */
fanin_status thread_start(pthread_t *thread, const char *name, void *(*run)(void *),
                          void *cookie, fanin_error *error);

/** Starts @p run(@p cookie) with all signals blocked and a small stack; to be joined. False:
    there is no thread, and the caller does the work itself. Does not block. */
bool worker_thread_start(pthread_t *thread, void *(*run)(void *), void *cookie);

#endif
