/* SPDX-License-Identifier: Apache-2.0 */
#include "net/workers.h"

#include "error_set.h"
#include "worker_pool.h"
#include <stdlib.h>

#define MOST_THREADS 15

typedef struct workers_part {
    worker_job job;
    workers *of;
    client_work work;
    bool begun;
    fanin_status status;
    fanin_error error;
} workers_part;

struct workers {
    worker_pool *pool;
    atomic_bool closing;
    workers_fn fn;
    void *cookie;
    size_t n, n_begun, n_ended;
    workers_part parts[];
};

static bool wants_no_more(void *cookie)
{
    const workers_part *p = cookie;
    return atomic_load(&p->of->closing) || client_work_over(&p->work);
}

static void run_part(worker_job *job)
{
    workers_part *p = (workers_part *)job; /* its first member */
    p->status =
        p->of->fn(p->of->cookie, (size_t)(p - p->of->parts), &p->work.stop, &p->error);
}

workers *workers_open(fanin_client *client, deadline at, size_t n, bool worth,
                      workers_fn fn, void *cookie)
{
    workers *c = calloc(1, sizeof *c + n * sizeof c->parts[0]);
    if (!c)
        return NULL;
    unsigned most = n < MOST_THREADS ? (unsigned)n : MOST_THREADS;
    c->pool = worker_pool_create(0, worth ? most : 0, -1);
    if (!c->pool) {
        free(c);
        return NULL;
    }
    c->fn = fn;
    c->cookie = cookie;
    c->n = n;
    for (size_t i = 0; i < n; i++) {
        c->parts[i] =
            (workers_part){.job.run = run_part, .of = c, .error = FANIN_ERROR_INIT};
        client_work_start(&c->parts[i].work, client, at);
        c->parts[i].work.stop.fn = wants_no_more;
        c->parts[i].work.stop.cookie = &c->parts[i];
    }
    return c;
}

void workers_begin(workers *c, size_t part)
{
    c->parts[part].begun = true;
    c->n_begun++;
    worker_pool_submit(c->pool, &c->parts[part].job);
}

fanin_status workers_finish(workers *c, size_t *failed, fanin_error *error)
{
    while (c->n_ended < c->n_begun) {
        if (worker_pool_collect(c->pool))
            c->n_ended++;
        else if (!worker_pool_help(c->pool))
            worker_pool_wait(c->pool);
    }
    for (size_t i = 0; i < c->n; i++) {
        const workers_part *p = &c->parts[i];
        if (!p->begun || p->status == FANIN_OK)
            continue;
        if (failed)
            *failed = i;
        error_copy(error, &p->error);
        return client_work_end(&p->work, p->status, error);
    }
    return FANIN_OK;
}

void workers_close(workers **c)
{
    if (!*c)
        return;
    atomic_store(&(*c)->closing, true);
    worker_pool_destroy(&(*c)->pool);
    free(*c);
    *c = NULL;
}

fanin_status workers_run(fanin_client *client, deadline at, size_t n, bool worth,
                         workers_fn fn, void *cookie, fanin_error *error)
{
    workers *w = workers_open(client, at, n, worth, fn, cookie);
    if (!w)
        return error_set_memory(error);
    for (size_t i = 0; i < n; i++)
        workers_begin(w, i);
    fanin_status status = workers_finish(w, NULL, error);
    workers_close(&w);
    return status;
}
