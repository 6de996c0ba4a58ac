/* SPDX-License-Identifier: Apache-2.0 */
#include "worker_pool.h"
#include "error_set.h"
#include "thread.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/eventfd.h>

/* ---------------------------------------------------------------------- work stop */

fanin_status work_broken_off(const work_stop *stop, const char *phase,
                             const char *doing, fanin_error *error)
{
    error_place place = {.phase = phase, .remedy = "allow more time"};
    if (!stop || !stop->stopped)
        return error_set_memory(error);
    return error_set(error, FANIN_ERR_TIMEOUT, &place, "the deadline passed while %s",
                     doing);
}

/* -------------------------------------------------------------------- worker pool */

typedef struct queue {
    worker_job *first, **end;
} queue;

struct worker_pool {
    pthread_mutex_t lock;
    pthread_cond_t work, done_cond;
    queue waiting, done;
    unsigned running, n_threads;
    bool quit;
    int event; /* -1: none */
    pthread_t threads[];
};

static void empty(queue *q)
{
    q->first = NULL;
    q->end = &q->first;
}

static void pool_push(queue *q, worker_job *job)
{
    job->next = NULL;
    *q->end = job;
    q->end = &job->next;
}

static worker_job *pop(queue *q)
{
    worker_job *job = q->first;
    if (job) {
        q->first = job->next;
        if (!q->first)
            q->end = &q->first;
    }
    return job;
}

/* Runs one job; the lock is held before and after. */
static void run_one(worker_pool *pool, worker_job *job)
{
    pool->running++;
    pthread_mutex_unlock(&pool->lock);
    job->run(job);
    pthread_mutex_lock(&pool->lock);
    pool->running--;
    pool_push(&pool->done, job);
    pthread_cond_signal(&pool->done_cond);
    if (pool->event >= 0)
        (void)eventfd_write(pool->event, 1);
}

static void *pool_work(void *cookie)
{
    worker_pool *pool = cookie;
    pthread_setname_np(pthread_self(), "fanin-work");
    pthread_mutex_lock(&pool->lock);
    while (!pool->quit) {
        worker_job *job = pop(&pool->waiting);
        if (job)
            run_one(pool, job);
        else
            pthread_cond_wait(&pool->work, &pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

worker_pool *worker_pool_create(unsigned least, unsigned most, int event)
{
    unsigned spare = usable_cpus() - 1, n = spare < most ? spare : most;
    n = n < least ? least : n;
    worker_pool *pool = calloc(1, sizeof *pool + n * sizeof pool->threads[0]);
    if (!pool)
        return NULL;
    pool->event = event;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->done_cond, NULL);
    empty(&pool->waiting);
    empty(&pool->done);
    pool->n_threads = worker_threads_start(pool->threads, n, pool_work, pool);
    return pool;
}

unsigned worker_pool_threads(const worker_pool *pool)
{
    return pool->n_threads;
}

void worker_pool_drain(worker_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    empty(&pool->waiting);
    while (pool->running > 0)
        pthread_cond_wait(&pool->done_cond, &pool->lock);
    empty(&pool->done);
    pthread_mutex_unlock(&pool->lock);
}

void worker_pool_destroy(worker_pool **pool)
{
    worker_pool *p = *pool;
    *pool = NULL;
    if (!p)
        return;
    pthread_mutex_lock(&p->lock);
    p->quit = true;
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);
    worker_threads_join(p->threads, p->n_threads);
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->work);
    pthread_cond_destroy(&p->done_cond);
    free(p);
}

void worker_pool_submit(worker_pool *pool, worker_job *job)
{
    pthread_mutex_lock(&pool->lock);
    pool_push(&pool->waiting, job);
    pthread_cond_signal(&pool->work);
    pthread_mutex_unlock(&pool->lock);
}

bool worker_pool_help(worker_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    worker_job *job = pop(&pool->waiting);
    if (job)
        run_one(pool, job);
    pthread_mutex_unlock(&pool->lock);
    return job != NULL;
}

worker_job *worker_pool_collect(worker_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    worker_job *job = pop(&pool->done);
    pthread_mutex_unlock(&pool->lock);
    return job;
}

void worker_pool_wait(worker_pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    while (!pool->done.first && pool->running > 0)
        pthread_cond_wait(&pool->done_cond, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}
