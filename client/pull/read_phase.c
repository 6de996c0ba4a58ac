/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/read_phase.h"

#include "device/devices.h"
#include "device/device_sink.h"
#include "error_set.h"
#include "net/spans.h"
#include <stdlib.h>

typedef struct phase {
    read_phase *of;
    path_reading reading;
    void *readings[PATH_READERS]; /* NULL: nothing is read by this path */
    rank_watch *watch;
} phase;

/* ------------------------------------------------------------------ starting */

/* What comes to devices by way of host memory goes through a sink. */
static fanin_status make_sink(phase *w, fanin_error *error)
{
    path_reading *r = &w->reading;
    bool used = false;
    for (size_t i = 0; i < r->plan->n_sources; i++)
        used = used || (r->plan->reader_of[i] && r->plan->reader_of[i]->uses_sink);
    for (size_t i = 0; i < r->n_ranges && used; i++) {
        if (r->ranges[i].device >= 0)
            return device_sink_create(r->client->devices->g, r->ranges, r->n_ranges,
                                      r->after, &r->sink, error);
    }
    return FANIN_OK;
}

static fanin_status start(phase *w, fanin_error *error)
{
    path_reading *r = &w->reading;
    const plan_part *part = w->of->part;
    bool used[PATH_READERS] = {false};
    r->done_ns = calloc(r->plan->n_sources + 1, sizeof *r->done_ns);
    w->watch = rank_watch_create(r, w->of->progress, w->of->options);
    if (!r->done_ns || !w->watch)
        return error_set_memory(error);
    for (size_t i = 0; i < r->plan->n_sources; i++) {
        for (size_t j = 0; j < PATH_READERS; j++)
            used[j] = used[j] || r->plan->reader_of[i] == path_readers[j];
    }
    fanin_status status = make_sink(w, error);
    for (size_t i = 0; i < PATH_READERS && status == FANIN_OK; i++) {
        if (used[i])
            status = path_readers[i]->start(r, part->details[i], part->shared[i],
                                            &w->readings[i], error);
    }
    return status;
}

/* ------------------------------------------------------------------- running */

/* From now on who is silent holds this up. */
static void set_owing(const phase *w)
{
    const path_reading *r = &w->reading;
    for (size_t i = 0; i < r->plan->n_sources; i++)
        connection_set_owing(path_source(r, i), r->plan->reader_of[i] != NULL);
}

static void *reading_of(const phase *w, size_t source)
{
    size_t i = 0;
    while (path_readers[i] != w->reading.plan->reader_of[source])
        i++;
    return w->readings[i];
}

/* A lost connection tells of a dead rank long before a fabric would. */
static fanin_status check(const phase *w, bool *all, fanin_error *error)
{
    const path_reading *r = &w->reading;
    *all = true;
    for (size_t i = 0; i < r->plan->n_sources; i++) {
        connection *c = path_source(r, i);
        bool done = false;
        if (!r->plan->reader_of[i])
            continue;
        if (connection_get_state(c) != CONNECTION_READY)
            return error_copy(error, connection_fault(c));
        fanin_status status =
            r->plan->reader_of[i]->check(reading_of(w, i), i, &done, error);
        if (status != FANIN_OK)
            return status;
        *all = *all && done;
        if (!done || r->done_ns[i] > 0)
            continue;
        r->done_ns[i] = clock_ns();
        connection_set_owing(c, false);
    }
    return FANIN_OK;
}

static fanin_status run(phase *w, deadline at, fanin_error *error)
{
    for (;;) {
        bool all, busy = false;
        for (size_t i = 0; i < PATH_READERS; i++)
            busy = (w->readings[i] && path_readers[i]->step(w->readings[i])) || busy;
        fanin_status status = check(w, &all, error);
        if (status != FANIN_OK || all)
            return status;
        deadline wake = UINT64_MAX;
        rank_watch_look(w->watch, w->readings, &wake);
        for (size_t i = 0; i < PATH_READERS && !busy; i++)
            busy = w->readings[i] && path_readers[i]->busy &&
                   path_readers[i]->busy(w->readings[i], &wake);
        status = client_step(w->reading.client, at, busy ? 0 : wake, "read", error);
        if (status != FANIN_OK)
            return status;
    }
}

/* -------------------------------------------------------------------- ending */

