/* SPDX-License-Identifier: Apache-2.0 */
/* Reading by one-sided gets: spans are fetched into registered staging slots, or straight into
   registered destinations, and scattered from there. The server takes no part. */
#include "device/device_sink.h"
#include "device/devices.h"
#include "error_set.h"
#include "ucx/ucx_end.h"
#include "worker_pool.h"
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* One rank's reading in one attempt. */
typedef struct one_sided_work {
    size_t peer;
    uint32_t rank;
    const region_table *regions;
    ucx_rkey *const *rkeys;  /* one a region */
    const plan_spans *spans; /* NULL: another path's source */
    /* added to the spans' regions: which of the regions and rkeys hold the bytes */
    uint32_t first_region;
    uint64_t next_span, done_spans, bytes; /* bytes: fetched */
    bool failed; /* if device_sink_failed() too, no other attempt would mend it */
    fanin_error error;
} one_sided_work;

typedef struct one_sided one_sided;

/* Gets under way that land directly: bounds what a failing endpoint has to drain. */
#define MAX_DIRECT 64

typedef struct get {
    worker_job job; /* first: the pool hands it back */
    sink_job copy;  /* the part of a staged one that lands on devices */
    struct one_sided *reader;
    uint64_t scatter_ns;
    one_sided_work *work;
    const span *span;
    uint8_t *slot; /* of the staged ones */
    int device;    /* that the get writes to, -1: host memory */
    bool busy, direct;
    bool to_host, to_devices; /* where its pieces go */
    unsigned parts;           /* still being copied out of the slot */
} get;

/* Gets that can be under way: those with slots, then direct ones. */
#define GETS ((size_t)STAGING_SLOTS + MAX_DIRECT)
_Static_assert(STAGING_SLOTS <= POOL_AREAS, "each slot has an area");

struct one_sided {
    const path_reading *r;
    ucx_end *end;
    size_t n, turn;
    uint64_t bytes;     /* to be fetched */
    ucx_local **locals; /* of each range of the destination; NULL: none */
    size_t n_locals;
    int context; /* a device whose memory UCX writes to, -1: none */
    get gets[GETS];
    size_t outstanding; /* gets that have not called back */
    size_t scattering;  /* slots that have been handed to the pool */
    worker_pool *pool;
    uint64_t scatter_ns;
    loop_source source;
    one_sided_work works[]; /* one a source */
};

/* ------------------------------------------------------------------ failing */

static void work_fail(const one_sided *o, one_sided_work *w, const char *what)
{
    if (w->failed)
        return;
    const connection *c = o->r->client->peers[w->peer].control;
    error_place place = connection_place(c, "read");
    w->failed = true;
    w->error = (fanin_error)FANIN_ERROR_INIT;
    error_set(&w->error, FANIN_ERR_TRANSPORT, &place,
              "reading from rank %u at %s by rdma: %s", w->rank, c->text, what);
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

static void tell_span_landed(const one_sided *o, const get *g, const span_piece *p,
                             const strided *view)
{
    (void)g;
    if (view)
        landed_view(o->r->landed, o->r->cookie, view, p->to);
    else
        o->r->landed(o->r->cookie, p->to, p->length);
}

/* The pool's: in any thread. */
static void get_scatter(worker_job *job)
{
    get *g = (get *)job;
    uint64_t start = clock_ns();
    walk_host(g->reader, g, scatter);
    g->scatter_ns = clock_ns() - start;
}

static void get_landed(one_sided *o, get *g)
{
    if (o->r->landed)
        walk_host(o, g, tell_span_landed);
    g->busy = false;
    g->work->done_spans++;
    g->work->bytes += g->span->length;
}

static void get_finish_part(one_sided *o, get *g)
{
    if (--g->parts == 0)
        get_landed(o, g);
}

/* Takes what the pool is through with; true: there was something. */
static bool get_collect(one_sided *o)
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
static void on_slot_copied(sink_job *job, bool ok)
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
    device_sink_submit(&g->copy, on_slot_copied);
    return true;
}

/* The slot is filled: to the threads, to the devices, or to both. */
static void get_distribute(one_sided *o, get *g)
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

/* What an adapter wrote to a device is to be seen by what runs there from now on. False: the work
    has failed. */
static bool get_flush(one_sided *o, const get *g)
{
    fanin_error why = FANIN_ERROR_INIT;
    if (g->device < 0 || gpu_flush_remote_writes(device_sink_gpu(o->r->sink), g->device,
                                                 &why) == FANIN_OK)
        return true;
    device_sink_fail(o->r->sink, &why);
    work_fail_device(o, g->work);
    return false;
}

/* ------------------------------------------------------ what gets land in */

