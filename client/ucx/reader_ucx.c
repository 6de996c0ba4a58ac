/* SPDX-License-Identifier: Apache-2.0 */
#include "ucx/one_sided_internal.h"

#include "error_set.h"
#include <stdlib.h>

/* Below so many bytes the copying is not worth threads. */
#define THREADS_FROM ((uint64_t)16 << 20)
#define MAX_THREADS 3

/* A get costs about as much as copying this many bytes; measured where UCX let the kernel copy on
   one host: a piece of its own was worth it from some tens of KiB on. */
static const span_rule span_rules = {
    .max_length = SPAN_MAX, .max_gap = 8192, .direct_from = 65536};

/* -------------------------------------------------------------- life cycle */

static void on_wake(loop_source *source, uint32_t events)
{
    (void)source;
    (void)events; /* the next step progresses */
}

static fanin_status add_work(one_sided *o, size_t source, const plan_spans *spans,
                             fanin_error *error)
{
    const path_reading *r = o->r;
    const path_state *s = path_taken(r->publication, r->plan->peer_of[source]);
    one_sided_work *w = &o->works[source];
    *w = (one_sided_work){.peer = r->plan->peer_of[source],
                          .rank = r->plan->sources[source].rank,
                          .regions = s->regions,
                          .rkeys = ucx_keys_of(s),
                          .spans = spans};
    for (uint64_t i = 0; i < spans->n_spans; i++)
        o->bytes += spans->spans[i].length;
    return path_arena(r, source, &w->first_region, error);
}

static fanin_status start(const path_reading *r, void *const *details, void *shared,
                          void **reading, fanin_error *error)
{
    (void)shared;
    one_sided *o = calloc(1, sizeof *o + r->plan->n_sources * sizeof *o->works);
    *reading = o;
    if (!o)
        return error_set_memory(error);
    *o = (one_sided){.r = r,
                     .end = r->client->one_sided,
                     .n = r->plan->n_sources,
                     .context = -1,
                     .source = {.fd = -1, .events = EPOLLIN, .ready = on_wake}};
    fanin_status status = one_sided_make_staging(o->end, error);
    for (size_t i = 0; i < o->n && status == FANIN_OK; i++) {
        if (r->plan->reader_of[i] == &ucx_reader)
            status = add_work(o, i, details[i], error);
    }
    if (status == FANIN_OK)
        status = one_sided_make_gets(o, error);
    if (status != FANIN_OK)
        return status;
    o->pool = worker_pool_create(0, o->bytes < THREADS_FROM ? 0 : MAX_THREADS, -1);
    if (!o->pool)
        return error_set_memory(error);
    one_sided_register(o);
    o->source.fd = ucx_client_fd(o->end->client);
    return loop_add(&r->client->loop, &o->source, error);
}

/* UCX wants the context of the devices that it writes to. */
static bool enter(const one_sided *o)
{
    return o->context >= 0 &&
           gpu_context_enter(device_sink_gpu(o->r->sink), o->context, NULL) == FANIN_OK;
}

/* Endpoints that failed, or whose gets are still out, are of no use any more. */
static bool drain(one_sided *o)
{
    bool drained = true;
    deadline at = ucx_end_drain_by();
    for (size_t i = 0; i < o->n; i++) {
        const one_sided_work *w = &o->works[i];
        const ucx_endpoint *e = w->spans ? o->end->peers[w->peer].endpoint : NULL;
        if (e && (w->failed || ucx_endpoint_outstanding(e) > 0 ||
                  ucx_endpoint_failed(e, NULL) != 0))
            drained = ucx_end_drop(o->r->client, w->peer, at) && drained;
    }
    return drained && o->outstanding == 0;
}

