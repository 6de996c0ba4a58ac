/* SPDX-License-Identifier: Apache-2.0 */
#include "one_sided.h"

#include "error_set.h"
#include "scatter_pool.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define DRAIN_MS 5000
/* Gets under way that land directly: bounds what a failing endpoint has to drain. */
#define MAX_DIRECT 64

/* Below so many bytes the copying is not worth threads. */
#define THREADS_FROM ((uint64_t)16 << 20)
#define MAX_THREADS 3

typedef struct get {
    scatter_job job; /* first: the pool hands it back */
    struct one_sided *reader;
    uint64_t scatter_ns;
    one_sided_work *work;
    const span *span;
    uint8_t *slot; /* of the staged ones */
    bool busy, direct;
} get;

struct one_sided {
    fanin_client *client;
    one_sided_work *works;
    size_t n, turn;
    uint8_t *base;
    landed_fn landed;
    void *landed_cookie;
    const memory_range *ranges;
    ucx_local **locals;
    size_t n_locals;
    get gets[STAGING_SLOTS + MAX_DIRECT]; /* the first STAGING_SLOTS are staged */
    size_t outstanding;                   /* gets that have not called back */
    size_t scattering;                    /* slots that have been handed to the pool */
    scatter_pool *pool;
    uint64_t scatter_ns;
    loop_source source;
};

/* --------------------------------------------------------------- scattering */

/* In any thread: what the pool was made for. */
static void scatter(const struct one_sided *o, const get *g)
{
    const plan_spans *spans = g->work->spans;
    const span *s = g->span;
    for (uint64_t i = s->first; i < s->first + s->count; i++) {
        const span_piece *p = &spans->pieces[i];
        if (p->view)
            strided_copy(&spans->views[p->view - 1], o->base + p->to,
                         g->slot + p->offset);
        else
            memcpy(o->base + p->to, g->slot + p->offset, p->length);
    }
}

static void run_scatter(scatter_job *job)
{
    get *g = (get *)job;
    uint64_t start = clock_ns();
    scatter(g->reader, g);
    g->scatter_ns = clock_ns() - start;
}

static void tell_landed(const one_sided *o, const get *g)
{
    const plan_spans *spans = g->work->spans;
    const span *s = g->span;
    for (uint64_t i = s->first; i < s->first + s->count; i++) {
        const span_piece *p = &spans->pieces[i];
        if (p->view)
            landed_view(o->landed, o->landed_cookie, &spans->views[p->view - 1], p->to);
        else
            o->landed(o->landed_cookie, p->to, p->length);
    }
}

/* The span's bytes are in place. */
static void finish(one_sided *o, get *g)
{
    if (o->landed)
        tell_landed(o, g);
    g->busy = false;
    g->work->done_spans++;
    g->work->bytes += g->span->length;
}

static bool collect(one_sided *o)
{
    bool any = false;
    scatter_job *job;
    while ((job = scatter_pool_collect(o->pool))) {
        get *g = (get *)job;
        o->scattering--;
        o->scatter_ns += g->scatter_ns;
        finish(o, g);
        any = true;
    }
    return any;
}

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

