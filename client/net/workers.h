/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * What a first pull computes for each rank, by several threads at once. They live as long as the
 * work, so that nothing of a client runs between calls; the calling thread does what none of them
 * has taken.
 */
#ifndef WORKERS_H
#define WORKERS_H

#include "net/client_state.h"

typedef struct workers workers;

/** One part, in whichever thread: parts share nothing that one of them writes. @p stop: the part's
    own; it stops when the deadline has passed, the call is cancelled or the workers end. */
typedef fanin_status (*workers_fn)(void *cookie, size_t part, work_stop *stop,
                                   fanin_error *error);

/** For up to @p n parts of a call that has time until @p at. @p worth: whether there is work enough
    for threads, which are as many as there are parts and CPUs beyond the caller's. NULL: out of
    memory. */
workers *workers_open(fanin_client *client, deadline at, size_t n, bool worth,
                      workers_fn fn, void *cookie);
/** Lets a thread do the part, which is below n and begun once. Does not block. */
void workers_begin(workers *c, size_t part);
/** Does what no thread has taken, and waits for the others; all look at the deadline and at cancel.
    The first part, by its number, that failed decides: its status and error, and *failed (may be
    NULL) is its number. FANIN_ERR_CANCELLED if the call was cancelled. */
fanin_status workers_finish(workers *c, size_t *failed, fanin_error *error);
/** Parts 0 .. @p n - 1 from beginning to end, by workers of their own. Errors as of
    workers_finish(), and FANIN_ERR_MEMORY. */
fanin_status workers_run(fanin_client *client, deadline at, size_t n, bool worth,
                         workers_fn fn, void *cookie, fanin_error *error);
/** Forgets what no thread has taken, stops and waits for the others, ends the threads. *c NULL is
    fine. */
void workers_close(workers **c);

#endif