static bool finish(void *reading)
{
    one_sided *o = reading;
    device_sink *sink = o->r->sink;
    worker_pool_destroy(&o->pool);
    bool copied = !sink || device_sink_recall(sink, o);
    bool entered = enter(o);
    bool drained = drain(o);
    loop_remove(&o->r->client->loop, &o->source);
    for (size_t i = 0; i < o->n_locals; i++)
        ucx_local_destroy(&o->locals[i]);
    if (!drained)
        drained = ucx_end_close(o->r->client);
    if (entered)
        gpu_context_leave(device_sink_gpu(sink));
    if (!drained || !copied)
        return false; /* what is under way may still land: reader and destination stay */
    for (size_t i = 0; o->gets && i < o->n_gets; i++) {
        if (o->gets[i].copy.sink)
            sink_job_give(&o->gets[i].copy);
    }
    free(o->gets);
    free(o->locals);
    free(o);
    return true;
}

/* ------------------------------------------------------------------ getting */

static void on_done(void *cookie, uint64_t tag, int ucx_status)
{
    one_sided *o = cookie;
    get *g = &o->gets[tag];
    o->outstanding--;
    if (!o->pool || (ucx_status == 0 && !get_flush(o, g))) {
        /* The reading has ended and what comes stays where it is, or its device has failed. */
        g->busy = false;
    } else if (ucx_status != 0) {
        const char *text = "the read failed";
        const ucx_endpoint *e = o->end->peers[g->work->peer].endpoint;
        if (e)
            ucx_endpoint_failed(e, &text);
        g->busy = false;
        work_fail(o, g->work, text);
    } else if (g->direct) {
        get_finish(o, g);
    } else {
        get_distribute(o, g);
    }
}

/* The registration of @p length bytes at @p to, NULL: none. */
static const ucx_local *local_for(const one_sided *o, const uint8_t *to,
                                  uint64_t length, int *device_out)
{
    const memory_range *r = memory_range_find(o->r->ranges, o->n_locals, to);
    if (!r || length > (uint64_t)(r->base + r->length - to))
        return NULL;
    *device_out = r->device;
    return o->locals[r - o->r->ranges];
}

static get *free_get(one_sided *o, size_t first, size_t count)
{
    for (size_t i = first; i < first + count; i++) {
        if (!o->gets[i].busy)
            return &o->gets[i];
    }
    return NULL;
}

/* Where the span's pieces go; the index of the device that all are on, or -1. */
static int sort_out(const one_sided *o, const one_sided_work *w, const span *s,
                    bool *to_host, bool *to_devices)
{
    int only = -1;
    bool several = false;
    *to_host = !o->r->sink;
    *to_devices = false;
    for (uint64_t i = s->first; o->r->sink && i < s->first + s->count; i++) {
        int device =
            device_sink_device(o->r->sink, o->r->base + w->spans->pieces[i].to);
        several = several || (*to_devices && device >= 0 && device != only);
        *to_host = *to_host || device < 0;
        *to_devices = *to_devices || device >= 0;
        only = device >= 0 ? device : only;
    }
    if (!*to_devices || *to_host || several)
        return -1;
    for (size_t i = 0; i < device_sink_devices(o->r->sink); i++) {
        if (device_sink_device_at(o->r->sink, i) == only)
            return (int)i;
    }
    return -1;
}

/* A free slot that fits: on the device that all of the span goes to, else in host memory. */
static get *free_slot(one_sided *o, const one_sided_work *w, const span *s)
{
    bool to_host, to_devices;
    int index = sort_out(o, w, s, &to_host, &to_devices);
    size_t first = FIRST_DEVICE + (index < 0 ? 0 : (size_t)index * DEVICE_SLOTS);
    get *g = index >= 0 && o->gets[first].slot ? free_get(o, first, DEVICE_SLOTS)
                                               : free_get(o, 0, STAGING_SLOTS);
    if (g) {
        g->to_host = to_host;
        g->to_devices = to_devices;
    }
    return g;
}