/* Made by the first one-sided pull, kept until the client's UCX end goes. */
static fanin_status make_staging(fanin_client *client, fanin_error *error)
{
    fanin_memory host = {FANIN_MEMORY_HOST, -1};
    if (!client->staging) {
        void *memory = mmap(NULL, STAGING_BYTES, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        if (memory == MAP_FAILED)
            return error_set_memory(error);
        client->staging = memory;
    }
    if (client->staging_local)
        return FANIN_OK;
    return ucx_local_create(client->one_sided, client->staging, STAGING_BYTES, host,
                            &client->staging_local, error);
}

static void register_ranges(one_sided *o, const memory_range *ranges, size_t n)
{
    fanin_memory host = {FANIN_MEMORY_HOST, -1};
    o->ranges = ranges;
    o->locals = calloc(n + 1, sizeof(*o->locals));
    fanin_error why = FANIN_ERROR_INIT;
    while (o->locals && o->n_locals < n) {
        if (ucx_local_create(o->client->one_sided, ranges[o->n_locals].base,
                             ranges[o->n_locals].length, host, &o->locals[o->n_locals],
                             &why) != FANIN_OK) {
            log_write(&o->client->log, FANIN_LOG_INFO, "destination",
                      "the destination is not registered, reads go through staging: %s",
                      why.message);
            break;
        }
        o->n_locals++;
    }
}

fanin_status one_sided_create(fanin_client *client, one_sided_work *works, size_t n,
                              uint8_t *base, const memory_range *ranges,
                              size_t n_ranges, landed_fn landed, void *landed_cookie,
                              one_sided **out, fanin_error *error)
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
    o->source = (loop_source){.fd = -1, .events = EPOLLIN, .ready = on_wake};
    fanin_status status = make_staging(client, error);
    if (status == FANIN_OK) {
        for (size_t i = 0; i < STAGING_SLOTS + MAX_DIRECT; i++)
            o->gets[i].reader = o;
        for (size_t i = 0; i < STAGING_SLOTS; i++) {
            o->gets[i].slot = client->staging + i * SPAN_MAX;
            o->gets[i].job.run = run_scatter;
        }
        o->pool =
            scatter_pool_create(bytes_of(works, n) < THREADS_FROM ? 0 : MAX_THREADS);
        if (!o->pool)
            status = error_set_memory(error);
    }
    if (status == FANIN_OK) {
        register_ranges(o, ranges, n_ranges);
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
    bool drained = drain(r);
    loop_remove(&r->client->loop, &r->source);
    for (size_t i = 0; i < r->n_locals; i++)
        ucx_local_destroy(&r->locals[i]);
    if (!drained && !client_close_one_sided(r->client))
        return false; /* reads may still land: reader and destination stay */
    free(r->locals);
    free(r);
    return true;
}

/* ------------------------------------------------------------------ getting */

static void fail(one_sided_work *w, const char *what)
{
    if (w->failed)
        return;
    error_place place = connection_place(w->peer->control, "read");
    w->failed = true;
    w->error = (fanin_error)FANIN_ERROR_INIT;
    error_set(&w->error, FANIN_ERR_TRANSPORT, &place,
              "reading from rank %u at %s by %s: %s", w->rank,
              connection_text(w->peer->control), fanin_path_name(w->peer->path), what);
}

static void on_done(void *cookie, uint64_t tag, int ucx_status)
{
    one_sided *o = cookie;
    get *g = &o->gets[tag];
    o->outstanding--;
    if (!o->pool) {
        g->busy = false; /* the reading has ended: what comes stays where it is */
    } else if (ucx_status != 0) {
        const char *text = "the read failed";
        if (g->work->peer->endpoint)
            ucx_endpoint_failed(g->work->peer->endpoint, &text);
        g->busy = false;
        fail(g->work, text);
    } else if (g->direct) {
        finish(o, g);
    } else {
        o->scattering++;
        scatter_pool_submit(o->pool, &g->job);
    }
}

static const ucx_local *local_for(const one_sided *o, const uint8_t *to,
                                  uint64_t length)
{
    size_t low = 0, high = o->n_locals;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const memory_range *r = &o->ranges[middle];
        if (to < r->base)
            high = middle;
        else if (to >= r->base + r->length)
            low = middle + 1;
        else
            return length <= (uint64_t)(r->base + r->length - to) ? o->locals[middle]
                                                                  : NULL;
    }
    return NULL;
}

static get *free_get(one_sided *o, bool direct)
{
    size_t first = direct ? STAGING_SLOTS : 0;
    size_t end = direct ? STAGING_SLOTS + MAX_DIRECT : STAGING_SLOTS;
    for (size_t i = first; i < end; i++) {
        if (!o->gets[i].busy)
            return &o->gets[i];
    }
    return NULL;
}

/* Posts the next span of a rank; false: no room. */
static bool post(one_sided *o, one_sided_work *w)
{
    const span *s = &w->spans->spans[w->next_span];
    uint8_t *to = NULL;
    const ucx_local *local = NULL;
    if (s->direct) {
        to = o->base + w->spans->pieces[s->first].to;
        local = local_for(o, to, s->length);
    }
    get *g = free_get(o, local != NULL);
    if (!g)
        return false;
    if (!local) {
        to = g->slot;
        local = o->client->staging_local;
    }
    g->work = w;
    g->span = s;
    g->busy = true;
    g->direct = local != o->client->staging_local;
    o->outstanding++;
    w->next_span++;
    fanin_error why = FANIN_ERROR_INIT;
    const region_entry *r = &w->shards->regions->entries[s->region];
    if (ucx_get(w->peer->endpoint, w->shards->rkeys[s->region], r->base + s->offset, to,
                s->length, local, on_done, o, (uint64_t)(g - o->gets),
                &why) != FANIN_OK) {
        g->busy = false;
        o->outstanding--;
        fail(w, why.message);
    }
    return true;
}

bool one_sided_step(one_sided *o)
{
    bool happened = collect(o), full = false;
    for (size_t i = 0; i < o->n && !full; i++) {
        one_sided_work *w = &o->works[(o->turn + i) % o->n];
        if (w->failed || w->next_span == w->spans->n_spans)
            continue;
        if (!w->peer->endpoint || ucx_endpoint_failed(w->peer->endpoint, NULL) != 0) {
            fail(w, "the endpoint failed");
            return true;
        }
        full = !post(o, w);
        happened = happened || !full;
    }
    o->turn = o->n ? (o->turn + 1) % o->n : 0;
    happened = ucx_client_progress(o->client->one_sided) || happened;
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
