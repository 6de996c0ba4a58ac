/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/stream_link_internal.h"

#include "convert.h"
#include <stdlib.h>

#define BATCH_BYTES ((size_t)1 << 20)
#define SHORT_RUN 256 /* shorter runs are scattered from a buffer, not by iovecs */

void batch_begin(data_connection *d)
{
    const stream_work *w = d->link->work;
    const read_request *r = &w->list->requests[d->queue[0]];
    d->piece = r->first_piece;
    d->pieces_end = r->first_piece + r->n_pieces;
    d->run = 0;
    d->n_iov = d->at_iov = 0;
    d->iov_left = 0;
    d->on_device = false;
    d->stage = BODY;
}

static void add_iovec(data_connection *d, uint8_t *to, size_t length)
{
    d->lengths[d->n_iov] = length;
    d->iov[d->n_iov++] = (struct iovec){.iov_base = to, .iov_len = length};
    d->iov_left += length;
}

static bool batch_full(const data_connection *d)
{
    return d->n_iov == MAX_IOVECS || d->iov_left >= BATCH_BYTES;
}

/* What a piece is when it comes: its bytes, and how they land. */
typedef struct arrival {
    const piece *p;
    const strided *view; /* NULL: contiguously, as they are */
    uint64_t length;
} arrival;

static arrival arrival_of(const plan *plan, const piece *p)
{
    piece_ranges ranges = piece_ranges_of(plan, p);
    return (arrival){p, ranges.landing, ranges.count * ranges.length};
}

/* A piece that is received in `staging`, a batch of its own. */
static bool add_staged(data_connection *d, const arrival *a)
{
    if (!d->staging && !(d->staging = malloc(PIECE_MAX)))
        return false;
    add_iovec(d, d->staging, a->length);
    d->staged = true;
    d->piece++;
    return true;
}

/* The runs of a view, one by one. False: the batch is full before they are through. */
static bool add_iovec_runs(data_connection *d, const arrival *a)
{
    const stream_work *w = d->link->work;
    uint64_t runs = strided_runs(a->view);
    for (; d->run < runs && !batch_full(d); d->run++) {
        int64_t to;
        strided_run(a->view, d->run, NULL, &to);
        add_iovec(d, w->base + a->p->to + to, a->view->run);
    }
    if (d->run < runs)
        return false;
    d->run = 0;
    return true;
}

/* Into the job's chunk, if there is room for all of the piece. Nobody is told of iovecs of length
   0 (lengths[]): what came is not in place yet. */
static bool add_placed(data_connection *d, const arrival *a)
{
    const stream_work *w = d->link->work;
    uint8_t *at =
        d->job ? sink_job_place(d->job, a->length, w->base + a->p->to, a->view) : NULL;
    if (!at)
        return false;
    add_iovec(d, at, a->length);
    d->lengths[d->n_iov - 1] = 0;
    d->on_device = true;
    return true;
}

void batch_submit(data_connection *d)
{
    sink_job *job = d->job;
    d->job = NULL;
    *d->end_job = job;
    d->end_job = &job->next;
    device_sink_submit(job, data_landed);
}

/* Makes sure that the next piece has a chunk. False: there is none now (the connection pauses), or
   never will be. Nothing of the batch may be missing. */
static bool find_room(data_connection *d, const arrival *a)
{
    const stream_work *w = d->link->work;
    if (add_placed(d, a))
        return true;
    if (d->job && d->job->n_items > 0)
        batch_submit(d);
    if (!d->job)
        d->job = device_sink_take(w->devices, d);
    if (add_placed(d, a))
        return true;
    if (device_sink_failed(w->devices, NULL)) {
        data_lose_device(d);
    } else if (d->job) {
        data_lose(d, FANIN_ERR_MEMORY, 0, "sent what memory does not suffice to sort");
    } else {
        d->paused = true;
        device_sink_wait(w->devices, &d->waiter);
        data_want(d);
    }
    return false;
}

/* Whether the bytes of a piece come into `staging` first: they change, their runs are short, or
   there are bytes between them that nobody wants (short gaps are read along). */
static bool is_staged(const arrival *a)
{
    const strided *v = a->view;
    return v && (v->convert != CONVERT_NONE || v->run < SHORT_RUN ||
                 strided_bytes(v) != a->length);
}

/* Where the piece lands is made ready for it. */
static bool prepare_landing(data_connection *d, const piece *p)
{
    stream_work *w = d->link->work;
    fanin_error why = FANIN_ERROR_INIT;
    uint64_t low, high;
    if (!w->need || w->failed)
        return !w->failed;
    plan_piece_reach(w->plan, p, &low, &high);
    fanin_status status = w->need(w->landed_cookie, low, high - low, &why);
    if (status == FANIN_OK)
        return true;
    stream_work_fail(w, &why);
    data_lose(d, status, 0, "lost its place"); /* w has said why already */
    return false;
}

bool batch_fill(data_connection *d)
{
    const stream_work *w = d->link->work;
    d->n_iov = d->at_iov = 0;
    d->iov_left = 0;
    d->staged = false;
    while (d->piece < d->pieces_end && !batch_full(d)) {
        const arrival a = arrival_of(w->plan, &w->pieces->pieces[d->piece]);
        if (w->devices && device_sink_device(w->devices, w->base + a.p->to) >= 0) {
            if (d->n_iov == 0 ? !find_room(d, &a) : !add_placed(d, &a))
                return d->n_iov > 0;
        } else if (!prepare_landing(d, a.p)) {
            return false;
        } else if (!a.view) {
            add_iovec(d, w->base + a.p->to, a.length);
        } else if (is_staged(&a)) {
            if (d->n_iov > 0 || add_staged(d, &a))
                return true;
            data_lose(d, FANIN_ERR_MEMORY, 0,
                      "sent what memory does not suffice to sort");
            return false;
        } else if (!add_iovec_runs(d, &a)) {
            return true;
        }
        d->piece++;
    }
    return true;
}

static void finish_batch(data_connection *d)
{
    stream_work *w = d->link->work;
    if (d->staged) {
        const arrival a = arrival_of(w->plan, &w->pieces->pieces[d->piece - 1]);
        strided_copy(a.view, w->base + a.p->to, d->staging);
        if (w->landed)
            landed_view(w->landed, w->landed_cookie, a.view, a.p->to);
        return;
    }
    for (unsigned i = 0; i < d->n_iov && w->landed; i++) {
        if (d->lengths[i] == 0)
            continue;
        const uint8_t *end = d->iov[i].iov_base; /* consume() moved it there */
        w->landed(w->landed_cookie, (uint64_t)(end - d->lengths[i] - w->base),
                  d->lengths[i]);
    }
}

void batch_consume(data_connection *d, size_t bytes)
{
    d->iov_left -= bytes;
    while (bytes > 0) {
        struct iovec *v = &d->iov[d->at_iov];
        size_t step = bytes < v->iov_len ? bytes : v->iov_len;
        v->iov_base = (uint8_t *)v->iov_base + step;
        v->iov_len -= step;
        bytes -= step;
        d->at_iov += v->iov_len == 0;
    }
    if (d->iov_left == 0)
        finish_batch(d);
}
