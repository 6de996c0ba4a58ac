/* SPDX-License-Identifier: Apache-2.0 */
#include "adapter/populate.h"

#include "thread.h"
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE /* Linux 5.14 */
#define MADV_POPULATE_WRITE 23
#endif
#define STEP ((uint64_t)4 << 20)
#define MAX_THREADS 4

struct populator {
    uint8_t *base;
    uint64_t size;
    _Atomic uint64_t next; /* where the next step begins */
    atomic_bool failed;
    unsigned n_threads;
    pthread_t threads[MAX_THREADS];
};

static void *populate(void *argument)
{
    populator *p = argument;
    for (;;) {
        uint64_t at = atomic_fetch_add(&p->next, STEP);
        if (at >= p->size)
            break;
        uint64_t left = p->size - at;
        size_t step = (size_t)(left < STEP ? left : STEP);
        int status;
        do
            status = madvise(p->base + at, step, MADV_POPULATE_WRITE);
        while (status != 0 && (errno == EAGAIN || errno == EINTR));
        if (status != 0) { /* an old kernel: pages appear when they are touched */
            atomic_store(&p->failed, true);
            break;
        }
    }
    return NULL;
}

populator *populator_start(uint8_t *base, uint64_t size)
{
    populator *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->base = base;
    p->size = size;
    unsigned wanted = usable_cpus();
    uint64_t steps = (size + STEP - 1) / STEP;
    wanted = wanted < MAX_THREADS ? wanted : MAX_THREADS;
    wanted = wanted < steps ? wanted : (unsigned)steps;
    while (p->n_threads < wanted &&
           worker_thread_start(&p->threads[p->n_threads], populate, p))
        p->n_threads++;
    if (p->n_threads > 0)
        return p;
    free(p);
    return NULL;
}

bool populator_finish(populator **populator_)
{
    populator *p = *populator_;
    *populator_ = NULL;
    if (!p)
        return false;
    for (unsigned i = 0; i < p->n_threads; i++)
        pthread_join(p->threads[i], NULL);
    bool whole = !atomic_load(&p->failed) && atomic_load(&p->next) >= p->size;
    free(p);
    return whole;
}
