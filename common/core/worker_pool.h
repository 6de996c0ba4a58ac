/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Threads that copy, check or digest what has come, while the pulling thread fetches the next
 * bytes, or compute what a first pull needs, or handshakes. They live for one pull at most, so that
 * nothing of a client runs between calls.
 */
#ifndef WORKER_POOL_H
#define WORKER_POOL_H

#include <fanin/types.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* How long computations look whether they are still wanted. */

/** Zeroed but for fn and cookie. */
typedef struct work_stop {
    bool (*fn)(void *cookie); /**< true: stop; from then on it is not asked again */
    void *cookie;
    uint32_t steps;
    bool stopped;
} work_stop;

/** Small steps between two looks; a step takes a microsecond at most. */
#define WORK_STEPS 4096

/** To be called for every @p steps small steps of the work, at most WORK_STEPS; asks only now and
    then. NULL: never stops. */
static inline bool work_stopped_after(work_stop *w, uint32_t steps)
{
    if (!w || w->stopped)
        return w != NULL;
    w->steps += steps;
    if (w->steps < WORK_STEPS)
        return false;
    w->steps -= WORK_STEPS;
    w->stopped = w->fn(w->cookie);
    return w->stopped;
}

/** The same for one step. */
static inline bool work_stopped(work_stop *w)
{
    return work_stopped_after(w, 1);
}

/** Why work was not completed: FANIN_ERR_TIMEOUT ("the deadline passed while @p doing") if it was
    stopped, else FANIN_ERR_MEMORY. @p stop may be NULL. */
fanin_status work_broken_off(const work_stop *stop, const char *phase,
                             const char *doing, fanin_error *error);

typedef struct worker_pool worker_pool;

/** Embedded in what is to be done; run() is called once, in any of the threads. */
typedef struct worker_job {
    struct worker_job *next;
    void (*run)(struct worker_job *job);
} worker_job;

/** As many threads as the process may use CPUs beyond its own, @p least to @p most; 0 is fine: then
    the caller's worker_pool_help() does everything. @p event: an eventfd that tells of jobs that
    are done, it outlives the pool; -1: none. NULL: out of memory. */
worker_pool *worker_pool_create(unsigned least, unsigned most, int event);
/** Threads that run. */
unsigned worker_pool_threads(const worker_pool *pool);
/** Drops what is queued, waits for what is running, forgets what is done. */
void worker_pool_drain(worker_pool *pool);
/** The same, and ends the threads. */
void worker_pool_destroy(worker_pool **pool);

void worker_pool_submit(worker_pool *pool, worker_job *job);
/** Runs one queued job in the calling thread; false: none is queued. */
bool worker_pool_help(worker_pool *pool);
/** A job that is done, each once, in the order in which they ended; NULL: none. */
worker_job *worker_pool_collect(worker_pool *pool);
/** Waits until a job is done, if any is running in a thread. At most a copy of one slot. */
void worker_pool_wait(worker_pool *pool);

#endif
