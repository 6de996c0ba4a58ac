/* SPDX-License-Identifier: Apache-2.0 */
#include "cma/cma.h"

#include "error_set.h"
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* ----------------------------------------------------- the rank's process */

/* Steps over @p bytes of @p n iovecs; how many are through. */
static unsigned step_over(struct iovec *v, unsigned n, size_t bytes)
{
    unsigned through = 0;
    while (bytes > 0 && through < n) {
        size_t step = bytes < v->iov_len ? bytes : v->iov_len;
        v->iov_base = (uint8_t *)v->iov_base + step;
        v->iov_len -= step;
        bytes -= step;
        if (v->iov_len > 0)
            break;
        through++;
        v++;
    }
    return through;
}

int cma_read(pid_t pid, struct iovec *to, unsigned n_to, struct iovec *from,
             unsigned n_from, unsigned *at)
{
    unsigned at_to = 0;
    *at = 0;
    while (*at < n_from) {
        ssize_t n = process_vm_readv(pid, to + at_to, n_to - at_to, from + *at,
                                     n_from - *at, 0);
        if (n < 0)
            return errno;
        if (n == 0)
            return EFAULT;
        at_to += step_over(to + at_to, n_to - at_to, (size_t)n);
        *at += step_over(from + *at, n_from - *at, (size_t)n);
    }
    return 0;
}

int cma_prove(const cma_process *p)
{
    uint8_t there[sizeof p->incarnation] = {0};
    unsigned at;
    struct iovec to = {.iov_base = there, .iov_len = sizeof there};
    struct iovec from = {.iov_base = (void *)(uintptr_t)p->witness,
                         .iov_len = sizeof there};
    int error = cma_read(p->pid, &to, 1, &from, 1, &at);
    if (error == 0 && memcmp(there, p->incarnation, sizeof there) == 0)
        return 0;
    return error == 0 || error == EFAULT ? ESTALE : error;
}

const char *cma_why(int error)
{
    switch (error) {
    case ESTALE:
        return "the process that the socket names is not the rank (any more)";
    case ESRCH:
        return "its process has ended";
    case EPERM:
        return "the kernel does not let this process read the rank's memory";
    case EFAULT:
        return "memory that it publishes is not there (any more), or the destination's "
               "is not";
    case ENOSYS:
        return "this kernel has no process_vm_readv";
    default:
        return strerror(error);
    }
}

static const char *cma_remedy(int error)
{
    switch (error) {
    case EPERM:
        return "run both as the same user, in containers with SYS_PTRACE, with "
               "kernel.yama.ptrace_scope at most 1 (nixl-fetch doctor); or --path "
               "stream";
    case EFAULT:
        return "a shard's memory must stay until the shard is removed or replaced";
    case ENOSYS:
        return "use --path auto or stream";
    default:
        return "look whether the trainer still runs";
    }
}

/* ---------------------------------------------------------------- copying */

#define SLOT_ALIGNMENT 64

/* ------------------------------------------------------------------ failing */

/* The first reason counts. In any thread. */
static void fail_source(cma_source *s, cma_reading *of, fanin_status status,
                        const fanin_error *why)
{
    pthread_mutex_lock(&of->lock);
    if (!atomic_load(&s->failed)) {
        s->status = status;
        s->error = (fanin_error)FANIN_ERROR_INIT;
        error_copy(&s->error, why);
        atomic_store(&s->failed, true);
    }
    pthread_mutex_unlock(&of->lock);
    atomic_store(&of->failed, true);
}

/* The tensor that a piece belongs to. */
static const char *key_at(const cma_reading *of, size_t source, uint64_t to)
{
    const path_plan *p = of->r->plan;
    const plan_rank *pieces = &p->plan->ranks[source];
    for (uint64_t i = 0; i < pieces->n_pieces; i++) {
        uint64_t low, high;
        plan_piece_reach(p->plan, &pieces->pieces[i], &low, &high);
        if (to < low || to >= high)
            continue;
        uint32_t key;
        block b;
        box_place place;
        box_table_get(p->sources[source].boxes, pieces->pieces[i].box, &key, &b,
                      &place);
        return of->r->publication->keys->entries[key].name;
    }
    return NULL;
}

void cma_fail_read(cma_source *s, cma_reading *of, int error, const span_piece *piece)
{
    fanin_error why = FANIN_ERROR_INIT;
    const connection *c = of->r->client->peers[s->peer].control;
    const char *key = piece ? key_at(of, s->index, piece->to) : NULL;
    error_place place = connection_place(c, "read");
    place.key = key;
    place.sys_errno = error;
    place.remedy = cma_remedy(error);
    error_set(&why, FANIN_ERR_TRANSPORT, &place,
              "reading %.256s%sfrom rank %u at %s by cma: %s", key ? key : "",
              key ? " " : "", of->r->plan->sources[s->index].rank, c->text,
              cma_why(error));
    fail_source(s, of, FANIN_ERR_TRANSPORT, &why);
}

static void fail_for_memory(cma_copier *c)
{
    fanin_error why = FANIN_ERROR_INIT;
    fanin_status status = error_set_memory(&why);
    fail_source(c->source, c->of, status, &why);
}

