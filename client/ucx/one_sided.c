/* SPDX-License-Identifier: Apache-2.0 */
#include "ucx/one_sided_internal.h"

#include "error_set.h"
#include <stdlib.h>

/* Below so many bytes the copying is not worth threads. */
#define THREADS_FROM ((uint64_t)16 << 20)
#define MAX_THREADS 3

static uint64_t bytes_of(const one_sided_work *works, size_t n)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < n; i++) {
        for (uint64_t j = 0; j < works[i].spans->n_spans; j++)
            bytes += works[i].spans->spans[j].length;
    }
    return bytes;
}

static void on_wake(loop_source *source, uint32_t events)
{
    (void)source;
    (void)events; /* the next one_sided_step() progresses */
}

/* -------------------------------------------------------------- life cycle */

fanin_status one_sided_create(fanin_client *client, one_sided_work *works, size_t n,
                              uint8_t *base, const memory_range *ranges,
                              size_t n_ranges, landed_fn landed, void *landed_cookie,
                              device_sink *devices, one_sided **out, fanin_error *error)
{
    one_sided *o = calloc(1, sizeof(*o));
    if (!o)
        return error_set_memory(error);
    o->client = client;
    o->works = works;
    o->n = n;
    o->base = base;
    o->landed = landed;
    o->landed_cookie = landed_cookie;
    o->devices = devices;
    o->context = -1;
    o->source = (loop_source){.fd = -1, .events = EPOLLIN, .ready = on_wake};
    fanin_status status = one_sided_make_staging(client, error);
    if (status == FANIN_OK)
        status = one_sided_make_gets(o, error);
    if (status == FANIN_OK) {
        o->pool = scatter_pool_create(
            bytes_of(works, n) < THREADS_FROM ? 0 : MAX_THREADS, -1);
        if (!o->pool)
            status = error_set_memory(error);
    }
    if (status == FANIN_OK) {
        one_sided_register(o, ranges, n_ranges);
        o->source.fd = ucx_client_fd(client->one_sided);
        status = loop_add(&client->loop, &o->source, error);
    }
    if (status != FANIN_OK) {
        one_sided_destroy(&o);
        return status;
    }
    *out = o;
    return FANIN_OK;
}

/* UCX wants the context of the devices that it writes to. */
static bool enter(const one_sided *o)
{
    return o->context >= 0 &&
           gpu_context_enter(device_sink_gpu(o->devices), o->context, NULL) == FANIN_OK;
}

static bool drain(one_sided *o)
{
    bool drained = true;
    for (size_t i = 0; i < o->n; i++) {
        peer *p = o->works[i].peer;
        if (p->endpoint && (ucx_endpoint_outstanding(p->endpoint) > 0 ||
                            ucx_endpoint_failed(p->endpoint, NULL) != 0))
            drained =
                peer_drop_paths(o->client, (size_t)(p - o->client->peers)) && drained;
    }
    return drained && o->outstanding == 0;
}

bool one_sided_destroy(one_sided **o)
{
    one_sided *r = *o;
    *o = NULL;
    if (!r)
        return true;
    scatter_pool_destroy(&r->pool);
    bool copied = !r->devices || device_sink_recall(r->devices, r);
    bool entered = enter(r);
    bool drained = drain(r);
    loop_remove(&r->client->loop, &r->source);
    for (size_t i = 0; i < r->n_locals; i++)
        ucx_local_destroy(&r->locals[i]);
    if (!drained)
        drained = client_close_one_sided(r->client);
    if (entered)
        gpu_context_leave(device_sink_gpu(r->devices));
    if (!drained || !copied)
        return false; /* what is under way may still land: reader and destination stay */
    for (size_t i = 0; r->gets && i < r->n_gets; i++) {
        if (r->gets[i].copy.sink)
            sink_job_give(&r->gets[i].copy);
    }
    free(r->gets);
    free(r->locals);
    free(r);
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
        if (g->work->peer->endpoint)
            ucx_endpoint_failed(g->work->peer->endpoint, &text);
        g->busy = false;
        work_fail(g->work, text);
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
    const memory_range *r = memory_range_find(o->ranges, o->n_locals, to);
    if (!r || length > (uint64_t)(r->base + r->length - to))
        return NULL;
    *device_out = r->device;
    return o->locals[r - o->ranges];
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
    *to_host = !o->devices;
    *to_devices = false;
    for (uint64_t i = s->first; o->devices && i < s->first + s->count; i++) {
        int device = device_sink_device(o->devices, o->base + w->spans->pieces[i].to);
        several = several || (*to_devices && device >= 0 && device != only);
        *to_host = *to_host || device < 0;
        *to_devices = *to_devices || device >= 0;
        only = device >= 0 ? device : only;
    }
    if (!*to_devices || *to_host || several)
        return -1;
    for (size_t i = 0; i < device_sink_devices(o->devices); i++) {
        if (device_sink_device_at(o->devices, i) == only)
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
        to = o->base + w->spans->pieces[s->first].to;
        local = local_for(o, to, s->length, &device);
    }
    if (local && device >= 0 && !device_sink_ready(o->devices))
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
    const region_entry *r = &w->shards->regions->entries[region];
    if (ucx_get(w->peer->endpoint, w->shards->rkeys[region], r->base + s->offset, to,
                s->length, local, on_done, o, (uint64_t)(g - o->gets),
                &why) != FANIN_OK) {
        g->busy = false;
        o->outstanding--;
        work_fail(w, why.message);
    }
    return true;
}

/* Posts what there is room for, progresses, and takes what has come. */
static bool turn(one_sided *o)
{
    bool happened = get_collect(o), full = false;
    for (size_t i = 0; i < o->n && !full; i++) {
        one_sided_work *w = &o->works[(o->turn + i) % o->n];
        if (w->failed || w->next_span == w->spans->n_spans)
            continue;
        if (!w->peer->endpoint || ucx_endpoint_failed(w->peer->endpoint, NULL) != 0) {
            work_fail(w, "the endpoint failed");
            return true;
        }
        full = !post(o, w);
        happened = happened || !full;
    }
    o->turn = o->n ? (o->turn + 1) % o->n : 0;
    return ucx_client_progress(o->client->one_sided) || happened;
}

bool one_sided_step(one_sided *o)
{
    bool entered = enter(o);
    bool happened = turn(o);
    if (entered)
        gpu_context_leave(device_sink_gpu(o->devices));
    if (happened || o->scattering == 0)
        return happened;
    /* Nothing to fetch into: this thread copies as well, or waits for those that do. */
    if (!scatter_pool_help(o->pool))
        scatter_pool_wait(o->pool);
    return true;
}

bool one_sided_arm(one_sided *o)
{
    return ucx_client_arm(o->client->one_sided);
}

uint64_t one_sided_scatter_ns(const one_sided *o)
{
    return o->scatter_ns;
}