/* Posts the next span of a rank; false: no room. */
static bool post(one_sided *o, one_sided_work *w)
{
    const span *s = &w->spans->spans[w->next_span];
    uint8_t *to = NULL;
    const ucx_local *local = NULL;
    int device = -1;
    if (s->direct) {
        to = o->r->base + w->spans->pieces[s->first].to;
        local = local_for(o, to, s->length, &device);
    }
    if (local && device >= 0 && !device_sink_ready(o->r->sink))
        return false; /* the destination is still in use */
    get *g = local ? free_get(o, FIRST_DIRECT, MAX_DIRECT) : free_slot(o, w, s);
    if (!g)
        return false;
    g->direct = local != NULL;
    if (g->direct) {
        g->device = device;
        g->to_host = device < 0;
        g->to_devices = device >= 0;
    } else {
        to = g->slot;
        local = g->local;
    }
    g->work = w;
    g->span = s;
    g->busy = true;
    o->outstanding++;
    w->next_span++;
    fanin_error why = FANIN_ERROR_INIT;
    uint32_t region = w->first_region + s->region;
    const region_entry *r = &w->regions->entries[region];
    if (ucx_get(o->end->peers[w->peer].endpoint, w->rkeys[region], r->base + s->offset,
                to, s->length, local, on_done, o, (uint64_t)(g - o->gets),
                &why) != FANIN_OK) {
        g->busy = false;
        o->outstanding--;
        work_fail(o, w, why.message);
    }
    return true;
}

/* Posts what there is room for, progresses, and takes what has come. */
static bool turn(one_sided *o)
{
    bool happened = get_collect(o), full = false;
    for (size_t i = 0; i < o->n && !full; i++) {
        one_sided_work *w = &o->works[(o->turn + i) % o->n];
        if (!w->spans || w->failed || w->next_span == w->spans->n_spans)
            continue;
        const ucx_endpoint *e = o->end->peers[w->peer].endpoint;
        if (!e || ucx_endpoint_failed(e, NULL) != 0) {
            work_fail(o, w, "the endpoint failed");
            return true;
        }
        full = !post(o, w);
        happened = happened || !full;
    }
    o->turn = o->n ? (o->turn + 1) % o->n : 0;
    return ucx_client_progress(o->end->client) || happened;
}

static bool step(void *reading)
{
    one_sided *o = reading;
    bool entered = enter(o);
    bool happened = turn(o);
    if (entered)
        gpu_context_leave(device_sink_gpu(o->r->sink));
    if (happened || o->scattering == 0)
        return happened;
    /* Nothing to fetch into: this thread copies as well, or waits for those that do. */
    if (!worker_pool_help(o->pool))
        worker_pool_wait(o->pool);
    return true;
}

static fanin_status check(void *reading, size_t source, bool *done, fanin_error *error)
{
    const one_sided_work *w = &((one_sided *)reading)->works[source];
    *done = w->done_spans == w->spans->n_spans;
    if (!w->failed)
        return FANIN_OK;
    error_copy(error, &w->error);
    return FANIN_ERR_TRANSPORT;
}

static bool busy(void *reading, deadline *wake)
{
    const one_sided *o = reading;
    (void)wake; /* the client's descriptor wakes the loop */
    return !ucx_client_arm(o->end->client);
}

static uint64_t bytes(const void *reading, size_t source, bool *waits)
{
    const one_sided_work *w = &((const one_sided *)reading)->works[source];
    *waits = w->done_spans < w->next_span;
    return w->bytes;
}

static uint64_t scatter_ns(const void *reading)
{
    return ((const one_sided *)reading)->scatter_ns;
}

static void account(const void *reading, size_t source, served *out)
{
    const one_sided_work *w = &((const one_sided *)reading)->works[source];
    out->bytes = w->bytes;
    out->reads = w->done_spans;
}

/* What its transport checks is not known. */
static fanin_checksums guard(const connection *c)
{
    return connection_is_unix(c) ? FANIN_CHECKSUMS_LOCAL : FANIN_CHECKSUMS_NONE;
}

const path_reader ucx_reader = {
    .name = "rdma",
    .number = FANIN_PATH_RDMA,
    .guard = guard,
    .told_at = offsetof(msg_end, bytes_rdma),
    .uses_sink = true,
    .probe = ucx_probe,
    .plan = path_make_spans,
    .span_rule = &span_rules,
    .forget = path_forget_spans,
    .start = start,
    .step = step,
    .check = check,
    .busy = busy,
    .bytes = bytes,
    .scatter_ns = scatter_ns,
    .account = account,
    .finish = finish,
};