static void fail_source_by_device(cma_copier *c)
{
    fanin_error why = FANIN_ERROR_INIT;
    if (device_sink_failed(c->of->r->sink, &why))
        fail_source(c->source, c->of, FANIN_ERR_TRANSPORT, &why);
    else
        fail_for_memory(c);
}

/* ----------------------------------------------------------- what is added */

static const strided *piece_view(const cma_copier *c, const span_piece *p)
{
    return p->view ? &c->source->detail->spans->views[p->view - 1] : NULL;
}

static bool is_on_device(const cma_copier *c, const span_piece *p)
{
    const path_reading *r = c->of->r;
    return r->sink && device_sink_device(r->sink, r->base + p->to) >= 0;
}

/* Where in the slot a view of so many bytes is read to. */
static size_t slot_place(size_t used)
{
    return (used + SLOT_ALIGNMENT - 1) / SLOT_ALIGNMENT * SLOT_ALIGNMENT;
}

static uint8_t *place_in_slot(cma_copier *c, uint64_t length)
{
    size_t at = slot_place(c->used);
    if (!c->slot && !(c->slot = malloc(CMA_SPAN_MAX))) {
        fail_for_memory(c);
        return NULL;
    }
    if (length > CMA_SPAN_MAX - at)
        return NULL;
    c->used = at + length;
    return c->slot + at;
}

void cma_on_chunk(sink_waiter *waiter)
{
    cma_reading *of = (cma_reading *)((char *)waiter - offsetof(cma_reading, waiter));
    of->paused = false;
}

/* A chunk is submitted when it is full: the caller reads first what was added to it. */
static uint8_t *place_in_chunk(cma_copier *c, const span_piece *p)
{
    cma_reading *of = c->of;
    device_sink *sink = of->r->sink;
    if (!c->chunk && !(c->chunk = device_sink_take(sink, of))) {
        if (device_sink_failed(sink, NULL)) {
            fail_source_by_device(c);
        } else {
            of->paused = true;
            device_sink_wait(sink, &of->waiter);
        }
        return NULL;
    }
    uint8_t *at =
        sink_job_place(c->chunk, p->length, of->r->base + p->to, piece_view(c, p));
    if (at)
        c->chunk->bytes += p->length;
    else if (c->chunk->n_items == 0)
        fail_source_by_device(c);
    return at;
}

static void add_remote(cma_copier *c, uint32_t region, uint64_t address,
                       uint64_t length)
{
    struct iovec *last = c->n_from > 0 ? &c->from[c->n_from - 1] : NULL;
    uint64_t end = last ? (uint64_t)(uintptr_t)last->iov_base + last->iov_len : 0;
    if (last && c->region == region && address >= end && address - end <= CMA_GAP) {
        if (address > end)
            c->to[c->n_to++] =
                (struct iovec){.iov_base = c->gap, .iov_len = address - end};
        last->iov_len += address - end + length;
        return;
    }
    c->region = region;
    c->from[c->n_from++] =
        (struct iovec){.iov_base = (void *)(uintptr_t)address, .iov_len = length};
}

/* Where the destination is the caller's memory the base is NULL: to a compiler a sum with that is
   NULL or undefined, and add_piece_iovec() asks whether it has a place. */
static uint8_t *piece_place(const cma_copier *c, const span_piece *p)
{
    return (uint8_t *)((uintptr_t)c->of->r->base + p->to);
}

/* False: there is no room for it now, or the source has failed. */
static bool add_piece_iovec(cma_copier *c, const span *s, const span_piece *p)
{
    uint8_t *to;
    if (c->n_to + 2 > CMA_IOVECS || c->n_from == CMA_IOVECS)
        return false;
    if (is_on_device(c, p))
        to = place_in_chunk(c, p);
    else
        to = p->view ? place_in_slot(c, p->length) : piece_place(c, p);
    if (!to)
        return false;
    add_remote(c, s->region, c->source->regions[s->region].base + s->offset + p->offset,
               p->length);
    c->to[c->n_to++] = (struct iovec){.iov_base = to, .iov_len = p->length};
    return true;
}

static void fill_sink_chunk(cma_copier *c)
{
    const plan_spans *spans = c->source->detail->spans;
    c->n_to = c->n_from = 0;
    c->used = 0;
    c->first = c->piece;
    while (c->span < c->end_span) {
        const span *s = &spans->spans[c->span];
        if (c->piece == s->first + s->count) {
            c->span++;
            continue;
        }
        if (!add_piece_iovec(c, s, &spans->pieces[c->piece]))
            return;
        c->piece++;
    }
}

/* ------------------------------------------------------- what becomes of it */

/* A device has its part. */
static void on_chunk_copied(sink_job *job, bool ok)
{
    cma_reading *of = job->owner;
    cma_source *s = &of->sources[job->requests];
    fanin_error why = FANIN_ERROR_INIT;
    if (ok)
        atomic_fetch_add(&s->done, job->bytes);
    else if (device_sink_failed(of->r->sink, &why))
        fail_source(s, of, FANIN_ERR_TRANSPORT, &why);
    sink_job_give(job);
}

