/* SPDX-License-Identifier: Apache-2.0 */
/** @file What waits to be written of a trace, and the thread that does: file systems may answer
    late or never, and nobody else waits for them. All but recorder_new() is called with the lock
    that it was given, and waits without it. */
#ifndef RECORDER_H
#define RECORDER_H

#include "clock.h"
#include "trace_text.h"
#include <pthread.h>

typedef struct recorder recorder;

/** Makes @p where, or a file of the process in the folder @p where, in the thread, which tells by
    recorder_made(). @p lock: lives as long as the process. FANIN_ERR_MEMORY, FANIN_ERR_LIMIT: no
    thread. */
fanin_status recorder_new(const char *where, bool is_folder, pthread_mutex_t *lock,
                          recorder **out, fanin_error *error);
/** Waits until the file is there. Else it is recorder_end()'s turn: FANIN_ERR_IO, also if nothing
    is known until
    @p at; FANIN_ERR_AUTH. */
fanin_status recorder_made(recorder *r, deadline at, fanin_error *error);
/** Makes the calling thread known. */
trace_thread recorder_introduce(recorder *r);
/** Never allocates or writes. */
void recorder_add(recorder *r, const trace_thread *thread, const trace_span *span);
/** Has what there is written now and not within a second; waits for it until @p at. */
void recorder_write(recorder *r, deadline at);
/** Has the rest written, waits for that until @p at, and drops the recorder: the thread frees it if
    it comes later. 0, or an errno of why not all was written; ETIMEDOUT: nothing is known yet. */
int recorder_end(recorder *r, deadline at);
/** Closes a forked child's file, which is the parent's. The memory is not freed: that is no call
    for a child of several threads. */
void recorder_leave(recorder *r);
/** Which recorder of the process, from 1. */
uint32_t recorder_number(const recorder *r);

#endif
