/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/ipc.h"

#include "device/devices.h"
#include "error_set.h"
#include "ipc/device_plan.h"
#include <stdlib.h>

/* ----------------------------------------------------- copies of a source */

typedef struct builder {
    source_copies *copies;
    const plan_spans *spans;
    const copies_target *target;
    work_stop *stop;
    uint32_t *known; /* 1 + the number of each region; 0: none yet */
    uint64_t region_capacity;
    size_t device_capacity;
    const memory_range *range; /* of the piece before: neighbours mostly share it */
} builder;

static fanin_status copies_broken_off(const builder *b, fanin_error *error)
{
    return work_broken_off(b->stop, "plan", "copies were listed", error);
}

/* The span's, of which the span is read. */
static bool base_of(builder *b, const span *s, uint32_t *out)
{
    source_copies *c = b->copies;
    uint32_t *known = &b->known[s->region];
    uint64_t end = s->offset + s->length;
    if (*known == 0) {
        if (!array_reserve(&c->regions, &b->region_capacity, (size_t)c->n_regions + 1,
                           sizeof *c->regions))
            return false;
        c->regions[c->n_regions++] = (read_region){.number = s->region};
        *known = c->n_regions;
    }
    read_region *r = &c->regions[*known - 1];
    r->reach = end > r->reach ? end : r->reach;
    *out = *known - 1;
    return true;
}

/* NULL: out of memory. A list has room for all that is there, so that it does not grow: what is not
   used is not touched. */
static device_copies *copies_for(builder *b, int device)
{
    source_copies *c = b->copies;
    for (size_t i = 0; i < c->n_devices; i++) {
        if (c->devices[i].device == device)
            return &c->devices[i];
    }
    if (!array_reserve(&c->devices, &b->device_capacity, c->n_devices + 1,
                       sizeof *c->devices))
        return NULL;
    device_copies *d = &c->devices[c->n_devices];
    *d = (device_copies){.device = device, .list.stop = b->stop};
    if (!array_reserve(&d->list.entries, &d->list.capacity, b->spans->n_pieces,
                       sizeof *d->list.entries))
        return NULL;
    c->n_devices++;
    return d;
}

/* The range that holds @p to; NULL: none, which the destination's ranges rule out. */
static const memory_range *target_range_at(builder *b, uint64_t to)
{
    const copies_target *t = b->target;
    const uint8_t *at = t->base + to;
    const memory_range *r = b->range;
    if (!r || at < r->base || at >= r->base + r->length)
        r = memory_range_find(t->ranges, t->n_ranges, at);
    b->range = r;
    return r;
}

static bool add_host(builder *b, const host_piece *piece)
{
    host_pieces *h = &b->copies->host;
    if (work_stopped(b->stop) ||
        !array_reserve(&h->pieces, &h->capacity, h->n + 1, sizeof *h->pieces))
        return false;
    h->pieces[h->n++] = *piece;
    return true;
}

static fanin_status add_copy(builder *b, uint32_t base, const span *s,
                             const span_piece *p, fanin_error *error)
{
    uint64_t from = s->offset + p->offset;
    const strided *view = p->view ? &b->spans->views[p->view - 1] : NULL;
    const memory_range *range = target_range_at(b, p->to);
    if (!range)
        return error_set(error, FANIN_ERR_INTERNAL, NULL,
                         "a piece lies outside of the destination");
    if (range->device < 0) {
        host_piece piece = {
            .from = from, .to = p->to, .length = p->length, .view = view, .base = base};
        return add_host(b, &piece) ? FANIN_OK : copies_broken_off(b, error);
    }
    device_copies *d = copies_for(b, range->device);
    if (!d)
        return error_set_memory(error);
    uint64_t to = (uint64_t)(uintptr_t)(b->target->base + p->to);
    if (view)
        copy_list_add_view(&d->list, base, from, to, view);
    else
        copy_list_add(&d->list, base, from, to, p->length);
    d->bytes += view ? strided_bytes(view) : p->length;
    return d->list.failed ? copies_broken_off(b, error) : FANIN_OK;
}

static fanin_status add_span_pieces(builder *b, fanin_error *error)
{
    for (uint64_t i = 0; i < b->spans->n_spans; i++) {
        const span *s = &b->spans->spans[i];
        uint32_t base = 0;
        fanin_status status = base_of(b, s, &base) ? FANIN_OK : error_set_memory(error);
        for (uint64_t j = s->first; j < s->first + s->count && status == FANIN_OK; j++)
            status = add_copy(b, base, s, &b->spans->pieces[j], error);
        if (status != FANIN_OK)
            return status;
    }
    return FANIN_OK;
}

