/* SPDX-License-Identifier: Apache-2.0 */
#include "net/handshakes.h"

#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct handshakes {
    loop_source source; /* first: the loop hands it back; an eventfd */
    loop *loop;
    worker_pool *pool;
    size_t n_out;
};

static void run(worker_job *job)
{
    handshake *h = (handshake *)job;
    h->step = tls_handshake(h->tls);
}

static void hand_back(handshakes *all, worker_job *job, bool made)
{
    handshake *h = (handshake *)job;
    all->n_out--;
    h->is_out = false;
    h->back(h, made);
}

static void on_made(loop_source *source, uint32_t events)
{
    handshakes *all = (handshakes *)source;
    eventfd_t count;
    (void)events;
    (void)eventfd_read(source->fd, &count);
    for (worker_job *job; (job = worker_pool_collect(all->pool));)
        hand_back(all, job, true);
}

handshakes *handshakes_open(loop *l, unsigned threads)
{
    handshakes *all = threads > 0 ? calloc(1, sizeof *all) : NULL;
    if (!all)
        return NULL;
    all->loop = l;
    all->source = (loop_source){.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK),
                                .events = EPOLLIN,
                                .ready = on_made};
    if (all->source.fd >= 0)
        all->pool = worker_pool_create(threads, threads, all->source.fd);
    if (!all->pool || worker_pool_threads(all->pool) == 0 ||
        loop_add(l, &all->source, NULL) != FANIN_OK)
        handshakes_close(&all);
    return all;
}

void handshakes_go_on(handshakes *all, handshake *one)
{
    one->job.run = run;
    one->is_out = true;
    all->n_out++;
    worker_pool_submit(all->pool, &one->job);
}

void handshakes_close(handshakes **of)
{
    handshakes *all = *of;
    *of = NULL;
    if (!all)
        return;
    for (worker_job *job; all->pool && (job = worker_pool_withdraw(all->pool));)
        hand_back(all, job, false);
    while (all->n_out > 0) {
        worker_job *job = worker_pool_collect(all->pool);
        if (job)
            hand_back(all, job, true);
        else
            worker_pool_wait(all->pool);
    }
    if (all->pool)
        worker_pool_destroy(&all->pool);
    loop_remove(all->loop, &all->source);
    if (all->source.fd >= 0)
        close(all->source.fd);
    free(all);
}
