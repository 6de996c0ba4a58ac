/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/read_phase.h"

#include "device/devices.h"
#include "device/device_sink.h"
#include "error_set.h"
#include <stdlib.h>

#define PROGRESS_NS 50000000

typedef struct phase {
    read_phase *of;
    path_reading reading;
    void *readings[PATH_READERS]; /* NULL: nothing is read by this path */
    uint64_t progress_ns;
} phase;

/* ------------------------------------------------------------------ starting */

/* What comes to devices by way of host memory goes through a sink. */
static fanin_status make_sink(phase *w, fanin_error *error)
{
    path_reading *r = &w->reading;
    bool used = false;
    for (size_t i = 0; i < r->plan->n_sources; i++)
        used = used || (r->reader_of[i] && r->reader_of[i]->uses_sink);
    for (size_t i = 0; i < r->n_ranges && used; i++) {
        if (r->ranges[i].device >= 0)
            return device_sink_create(r->client->devices->g, r->ranges, r->n_ranges,
                                      r->after, &r->sink, error);
    }
    return FANIN_OK;
}

static fanin_status start_reader(phase *w, size_t index, fanin_error *error)
{
    const path_reading *r = &w->reading;
    bool any = false;
    for (size_t i = 0; i < r->plan->n_sources; i++)
        any = any || r->reader_of[i] == path_readers[index];
    if (!any)
        return FANIN_OK;
    return path_readers[index]->start(r, w->of->cache->details[index],
                                      &w->readings[index], error);
}

static fanin_status start(phase *w, fanin_error *error)
{
    path_reading *r = &w->reading;
    const path_plan *p = r->plan;
    r->reader_of = calloc(p->n_sources + 1, sizeof *r->reader_of);
    r->done_ns = calloc(p->n_sources + 1, sizeof *r->done_ns);
    if (!r->reader_of || !r->done_ns)
        return error_set_memory(error);
    for (size_t i = 0; i < p->n_sources; i++) {
        if (p->plan->ranks[i].n_pieces == 0)
            continue;
        r->reader_of[i] =
            path_reader_of(path_taken(r->publication, p->peer_of[i])->path);
        connection_set_owing(path_source(r, i)->control, true);
    }
    fanin_status status = make_sink(w, error);
    for (size_t i = 0; i < PATH_READERS && status == FANIN_OK; i++)
        status = start_reader(w, i, error);
    return status;
}

/* ------------------------------------------------------------------- running */

static void report_progress(phase *w)
{
    const fanin_pull_options *options = w->of->options;
    if (!options->progress)
        return;
    uint64_t now = clock_ns();
    if (now - w->progress_ns < PROGRESS_NS)
        return;
    w->progress_ns = now;
    uint64_t bytes = 0, total = w->reading.plan->plan->bytes;
    for (size_t i = 0; i < PATH_READERS; i++) {
        if (w->readings[i])
            bytes += path_readers[i]->bytes(w->readings[i]);
    }
    options->progress(options->progress_cookie, bytes < total ? bytes : total, total);
}

/* Whether all is in place. Backwards: who may wait for its part comes first in the table, and knows
   when it is asked whether that is all there is left to do. */
static fanin_status check(const phase *w, bool *done, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    *done = true;
    for (size_t i = PATH_READERS; i-- > 0 && status == FANIN_OK;) {
        if (w->readings[i])
            status = path_readers[i]->check(w->readings[i], *done, done, error);
    }
    return status;
}

static fanin_status run(phase *w, deadline at, fanin_error *error)
{
    for (;;) {
        bool done, busy = false;
        for (size_t i = 0; i < PATH_READERS; i++) {
            if (w->readings[i] && path_readers[i]->step)
                busy = path_readers[i]->step(w->readings[i]) || busy;
        }
        fanin_status status = check(w, &done, error);
        if (status != FANIN_OK || done)
            return status;
        report_progress(w);
        deadline wake = UINT64_MAX;
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
    for (size_t i = 0; i < PATH_READERS; i++) {
        if (w->readings[i])
            w->of->result->info.scatter_ns += path_readers[i]->account(w->readings[i]);
    }
    for (size_t i = 0; i < r->plan->n_sources; i++) {
        if (!r->reader_of[i])
            continue;
        r->served[r->plan->peer_of[i]].used = true;
        r->served[r->plan->peer_of[i]].read_ns = r->done_ns[i] - w->of->first_ns;
    }
}

static void finish(phase *w, fanin_status status, const fanin_error *why)
{
    path_reading *r = &w->reading;
    destination *d = w->of->destination;
    if (status != FANIN_ERR_TRANSPORT || device_sink_failed(r->sink, NULL))
        why = NULL; /* no path's fault */
    for (size_t i = 0; i < PATH_READERS; i++) {
        if (w->readings[i] && !path_readers[i]->finish(w->readings[i], why))
            d->leak = true;
    }
    for (size_t i = 0; i < r->plan->n_sources; i++)
        connection_set_owing(path_source(r, i)->control, false);
    w->of->final = device_sink_failed(r->sink, NULL);
    if (!device_sink_destroy(&r->sink))
        d->leak = true;
    free(r->reader_of);
    free(r->done_ns);
}

fanin_status read_phase_run(read_phase *r, deadline at, fanin_error *error)
{
    const destination *d = r->destination;
    fanin_error local = FANIN_ERROR_INIT;
    fanin_error *why =
        error ? error : &local; /* what is to be said of a path that failed */
    phase w = {.of = r,
               .reading = {.client = r->client,
                           .publication = r->publication,
                           .plan = &r->cache->plan,
                           .leases = r->leases,
                           .base = r->base,
                           .ranges = r->ranges,
                           .n_ranges = r->n_ranges,
                           .need = d->need,
                           .landed = d->landed,
                           .cookie = d->cookie,
                           .pinned = d->pinned,
                           .after = &r->options->stream,
                           .served = r->result->served}};
    r->first_ns = clock_ns();
    fanin_status status = start(&w, why);
    if (status == FANIN_OK)
        status = run(&w, at, why);
    r->last_ns = clock_ns();
    if (status == FANIN_OK)
        account(&w);
    finish(&w, status, why);
    return status;
}
