/* SPDX-License-Identifier: Apache-2.0 */
#include "ucx/one_sided_internal.h"

#include "error_set.h"
#include <stddef.h>
#include <string.h>

/* ------------------------------------------------------------------ failing */

void work_fail(const one_sided *o, one_sided_work *w, const char *what)
{
    if (w->failed)
        return;
    const connection *c = o->r->client->peers[w->peer].control;
    error_place place = connection_place(c, "read");
    w->failed = true;
    w->error = (fanin_error)FANIN_ERROR_INIT;
    error_set(&w->error, FANIN_ERR_TRANSPORT, &place,
              "reading from rank %u at %s by rdma: %s", w->rank, connection_text(c),
              what);
}

/* A device, or the driver, has failed. */
static void work_fail_device(const one_sided *o, one_sided_work *w)
{
    fanin_error why = FANIN_ERROR_INIT;
    if (device_sink_failed(o->r->sink, &why))
        work_fail(o, w, why.message);
}

/* --------------------------------------------------------------- scattering */

typedef void (*place_fn)(const one_sided *o, const get *g, const span_piece *p,
                         const strided *view);

/* Of each piece in host memory. */
static void walk_host(const one_sided *o, const get *g, place_fn place)
{
    const plan_spans *spans = g->work->spans;
    const span *s = g->span;
    for (uint64_t i = s->first; i < s->first + s->count; i++) {
        const span_piece *p = &spans->pieces[i];
        if (!g->to_devices || device_sink_device(o->r->sink, o->r->base + p->to) < 0)
            place(o, g, p, p->view ? &spans->views[p->view - 1] : NULL);
    }
}

/* In any thread: what the pool was made for. */
static void scatter(const one_sided *o, const get *g, const span_piece *p,
                    const strided *view)
{
    if (view)
        strided_copy(view, o->r->base + p->to, g->slot + p->offset);
    else
        memcpy(o->r->base + p->to, g->slot + p->offset, p->length);
}

static void tell_landed(const one_sided *o, const get *g, const span_piece *p,
                        const strided *view)
{
    (void)g;
    if (view)
        landed_view(o->r->landed, o->r->cookie, view, p->to);
    else
        o->r->landed(o->r->cookie, p->to, p->length);
}

void get_scatter(worker_job *job)
{
    get *g = (get *)job;
    uint64_t start = clock_ns();
    walk_host(g->reader, g, scatter);
    g->scatter_ns = clock_ns() - start;
}

void get_finish(one_sided *o, get *g)
{
    if (o->r->landed)
        walk_host(o, g, tell_landed);
    g->busy = false;
    g->work->done_spans++;
    g->work->bytes += g->span->length;
}

static void get_finish_part(one_sided *o, get *g)
{
    if (--g->parts == 0)
        get_finish(o, g);
}

bool get_collect(one_sided *o)
{
    bool any = false;
    worker_job *job;
    while ((job = worker_pool_collect(o->pool))) {
        get *g = (get *)job;
        o->scattering--;
        o->scatter_ns += g->scatter_ns;
        get_finish_part(o, g);
        any = true;
    }
    return any;
}

/* --------------------------------------------------------------- to devices */

/* A device has copied its part out of a slot. */
static void on_copied(sink_job *job, bool ok)
{
    one_sided *o = job->owner;
    get *g = (get *)((char *)job - offsetof(get, copy));
    sink_job_clear(job);
    if (ok)
        get_finish_part(o, g);
    else
        work_fail_device(o, g->work);
}

static bool submit_copy(one_sided *o, get *g)
{
    const plan_spans *spans = g->work->spans;
    const span *s = g->span;
    for (uint64_t i = s->first; i < s->first + s->count; i++) {
        const span_piece *p = &spans->pieces[i];
        const strided *view = p->view ? &spans->views[p->view - 1] : NULL;
        uint8_t *to = o->r->base + p->to;
        if (device_sink_device(o->r->sink, to) >= 0 &&
            !sink_job_add(&g->copy, g->slot + p->offset, p->length, to, view))
            return false;
    }
    device_sink_submit(&g->copy, on_copied);
    return true;
}

void get_distribute(one_sided *o, get *g)
{
    g->parts = (unsigned)g->to_host + (unsigned)g->to_devices;
    if (g->to_devices && !submit_copy(o, g)) {
        work_fail(o, g->work, "memory does not suffice to sort what came");
        return;
    }
    if (g->to_host) {
        o->scattering++;
        worker_pool_submit(o->pool, &g->job);
    }
}

bool get_flush(one_sided *o, const get *g)
{
    fanin_error why = FANIN_ERROR_INIT;
    if (g->device < 0 || gpu_flush_remote_writes(device_sink_gpu(o->r->sink), g->device,
                                                 &why) == FANIN_OK)
        return true;
    device_sink_fail(o->r->sink, &why);
    work_fail_device(o, g->work);
    return false;
}