/* Made by the first one-sided pull, kept until the client's UCX end goes. */
static fanin_status one_sided_make_staging(ucx_end *end, fanin_error *error)
{
    fanin_memory host = {FANIN_MEMORY_HOST, -1};
    if (!end->staging) {
        void *memory = mmap(NULL, STAGING_BYTES, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        if (memory == MAP_FAILED)
            return error_set_memory(error);
        end->staging = memory;
    }
    if (end->staging_local)
        return FANIN_OK;
    return ucx_local_create(end->client, end->staging, STAGING_BYTES, host,
                            &end->staging_local, error);
}

/* Registers a range for gets that land in it. */
static fanin_status register_range(one_sided *o, const memory_range *r, ucx_local **out,
                                   fanin_error *error)
{
    fanin_memory memory = {FANIN_MEMORY_HOST, -1};
    if (r->device < 0)
        return ucx_local_create(o->end->client, r->base, r->length, memory, out, error);
    memory = (fanin_memory){FANIN_MEMORY_CUDA, r->device};
    gpu *g = device_sink_gpu(o->r->sink);
    fanin_status status = gpu_context_enter(g, r->device, error);
    if (status != FANIN_OK)
        return status;
    status = ucx_local_create(o->end->client, r->base, r->length, memory, out, error);
    gpu_context_leave(g);
    return status;
}

/* Registers what can be registered of the destination. */
static void one_sided_register(one_sided *o)
{
    size_t n = o->r->n_ranges;
    bool refused[2] = {false, !o->r->sink};
    o->locals = calloc(n + 1, sizeof *o->locals);
    for (; o->locals && o->n_locals < n; o->n_locals++) {
        const memory_range *r = &o->r->ranges[o->n_locals];
        bool *no = &refused[r->device >= 0];
        fanin_error why = FANIN_ERROR_INIT;
        if (*no)
            continue;
        if (register_range(o, r, &o->locals[o->n_locals], &why) == FANIN_OK) {
            if (r->device >= 0)
                o->context = r->device;
            continue;
        }
        *no = true;
        log_write(&o->r->client->log, FANIN_LOG_INFO, "destination",
                  "the destination%s is not registered, reads go through staging: %s",
                  r->device >= 0 ? " on a device" : "", why.message);
    }
}

/* Room for entries of each staged get; the host's slots must be readable by devices. */
static fanin_status make_copies(one_sided *o, fanin_error *error)
{
    fanin_client *client = o->r->client;
    if (!o->r->sink)
        return FANIN_OK;
    if (!device_sink_attach(o->r->sink, &client->loop, &client->devices->memory)) {
        (void)device_sink_failed(o->r->sink, error);
        return FANIN_ERR_TRANSPORT;
    }
    fanin_status status = device_memory_pin(client->devices->memory, o->end->staging,
                                            STAGING_BYTES, error);
    for (unsigned i = 0; i < STAGING_SLOTS && status == FANIN_OK; i++)
        sink_job_init(&o->gets[i].copy, o->r->sink, i, o);
    return status;
}

/* o->gets with their slots. What fails may be left half made. */
static fanin_status one_sided_make_gets(one_sided *o, fanin_error *error)
{
    for (size_t i = 0; i < GETS; i++) {
        o->gets[i].reader = o;
        o->gets[i].device = -1;
        o->gets[i].job.run = get_scatter;
    }
    for (size_t i = 0; i < STAGING_SLOTS; i++)
        o->gets[i].slot = o->end->staging + i * SPAN_MAX;
    return make_copies(o, error);
}

/* ------------------------------------------------------------- life cycle */

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
static bool enter_sink_context(const one_sided *o)
{
    return o->context >= 0 &&
           gpu_context_enter(device_sink_gpu(o->r->sink), o->context, NULL) == FANIN_OK;
}

/* Endpoints that failed, or whose gets are still out, are of no use any more. */
static bool drain_endpoints(one_sided *o)
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
    bool entered = enter_sink_context(o);
    bool drained = drain_endpoints(o);
    loop_remove(&o->r->client->loop, &o->source);
    for (size_t i = 0; i < o->n_locals; i++)
        ucx_local_destroy(&o->locals[i]);
    if (!drained)
        drained = ucx_end_close(o->r->client);
    if (entered)
        gpu_context_leave(device_sink_gpu(sink));
    if (!drained || !copied)
        return false; /* what is under way may still land: reader and destination stay */
    for (size_t i = 0; i < STAGING_SLOTS; i++) {
        if (o->gets[i].copy.sink)
            sink_job_give(&o->gets[i].copy);
    }
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
        get_landed(o, g);
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

/* A free slot, which knows where the span's pieces go. */
static get *free_slot(one_sided *o, const one_sided_work *w, const span *s)
{
    get *g = free_get(o, 0, STAGING_SLOTS);
    if (!g)
        return NULL;
    g->to_host = !o->r->sink;
    g->to_devices = false;
    for (uint64_t i = s->first; o->r->sink && i < s->first + s->count; i++) {
        const uint8_t *to = o->r->base + w->spans->pieces[i].to;
        bool on_device = device_sink_device(o->r->sink, to) >= 0;
        g->to_host = g->to_host || !on_device;
        g->to_devices = g->to_devices || on_device;
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
    get *g = local ? free_get(o, STAGING_SLOTS, MAX_DIRECT) : free_slot(o, w, s);
    if (!g)
        return false;
    g->direct = local != NULL;
    if (g->direct) {
        g->device = device;
        g->to_host = device < 0;
        g->to_devices = device >= 0;
    } else {
        to = g->slot;
        local = o->end->staging_local;
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
static bool take_turn_of(one_sided *o)
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
    bool entered = enter_sink_context(o);
    bool happened = take_turn_of(o);
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
    return c->is_unix ? FANIN_CHECKSUMS_LOCAL : FANIN_CHECKSUMS_NONE;
}

static void ucx_disconnect(fanin_client *client)
{
    (void)ucx_end_close(client);
}

const path_reader ucx_reader = {
    .name = "rdma",
    .number = FANIN_PATH_RDMA,
    .create = ucx_end_create,
    .disconnect = ucx_disconnect,
    .destroy = ucx_end_free,
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