static void account(const phase *w)
{
    const path_reading *r = &w->reading;
    fanin_result *result = w->of->result;
    for (size_t i = 0; i < r->plan->n_sources; i++) {
        served *s = &result->served[r->plan->peer_of[i]];
        served here = {.connections = s->connections};
        if (!r->plan->reader_of[i])
            continue;
        r->plan->reader_of[i]->account(reading_of(w, i), i, &here);
        *s = (served){.bytes = s->bytes + here.bytes,
                      .reads = s->reads + here.reads,
                      .read_ns = s->read_ns + (r->done_ns[i] - w->of->first_ns),
                      .connections = here.connections,
                      .used = true};
    }
    w->of->progress->done += r->plan->plan->bytes;
    for (size_t i = 0; i < PATH_READERS; i++) {
        if (w->readings[i] && path_readers[i]->scatter_ns)
            result->info.scatter_ns += path_readers[i]->scatter_ns(w->readings[i]);
    }
}

/* True times of each rank, whether it is through or not. */
static void trace_ranks(const phase *w, fanin_status status)
{
    const path_reading *r = &w->reading;
    for (size_t i = 0; trace_on() && r->done_ns && i < r->plan->n_sources; i++) {
        bool waits, done = r->done_ns[i] > 0;
        void *reading = r->plan->reader_of[i] ? reading_of(w, i) : NULL;
        if (reading)
            span_of_rank(r->client, r->plan->peer_of[i], TRACE_READ, w->of->first_ns,
                         done ? r->done_ns[i] : w->of->last_ns,
                         r->plan->reader_of[i]->bytes(reading, i, &waits),
                         done ? FANIN_OK : status);
    }
}

/* The calling thread's. */
static void trace_read(const phase *w, uint64_t scattered_before, fanin_status status)
{
    if (!trace_on())
        return;
    trace_span span = trace_span_of(TRACE_READ, w->of->first_ns, status, NULL);
    span.ended_ns = w->of->last_ns;
    span.bytes = status == FANIN_OK ? w->of->part->plan.plan->bytes : 0;
    span.scatter_ns = w->of->result->info.scatter_ns - scattered_before;
    span.place = w->of->client->place;
    trace_add(&span);
    trace_ranks(w, status);
}

/* A path that failed is not tried again on this connection unless it is forced. */
static void avoid_failed(const phase *w)
{
    const path_reading *r = &w->reading;
    for (size_t i = 0; i < r->plan->n_sources; i++) {
        fanin_error why = FANIN_ERROR_INIT;
        bool done;
        if (r->plan->reader_of[i] && reading_of(w, i) &&
            !r->plan->reader_of[i]->is_fallback &&
            r->plan->reader_of[i]->check(reading_of(w, i), i, &done, &why) ==
                FANIN_ERR_TRANSPORT)
            path_avoid(r->client, r->plan->peer_of[i], why.message);
    }
}

static void finish(phase *w, fanin_status status)
{
    path_reading *r = &w->reading;
    destination *d = w->of->destination;
    if (status == FANIN_ERR_TRANSPORT && !device_sink_failed(r->sink, NULL))
        avoid_failed(w);
    for (size_t i = 0; i < PATH_READERS; i++) {
        if (!w->readings[i] || path_readers[i]->finish(w->readings[i]))
            continue;
        d->leak = true;
        w->of->part->shared[i] = NULL; /* what goes on may use it */
    }
    for (size_t i = 0; i < r->plan->n_sources; i++)
        connection_set_owing(path_source(r, i), false);
    w->of->final = device_sink_failed(r->sink, NULL);
    if (!device_sink_destroy(&r->sink))
        d->leak = true;
    rank_watch_destroy(&w->watch);
    free(r->done_ns);
}

/* last_ns is set. */
static void end(phase *w, fanin_status status)
{
    read_phase *r = w->of;
    uint64_t scattered = r->result->info.scatter_ns;
    if (status == FANIN_OK)
        account(w);
    trace_read(w, scattered, status);
    finish(w, status);
}

static path_reading reading_for(const read_phase *r)
{
    const destination *d = r->destination;
    return (path_reading){.client = r->client,
                          .publication = r->publication,
                          .plan = &r->part->plan,
                          .leases = r->leases,
                          .base = r->base,
                          .ranges = r->ranges,
                          .n_ranges = r->n_ranges,
                          .need = d->need,
                          .landed = d->landed,
                          .digested = d->digested,
                          .cookie = d->cookie,
                          .pinned = d->pinned,
                          .after = &r->options->stream,
                          .served = r->result->served};
}

fanin_status read_phase_run(read_phase *r, deadline at, fanin_error *error)
{
    phase w = {.of = r, .reading = reading_for(r)};
    r->first_ns = clock_ns();
    fanin_status status = start(&w, error);
    if (status == FANIN_OK) {
        set_owing(&w);
        status = run(&w, at, error);
    }
    r->last_ns = clock_ns();
    end(&w, status);
    return status;
}