/* *c NULL is fine. */
static void source_copies_free(source_copies **c)
{
    if (!*c)
        return;
    for (size_t i = 0; i < (*c)->n_devices; i++)
        copy_list_free(&(*c)->devices[i].list);
    free((*c)->devices);
    free((*c)->regions);
    free((*c)->host.pieces);
    free((*c)->views);
    free(*c);
    *c = NULL;
}

fanin_status source_copies_build(plan_spans *spans, uint32_t n_regions,
                                 const copies_target *target, work_stop *stop,
                                 source_copies **out, fanin_error *error)
{
    builder b = {.copies = calloc(1, sizeof *b.copies),
                 .spans = spans,
                 .target = target,
                 .stop = stop,
                 .known = calloc((size_t)n_regions + 1, sizeof *b.known)};
    fanin_status status =
        b.copies && b.known ? add_span_pieces(&b, error) : error_set_memory(error);
    free(b.known);
    for (size_t i = 0; b.copies && i < b.copies->n_devices; i++)
        b.copies->devices[i].list.stop = NULL; /* which may go before the list */
    if (status == FANIN_OK) {
        b.copies->reads = spans->n_spans;
        b.copies->views = spans->views;
        spans->views = NULL;
    } else {
        source_copies_free(&b.copies);
    }
    *out = b.copies;
    return status;
}

/* How long a kernel is waited for before connections are looked at: a relay hands on what was read
   before once its source has confirmed it. */
#define KERNEL_NS 100000

/* A kernel reads where bytes lie: nothing is joined, nothing read for nothing. */
static const span_rule kernel_rules = {.max_length = UINT64_C(1) << 40,
                                       .walks_views = true};

/* ----------------------------------------------------------------- planning */

static fanin_status list_copies(const path_planning *how, size_t source, void **detail,
                                fanin_error *error)
{
    const copies_target target = {.base = how->goal->base,
                                  .ranges = how->goal->ranges,
                                  .n_ranges = how->goal->n_ranges};
    uint32_t n_regions = box_table_regions(how->plan->sources[source].boxes);
    void *spans;
    source_copies *copies = NULL;
    fanin_status status = path_make_spans(how, source, &spans, error);
    if (status == FANIN_OK)
        status =
            source_copies_build(spans, n_regions, &target, how->stop, &copies, error);
    path_forget_spans(spans);
    *detail = copies;
    return status;
}

static void forget_copies(void *detail)
{
    source_copies *copies = detail;
    source_copies_free(&copies);
}

/* Staging on all that gather, so that one that has no room is found here and not in a read. */
static fanin_status make_gather_staging(const path_planning *how, const device_plan *d,
                                        fanin_error *error)
{
    gather_lane lanes[GATHER_LANES];
    device_memory *memory = how->client->devices->memory;
    fanin_status status = FANIN_OK;
    if (d->n_gathers == 0)
        return status;
    device_memory_gather(memory, &how->goal->gather);
    for (size_t i = 0; i < d->n_gathers && status == FANIN_OK; i++)
        status = device_memory_lanes(memory, d->gathers[i].device, d->chunk_bytes,
                                     false, lanes, error);
    return status;
}

static fanin_status try_tables(const path_planning *how, const device_plan_parts *parts,
                               device_plan **out, fanin_error *error)
{
    fanin_status status = device_plan_build(how->client->devices->g, parts, out, error);
    if (status == FANIN_OK)
        status = make_gather_staging(how, *out, error);
    if (status != FANIN_OK)
        device_plan_free(out);
    return status;
}

/* By one device if not by several: another one's memory may be full. */
static fanin_status build_tables(const path_planning *how, device_plan_parts *parts,
                                 device_plan **out, fanin_error *error)
{
    fanin_error local = FANIN_ERROR_INIT;
    fanin_status status = try_tables(how, parts, out, &local);
    if (status != FANIN_OK && status != FANIN_ERR_TIMEOUT && parts->gather.n > 1) {
        log_write(&how->client->log, FANIN_LOG_INFO, "gather-device",
                  "one GPU gathers alone: %s", local.message);
        how->publication->paths->gather.n = how->goal->gather.n = parts->gather.n = 1;
        return try_tables(how, parts, out, error);
    }
    if (status != FANIN_OK)
        error_copy(error, &local);
    return status;
}

/* The tables of copies. */
static fanin_status make_tables(const path_planning *how, void *const *details,
                                void **shared, fanin_error *error)
{
    device_plan *d = *shared;
    device_plan_parts parts = {.plan = how->plan,
                               .reader = &ipc_reader,
                               .copies = details,
                               .gather = how->goal->gather,
                               .stop = how->stop};
    uint64_t started = clock_ns();
    fanin_status status = FANIN_OK;
    if (!device_plan_fits(d, &parts)) {
        device_plan_free(&d);
        status = build_tables(how, &parts, &d, error);
    }
    *shared = d;
    how->goal->table_ns += clock_ns() - started;
    return status;
}

