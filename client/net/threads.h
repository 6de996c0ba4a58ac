/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Threads that read beside the calling one, each with a loop of its own. They are made when a pull
 * first has work for them, and kept until the client is disconnected; between pulls they sleep.
 */
#ifndef THREADS_H
#define THREADS_H

#include "net/client_state.h"
#include "net/loop.h"
#include <stdbool.h>
#include <stddef.h>

#define READING_THREADS_MOST 64

typedef struct reading_threads reading_threads;

/** What a thread does before its loop waits, again and again; false: it is through. *@p wake,
    UINT64_MAX: when to look again. */
typedef bool (*reading_turn)(void *cookie, deadline *wake);

/** None yet. @p owner is the calling thread's loop, which turns when a thread has something to
    tell. NULL: no memory, no descriptor. */
reading_threads *reading_threads_create(loop *owner);
/** Ends them; NULL and *threads == NULL are fine. None is at work. */
void reading_threads_destroy(reading_threads **threads);

/** Makes more until there are @p wanted or no more can be had: how many there are. */
unsigned reading_threads_have(reading_threads *t, unsigned wanted);
/** CPUs that this process may use, by its affinity and by the quota that it had at the start. */
unsigned reading_threads_cpus(const reading_threads *t);

/** Of a thread that rests. */
loop *reading_threads_loop(reading_threads *t, unsigned index);
/** Lets a thread that rests work. */
void reading_threads_go(reading_threads *t, unsigned index, reading_turn turn,
                        void *cookie);
/** Threads from this one on have been given no work since all rested. */
unsigned reading_threads_taken(const reading_threads *t);
/** From a thread: it is to rest, which who does not let its loop wait looks for himself. */
bool reading_threads_halted(const reading_threads *t);
/** From a thread: the calling thread's loop is to turn. */
void reading_threads_tell(reading_threads *t);
/** Returns when all rest, which takes a turn of their loops. */
void reading_threads_rest(reading_threads *t);

/* ------------------------------------------------------------- who reads what */

/** What decides how many threads read. */
typedef struct reading_size {
    unsigned configured; /**< 0: as many as are worth it */
    unsigned cpus;
    size_t sources;  /**< of bytes that can be read at once: connections, batches */
    uint64_t bytes;  /**< of all of them */
    uint64_t window; /**< bytes that may be under way */
} reading_size;

/** Threads for it, the calling one included: at least 1. */
unsigned reading_threads_for(const reading_size *size);
/** Connections to one rank that are worth it, at least 1. @p ciphered_here: those of a rank of this
    host by TLS. Up to eight workers of a host may decipher at once, and its trainers need CPUs as
    well: each has an eighth of @p cpus. */
unsigned reading_connections_for(unsigned cpus, bool ciphered_here);
/** Which of @p threads read each of the sources, a bit each: as many bytes each as can be; the
    calling one, number 0, has the least. A source of which a thread's share is but a part is read
    by several, up to @p most. False: no memory. */
bool reading_threads_share(const uint64_t *bytes, size_t n, unsigned threads,
                           unsigned most, uint64_t *threads_of);

/*
 * What a first pull computes for each rank, by several threads at once. They live as long as the
 * work, so that nothing of a client runs between calls; the calling thread does what none of them
 * has taken.
 */

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
