/* SPDX-License-Identifier: Apache-2.0 */
#include "adapter/piece_digests.h"

#include "thread.h"
#include <stdlib.h>
#include <string.h>

/* One thread digests 4 GB/s of memory that it has not touched before; a copy engine brings 55. */
#define MAX_THREADS 16
#define BYTES_A_THREAD ((uint64_t)64 << 20) /* below, one is enough */

struct piece_digests {
    const uint8_t *base;
    uint64_t size;
    size_t count;
    /* of the caller's thread only */
    uint32_t *missing; /* bytes of each piece */
    bool wrong;
    /* under the lock */
    pthread_mutex_t lock;
    pthread_cond_t more, idle;
    uint32_t *queue; /* pieces in the order in which they were completed */
    size_t head, tail;
    unsigned busy; /* pieces being read */
    bool stopping;

    digest *digests;
    pthread_t threads[MAX_THREADS];
    unsigned n_threads;
};

static uint64_t piece_size(const piece_digests *p, size_t piece)
{
    uint64_t begin = (uint64_t)piece * DIGEST_PIECE;
    return p->size - begin < DIGEST_PIECE ? p->size - begin : DIGEST_PIECE;
}

/* Takes the next piece, makes its digest without the lock, takes the lock again. */
static void make_next(piece_digests *p)
{
    uint32_t piece = p->queue[p->head++];
    p->busy++;
    pthread_mutex_unlock(&p->lock);
    p->digests[piece] =
        digest_of(p->base + (uint64_t)piece * DIGEST_PIECE, piece_size(p, piece));
    pthread_mutex_lock(&p->lock);
    if (--p->busy == 0)
        pthread_cond_signal(&p->idle);
}

static void *make_all(void *argument)
{
    piece_digests *p = argument;
    pthread_mutex_lock(&p->lock);
    while (!p->stopping) {
        if (p->head < p->tail)
            make_next(p);
        else
            pthread_cond_wait(&p->more, &p->lock);
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

static void forget(piece_digests *p)
{
    for (size_t i = 0; i < p->count; i++)
        p->missing[i] = (uint32_t)piece_size(p, i);
    p->wrong = false;
    p->head = p->tail = 0;
}

static void start_threads(piece_digests *p)
{
    unsigned cpus = usable_cpus(), wanted = cpus > 2 ? cpus - 1 : 1;
    uint64_t worth = 1 + p->size / BYTES_A_THREAD;
    wanted = wanted < MAX_THREADS ? wanted : MAX_THREADS;
    wanted = wanted < worth ? wanted : (unsigned)worth;
    p->n_threads = worker_threads_start(p->threads, wanted, make_all, p);
}

piece_digests *piece_digests_start(const uint8_t *base, uint64_t size)
{
    piece_digests *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->base = base;
    p->size = size;
    p->count = (size_t)((size + DIGEST_PIECE - 1) / DIGEST_PIECE);
    p->missing = calloc(p->count + 1, sizeof p->missing[0]);
    p->queue = calloc(p->count + 1, sizeof p->queue[0]);
    p->digests = calloc(p->count + 1, sizeof p->digests[0]);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->more, NULL);
    pthread_cond_init(&p->idle, NULL);
    if (!p->missing || !p->queue || !p->digests) {
        piece_digests_stop(&p);
        return NULL;
    }
    forget(p);
    start_threads(p);
    return p;
}

static void complete(piece_digests *p, size_t piece)
{
    pthread_mutex_lock(&p->lock);
    p->queue[p->tail++] = (uint32_t)piece;
    pthread_cond_signal(&p->more);
    pthread_mutex_unlock(&p->lock);
}

void piece_digests_landed(piece_digests *p, uint64_t offset, uint64_t length)
{
    if (offset > p->size || length > p->size - offset) {
        p->wrong = true;
        return;
    }
    while (length > 0) {
        size_t piece = (size_t)(offset / DIGEST_PIECE);
        uint64_t here = DIGEST_PIECE - offset % DIGEST_PIECE;
        if (here > length)
            here = length;
        if (here > p->missing[piece]) {
            p->wrong = true;
            return;
        }
        p->missing[piece] -= (uint32_t)here;
        if (p->missing[piece] == 0)
            complete(p, piece);
        offset += here;
        length -= here;
    }
}

void piece_digests_restart(piece_digests *p)
{
    pthread_mutex_lock(&p->lock);
    p->head = p->tail;
    while (p->busy > 0)
        pthread_cond_wait(&p->idle, &p->lock);
    forget(p);
    pthread_mutex_unlock(&p->lock);
}

bool piece_digests_finish(piece_digests *p, digest *out)
{
    bool whole = !p->wrong;
    for (size_t i = 0; i < p->count; i++)
        whole = whole && p->missing[i] == 0;
    pthread_mutex_lock(&p->lock);
    while (whole && p->head < p->tail)
        make_next(p); /* the rest is shared with the threads */
    while (p->busy > 0)
        pthread_cond_wait(&p->idle, &p->lock);
    pthread_mutex_unlock(&p->lock);
    if (whole)
        *out = digest_of(p->digests, p->count * sizeof p->digests[0]);
    return whole;
}

void piece_digests_stop(piece_digests **p)
{
    if (!p || !*p)
        return;
    piece_digests *d = *p;
    *p = NULL;
    pthread_mutex_lock(&d->lock);
    d->stopping = true;
    pthread_cond_broadcast(&d->more);
    pthread_mutex_unlock(&d->lock);
    worker_threads_join(d->threads, d->n_threads);
    pthread_cond_destroy(&d->idle);
    pthread_cond_destroy(&d->more);
    pthread_mutex_destroy(&d->lock);
    free(d->missing);
    free(d->queue);
    free(d->digests);
    free(d);
}