/* What was read into the slot goes to its place, and who asked is told. */
static uint64_t place_pieces(cma_copier *c)
{
    const path_reading *r = c->of->r;
    uint64_t bytes = 0;
    size_t used = 0;
    for (uint64_t i = c->first; i < c->piece; i++) {
        const span_piece *p = &c->source->detail->spans->pieces[i];
        const strided *view = piece_view(c, p);
        if (is_on_device(c, p))
            continue;
        bytes += p->length;
        if (view) {
            size_t at = slot_place(used);
            uint64_t start = clock_ns();
            strided_copy(view, r->base + p->to, c->slot + at);
            c->scatter_ns += clock_ns() - start;
            used = at + p->length;
        }
        if (r->landed && view)
            landed_view(r->landed, r->cookie, view, p->to);
        else if (r->landed)
            r->landed(r->cookie, p->to, p->length);
    }
    return bytes;
}

/* The piece whose bytes an iovec of the rank's memory was to bring. */
static const span_piece *piece_at(const cma_copier *c, unsigned at)
{
    const plan_spans *spans = c->source->detail->spans;
    uint64_t address = (uint64_t)(uintptr_t)c->from[at].iov_base, piece = c->first;
    for (uint64_t i = 0; i < spans->n_spans; i++) {
        const span *s = &spans->spans[i];
        uint64_t base = c->source->regions[s->region].base + s->offset;
        for (; piece >= s->first && piece < s->first + s->count && piece < c->piece;
             piece++) {
            const span_piece *p = &spans->pieces[piece];
            if (address < base + p->offset + p->length && address >= base + p->offset)
                return p;
        }
    }
    return &spans->pieces[c->first];
}

static bool read_filled(cma_copier *c)
{
    unsigned at;
    int error =
        cma_read(c->source->process.pid, c->to, c->n_to, c->from, c->n_from, &at);
    atomic_fetch_add(&c->source->calls, 1);
    if (error != 0) {
        cma_fail_read(c->source, c->of, error, piece_at(c, at));
        return false;
    }
    uint64_t bytes = place_pieces(c);
    atomic_fetch_add(&c->source->done, bytes);
    return true;
}

static void finish_filled(cma_copier *c)
{
    sink_job *chunk = c->chunk;
    c->chunk = NULL;
    if (chunk) {
        chunk->requests = c->source->index;
        device_sink_submit(chunk, on_chunk_copied);
    }
    if (c->span == c->end_span)
        c->source = NULL;
}

/* ------------------------------------------------------------------ batches */

/* The next one of any source, from the one that the last came from on. */
static bool take_batch(cma_copier *c)
{
    cma_reading *of = c->of;
    for (size_t i = 0; i < of->n; i++, c->at = (c->at + 1) % of->n) {
        cma_source *s = &of->sources[c->at];
        const cma_detail *d = s->detail;
        if (!d || atomic_load_explicit(&s->next, memory_order_relaxed) >= d->n_batches)
            continue;
        uint64_t batch = atomic_fetch_add(&s->next, 1);
        if (batch >= d->n_batches)
            continue;
        c->source = s;
        c->span = d->first[batch];
        c->end_span = d->first[batch + 1];
        c->piece = d->spans->spans[c->span].first;
        return true;
    }
    return false;
}

/* False: nothing is left, or no chunk is free (of->paused). */
static bool fill_next(cma_copier *c)
{
    cma_reading *of = c->of;
    if (atomic_load(&of->failed) || of->paused || (!c->source && !take_batch(c)))
        return false;
    fill_sink_chunk(c);
    return c->n_to > 0 && !atomic_load(&c->source->failed);
}

bool cma_copy(cma_copier *c)
{
    if (!fill_next(c) || !read_filled(c))
        return false;
    finish_filled(c);
    return true;
}

/* ------------------------------------------------------------- into devices */

void cma_feed_job(worker_job *job)
{
    cma_copier *c = (cma_copier *)job;
    c->good = read_filled(c);
}

static bool collect_copied(cma_reading *of)
{
    bool any = false;
    worker_job *job;
    while ((job = worker_pool_collect(of->pool))) {
        cma_copier *c = (cma_copier *)job;
        c->busy = false;
        of->busy--;
        if (c->good)
            finish_filled(c);
        any = true;
    }
    return any;
}

bool cma_feed(cma_reading *of)
{
    bool any = collect_copied(of);
    for (unsigned i = 0; i < of->n_copiers; i++) {
        cma_copier *c = of->copiers[i];
        if (c->busy || !fill_next(c))
            continue;
        c->busy = any = true;
        of->busy++;
        worker_pool_submit(of->pool, &c->job);
    }
    if (any || of->busy == 0)
        return any;
    /* Nothing to fill: this thread reads as well, or waits for those that do. */
    if (!worker_pool_help(of->pool))
        worker_pool_wait(of->pool);
    return true;
}

void cma_copier_stop(cma_copier *c)
{
    if (c->chunk)
        sink_job_give(c->chunk);
    c->chunk = NULL;
    c->source = NULL;
    c->of = NULL;
}
