/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Threads that copy out of staging slots, or check what came, while the pulling thread fetches the
 * next bytes. They live for one read phase, so that nothing of a client runs between calls.
 */
#ifndef SCATTER_POOL_H
#define SCATTER_POOL_H

#include <stdbool.h>

typedef struct scatter_pool scatter_pool;

/** Embedded in what is to be scattered; run() is called once, in any of the threads. */
typedef struct scatter_job {
    struct scatter_job *next;
    void (*run)(struct scatter_job *job);
} scatter_job;

/** As many threads as the process may use CPUs beyond its own, at most @p most; 0 is fine: then
    the caller's scatter_pool_help() does everything. @p event: an eventfd that tells of jobs that
    are done, it outlives the pool; -1: none. NULL: out of memory. */
scatter_pool *scatter_pool_create(unsigned most, int event);
/** Threads that run. */
unsigned scatter_pool_threads(const scatter_pool *pool);
/** Drops what is queued, waits for what is running, ends the threads. */
void scatter_pool_destroy(scatter_pool **pool);

void scatter_pool_submit(scatter_pool *pool, scatter_job *job);
/** Runs one queued job in the calling thread; false: none is queued. */
bool scatter_pool_help(scatter_pool *pool);
/** A job that is done, each once, in the order in which they ended; NULL: none. */
scatter_job *scatter_pool_collect(scatter_pool *pool);
/** Waits until a job is done, if any is running in a thread. At most a copy of one slot. */
void scatter_pool_wait(scatter_pool *pool);

#endif