static void forget_tables(void *shared)
{
    device_plan *d = shared;
    device_plan_free(&d);
}

/* ------------------------------------------------------------------ reading */

typedef struct ipc_reading {
    const path_reading *r;
    void *const *copies; /* one a source */
    device_reader *kernels;
    bool done;
    fanin_status status; /* of the kernels */
    fanin_error error;
    device_source sources[];
} ipc_reading;

static bool is_alone(const ipc_reading *k)
{
    const path_plan *p = k->r->plan;
    bool alone = true;
    for (size_t i = 0; i < p->n_sources && alone; i++)
        alone = !p->reader_of[i] || p->reader_of[i] == &ipc_reader || k->r->done_ns[i];
    return alone;
}

static fanin_status start_kernels(ipc_reading *k, device_plan *plan)
{
    const path_reading *r = k->r;
    for (size_t i = 0; i < r->plan->n_sources; i++) {
        if (r->plan->reader_of[i] != &ipc_reader)
            continue;
        size_t peer = r->plan->peer_of[i];
        device_source *source = &k->sources[i];
        source->regions = (const ipc_regions *)path_taken(r->publication, peer)->hold;
        fanin_status status = path_arena(r, i, &source->first_region, &k->error);
        if (status != FANIN_OK)
            return status;
    }
    return device_reader_start(r, plan, k->sources, &k->kernels, &k->error);
}

static fanin_status start(const path_reading *r, void *const *details, void *shared,
                          void **reading, fanin_error *error)
{
    ipc_reading *k = calloc(1, sizeof *k + r->plan->n_sources * sizeof *k->sources);
    *reading = k;
    if (!k)
        return error_set_memory(error);
    k->r = r;
    k->copies = details;
    k->error = (fanin_error)FANIN_ERROR_INIT;
    k->status = start_kernels(k, shared);
    error_copy(error, &k->error);
    return k->status;
}

/* Waits for the kernels only if nothing else is to be done meanwhile. */
static bool step(void *reading)
{
    ipc_reading *k = reading;
    deadline until = is_alone(k) ? clock_ns() + KERNEL_NS : 0;
    if (k->status == FANIN_OK && !k->done)
        k->status = device_reader_step(k->kernels, until, &k->done, &k->error);
    return false;
}

static fanin_status check(void *reading, size_t source, bool *done, fanin_error *error)
{
    const ipc_reading *k = reading;
    (void)source;
    *done = k->done;
    if (k->status != FANIN_OK)
        error_copy(error, &k->error);
    return k->status;
}

static bool busy(void *reading, deadline *wake)
{
    const ipc_reading *k = reading;
    if (!k->done)
        *wake = deadline_sooner(*wake, is_alone(k) ? 0 : deadline_in_ms(1));
    return false;
}

/* One kernel reads all ranks, and does not tell them apart: each has brought its share. */
static uint64_t bytes(const void *reading, size_t source, bool *waits)
{
    const ipc_reading *k = reading;
    const path_plan *p = k->r->plan;
    uint64_t all = 0;
    for (size_t i = 0; i < p->n_sources; i++)
        all += p->reader_of[i] == &ipc_reader ? p->plan->ranks[i].bytes : 0;
    *waits = !k->done;
    if (all == 0)
        return 0;
    double share = (double)device_reader_bytes(k->kernels) / (double)all;
    return (uint64_t)(share * (double)p->plan->ranks[source].bytes);
}

static uint64_t scatter_ns(const void *reading)
{
    return device_reader_scatter_ns(((const ipc_reading *)reading)->kernels);
}

static void account(const void *reading, size_t source, served *out)
{
    const ipc_reading *k = reading;
    const source_copies *copies = k->copies[source];
    out->bytes = k->r->plan->plan->ranks[source].bytes;
    out->reads = copies->reads;
}

static bool finish(void *reading)
{
    ipc_reading *k = reading;
    bool ended = device_reader_destroy(&k->kernels);
    if (!ended) { /* what it may touch stays mapped and is never freed */
        ipc_map_abandon(k->r->client->devices->map);
        device_memory_leave(k->r->client->devices->memory);
    }
    free(k);
    return ended;
}

const path_reader ipc_reader = {
    .name = "cuda_ipc",
    .number = FANIN_PATH_CUDA_IPC,
    .told_at = offsetof(msg_end, bytes_cuda_ipc),
    .probe = ipc_probe,
    .unmap = ipc_unmap,
    .plan = list_copies,
    .span_rule = &kernel_rules,
    .plan_all = make_tables,
    .forget = forget_copies,
    .forget_all = forget_tables,
    .start = start,
    .step = step,
    .check = check,
    .busy = busy,
    .bytes = bytes,
    .scatter_ns = scatter_ns,
    .account = account,
    .finish = finish,
};
