/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/reader_ipc.h"

#include "device/devices.h"
#include "error_set.h"
#include <stdlib.h>

/* How long a kernel is waited for before connections are looked at. */
#define KERNEL_NS 1000000

/* A kernel reads where bytes lie: nothing is joined, nothing read for nothing. */
static const span_rule kernel_rules = {.max_length = UINT64_C(1) << 40};

/* ----------------------------------------------------------------- planning */

typedef struct ipc_detail {
    plan_spans **spans; /* a source; NULL: it was never read by this path */
    device_plan *plan;
} ipc_detail;

static void forget(void *detail, size_t n_sources)
{
    ipc_detail *d = detail;
    for (size_t i = 0; d && d->spans && i < n_sources; i++)
        plan_spans_free(&d->spans[i]);
    if (d) {
        device_plan_free(&d->plan);
        free(d->spans);
    }
    free(d);
}

static fanin_status make_tables(const path_planning *how, ipc_detail *d,
                                const bool *of_source, fanin_error *error)
{
    device_plan_parts parts = {.plan = how->plan,
                               .spans = d->spans,
                               .of_source = of_source,
                               .base = how->goal->base,
                               .ranges = how->goal->ranges,
                               .n_ranges = how->goal->n_ranges,
                               .gather_device = how->goal->gather_device,
                               .stop = how->stop};
    uint64_t started = clock_ns();
    fanin_status status = FANIN_OK;
    if (!device_plan_fits(d->plan, &parts)) {
        device_plan_free(&d->plan);
        status = device_plan_build(how->client->devices->g, &parts, &d->plan, error);
    }
    how->goal->table_ns += clock_ns() - started;
    return status;
}

/* Marks this path's sources and cuts what they bring; *any: there is one. */
static fanin_status make_spans(const path_planning *how, ipc_detail *d, bool *of_source,
                               bool *any, fanin_error *error)
{
    const path_plan *p = how->plan;
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < p->n_sources && status == FANIN_OK; i++) {
        const path_state *s = path_taken(how->publication, p->peer_of[i]);
        of_source[i] = p->plan->ranks[i].n_pieces > 0 && s->path == FANIN_PATH_CUDA_IPC;
        *any = *any || of_source[i];
        if (of_source[i] && !d->spans[i])
            status = plan_spans_build(p->plan, how->publication->keys, p->sources, i,
                                      s->regions, &kernel_rules, how->stop,
                                      &d->spans[i], error);
    }
    return status;
}

static fanin_status make_detail(const path_planning *how, void **detail,
                                fanin_error *error)
{
    size_t n = how->plan->n_sources;
    bool any = false;
    bool *of_source = calloc(n + 1, sizeof *of_source);
    ipc_detail *d = *detail ? *detail : calloc(1, sizeof *d);
    *detail = d;
    if (d && !d->spans)
        d->spans = calloc(n + 1, sizeof *d->spans);
    fanin_status status = of_source && d && d->spans
                              ? make_spans(how, d, of_source, &any, error)
                              : error_set_memory(error);
    if (status == FANIN_OK && any)
        status = make_tables(how, d, of_source, error);
    free(of_source);
    return status;
}

/* ------------------------------------------------------------------ reading */

typedef struct ipc_reading {
    const path_reading *r;
    ipc_detail *detail;
    const ipc_regions **shards; /* one a source */
    uint32_t *first_region;
    device_reader *kernels;
    bool failed, last, done;
} ipc_reading;

static fanin_status start(const path_reading *r, void *detail, void **reading,
                          fanin_error *error)
{
    size_t n = r->plan->n_sources;
    ipc_reading *k = calloc(1, sizeof *k);
    *reading = k;
    if (!k)
        return error_set_memory(error);
    k->r = r;
    k->detail = detail;
    k->shards = calloc(n, sizeof *k->shards);
    k->first_region = calloc(n, sizeof *k->first_region);
    fanin_status status =
        k->shards && k->first_region ? FANIN_OK : error_set_memory(error);
    for (size_t i = 0; i < n && status == FANIN_OK; i++) {
        if (r->reader_of[i] != &ipc_reader)
            continue;
        k->shards[i] = ipc_regions_of(path_taken(r->publication, r->plan->peer_of[i]));
        status = path_arena(r, i, &k->first_region[i], error);
    }
    if (status != FANIN_OK)
        return status;
    device_reading how = {.client = r->client,
                          .plan = k->detail->plan,
                          .shards = k->shards,
                          .first_region = k->first_region,
                          .base = r->base,
                          .pinned = r->pinned,
                          .landed = r->landed,
                          .landed_cookie = r->cookie,
                          .after = r->after};
    status = device_reader_start(&how, &k->kernels, error);
    k->failed = status == FANIN_ERR_TRANSPORT;
    return status;
}

/* Waits for the kernels only if nothing else is to be done meanwhile. */
static fanin_status check(void *reading, bool last, bool *done, fanin_error *error)
{
    ipc_reading *k = reading;
    const path_reading *r = k->r;
    fanin_status status = path_check_ranks(r, &ipc_reader, error);
    if (status != FANIN_OK)
        return status;
    k->last = last;
    status = device_reader_step(k->kernels, last ? clock_ns() + KERNEL_NS : 0, &k->done,
                                error);
    k->failed = status == FANIN_ERR_TRANSPORT;
    for (size_t i = 0; status == FANIN_OK && k->done && i < r->plan->n_sources; i++) {
        if (r->reader_of[i] == &ipc_reader)
            path_note_done(r, i);
    }
    *done = *done && k->done;
    return status;
}

static bool busy(void *reading, deadline *wake)
{
    const ipc_reading *k = reading;
    if (!k->done)
        *wake = deadline_sooner(*wake, k->last ? 0 : deadline_in_ms(1));
    return false;
}

static uint64_t bytes(const void *reading)
{
    return device_reader_bytes(((const ipc_reading *)reading)->kernels);
}

static uint64_t account(const void *reading)
{
    const ipc_reading *k = reading;
    const path_plan *p = k->r->plan;
    for (size_t i = 0; i < p->n_sources; i++) {
        if (k->r->reader_of[i] == &ipc_reader)
            k->r->served[p->peer_of[i]] =
                (served){.bytes = p->plan->ranks[i].bytes,
                         .reads = k->detail->spans[i]->n_spans};
    }
    return device_reader_scatter_ns(k->kernels);
}

static bool finish(void *reading, const fanin_error *why)
{
    ipc_reading *k = reading;
    const path_reading *r = k->r;
    bool ended = device_reader_destroy(&k->kernels);
    if (!ended) {
        k->detail->plan = NULL; /* its tables, too */
        ipc_leave_to_device(r->client);
    }
    for (size_t i = 0; why && k->failed && i < r->plan->n_sources; i++) {
        if (r->reader_of[i] == &ipc_reader)
            path_avoid(r->client, r->plan->peer_of[i], why->message);
    }
    free(k->shards);
    free(k->first_region);
    free(k);
    return ended;
}

const path_reader ipc_reader = {
    .paths = 1 << FANIN_PATH_CUDA_IPC,
    .probe = ipc_probe,
    .unmap = ipc_unmap,
    .plan = make_detail,
    .forget = forget,
    .start = start,
    .check = check,
    .busy = busy,
    .bytes = bytes,
    .account = account,
    .finish = finish,
};
