/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/stream_link.h"

#include "worker_pool.h"
#include <stddef.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Together they keep up with one receiving thread, also where memory is slow. */
#define MAX_THREADS 4
#define BACKLOG 64 /* bodies that have come and have no verdict, of a megabyte or so */

typedef struct check {
    sealed_body body; /* first: its owner hands it back */
    worker_job job;
    struct check *next, **back;
    checksum *sum;
    bool fits;
} check;

struct seal_checks {
    loop_source source; /* first: the loop hands it back */
    loop *loop;
    worker_pool *pool;
    check *first; /* all that have no verdict */
    unsigned n;   /* of these, the submitted ones */
};

void seal_checks_give_back(sealed_body *body)
{
    check *k = (check *)body;
    *k->back = k->next;
    if (k->next)
        k->next->back = k->back;
    checksum_free(k->sum);
    free(k);
}

static check *check_of(worker_job *job)
{
    return (check *)((char *)job - offsetof(check, job));
}

/* The piece's bytes in the order in which they came. */
static void sum_piece(checksum *sum, const sealed_body *b, const piece *p)
{
    const piece_ranges ranges = piece_ranges_of(b->plan, p);
    const strided *view = ranges.landing;
    if (!view) {
        checksum_add(sum, b->base + p->to, ranges.count * ranges.length);
        return;
    }
    for (uint64_t i = 0; i < strided_runs(view); i++) {
        int64_t to;
        strided_run(view, i, NULL, &to);
        checksum_add(sum, b->base + p->to + to, view->run);
    }
}

static void make_check(worker_job *job)
{
    check *k = check_of(job);
    const sealed_body *b = &k->body;
    checksum_add(k->sum, b->header, FRAME_SIZE);
    for (uint32_t i = 0; i < b->n_pieces; i++)
        sum_piece(k->sum, b, &b->pieces[i]);
    k->fits = seal_fits(checksum_get(k->sum), b->seal);
}

static void on_checked(loop_source *source, uint32_t events)
{
    seal_checks *c = (seal_checks *)source;
    eventfd_t count;
    (void)events;
    (void)eventfd_read(source->fd, &count);
    for (worker_job *job; (job = worker_pool_collect(c->pool));) {
        check *k = check_of(job);
        k->body.verdict(k->body.owner, k->body.bytes, k->fits);
        seal_checks_give_back(&k->body);
        c->n--;
    }
}

seal_checks *seal_checks_create(loop *l)
{
    seal_checks *c = calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->loop = l;
    c->source = (loop_source){.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK),
                              .events = EPOLLIN,
                              .ready = on_checked};
    if (c->source.fd >= 0)
        c->pool = worker_pool_create(0, MAX_THREADS, c->source.fd);
    if (!c->pool || worker_pool_threads(c->pool) == 0 ||
        loop_add(l, &c->source, NULL) != FANIN_OK)
        seal_checks_destroy(&c);
    return c;
}

sealed_body *seal_checks_take(seal_checks *c)
{
    check *k = c && c->n < BACKLOG ? calloc(1, sizeof *k) : NULL;
    if (!k)
        return NULL;
    k->job.run = make_check;
    k->next = c->first;
    k->back = &c->first;
    if (k->next)
        k->next->back = &k->next;
    c->first = k;
    k->sum = checksum_create();
    if (!k->sum) {
        seal_checks_give_back(&k->body);
        return NULL;
    }
    return &k->body;
}

void seal_checks_submit(seal_checks *c, sealed_body *body)
{
    c->n++;
    worker_pool_submit(c->pool, &((check *)body)->job);
}

bool seal_checks_help(seal_checks *c)
{
    return c && worker_pool_help(c->pool);
}

void seal_checks_destroy(seal_checks **checks)
{
    seal_checks *c = *checks;
    *checks = NULL;
    if (!c)
        return;
    worker_pool_destroy(&c->pool);
    while (c->first)
        seal_checks_give_back(&c->first->body);
    loop_remove(c->loop, &c->source);
    if (c->source.fd >= 0)
        close(c->source.fd);
    free(c);
}
