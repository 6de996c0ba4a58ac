/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/pull.h"

#include "device/devices.h"
#include "device/device_sink.h"
#include "error_set.h"
#include "net/client_rules.h"
#include <inttypes.h>
#include <stdlib.h>

/* ------------------------------------------------------- who holds it up */

#define MS UINT64_C(1000000)
#define TELL_NS (50 * MS)   /* who asked to be told */
#define LOOK_NS (1000 * MS) /* nobody did: for the log alone */
#define SLOW_NS (1000 * MS) /* from when on a rank holds a pull up */
#define LOG_NS (5000 * MS)  /* from then on the log says so; then at twice the time */

/* One rank in this read. */
typedef struct watched {
    uint64_t bytes;    /* brought */
    uint64_t since_ns; /* it has owed some, and brought none; 0: it owes none */
    uint64_t log_ns;   /* how long that lasts when the log says it next */
} watched;

typedef struct rank_watch {
    const path_reading *reading;
    read_progress *progress;
    const fanin_pull_options *options;
    uint64_t look_ns; /* when to look again */
    watched *of_peer;
    /* what is told, of those that the whole is read from */
    fanin_rank_progress *ranks;
    const fanin_rank_progress **list;
} rank_watch;

static void rank_watch_destroy(rank_watch **w)
{
    if (!*w)
        return;
    free((*w)->of_peer);
    free((*w)->ranks);
    free((void *)(*w)->list);
    free(*w);
    *w = NULL;
}

static rank_watch *rank_watch_create(const path_reading *r, read_progress *progress,
                                     const fanin_pull_options *options)
{
    rank_watch *w = calloc(1, sizeof *w);
    if (!w)
        return NULL;
    bool asked = options->progress || options->rank_progress;
    size_t n = progress->whole->n_sources;
    *w = (rank_watch){.reading = r, .progress = progress, .options = options};
    w->look_ns = asked ? progress->told_ns + TELL_NS : clock_ns() + LOOK_NS;
    w->of_peer = calloc(r->client->n_peers + 1, sizeof *w->of_peer);
    w->ranks = calloc(n + 1, sizeof *w->ranks);
    w->list = calloc(n + 1, sizeof *w->list);
    if (!w->of_peer || !w->ranks || !w->list)
        rank_watch_destroy(&w);
    return w;
}

static void watch(rank_watch *w, void *const *readings, uint64_t now)
{
    const path_plan *p = w->reading->plan;
    for (size_t i = 0; i < p->n_sources; i++) {
        watched *of = &w->of_peer[p->peer_of[i]];
        size_t path = 0;
        bool waits = false;
        if (!p->reader_of[i])
            continue;
        while (path_readers[path] != p->reader_of[i])
            path++;
        uint64_t bytes = p->reader_of[i]->bytes(readings[path], i, &waits);
        waits = waits && w->reading->done_ns[i] == 0;
        if (!waits || bytes != of->bytes || of->since_ns == 0) {
            of->since_ns = waits ? now : 0;
            of->log_ns = LOG_NS;
        }
        of->bytes = bytes;
    }
}

/* What the whole's source has brought; NULL: nothing is read from it. */
static const fanin_rank_progress *describe_progress(rank_watch *w, size_t source,
                                                    uint64_t now)
{
    const path_plan *whole = w->progress->whole;
    size_t peer = whole->peer_of[source];
    uint64_t total = whole->plan->ranks[source].bytes;
    uint64_t done = w->reading->served[peer].bytes + w->of_peer[peer].bytes;
    uint64_t since = w->of_peer[peer].since_ns;
    const connection *c = w->reading->client->peers[peer].control;
    const path_reader *path = path_taken(w->reading->publication, peer)->path;
    if (total == 0)
        return NULL;
    w->ranks[source] =
        (fanin_rank_progress){.struct_size = sizeof(fanin_rank_progress),
                              .rank = (int32_t)c->peer.rank,
                              .path = path ? path->number : FANIN_PATH_AUTO,
                              .address = c->text,
                              .bytes_done = done < total ? done : total,
                              .bytes_total = total,
                              .quiet_ms = since ? (now - since) / MS : 0};
    return &w->ranks[source];
}

/* The rank that has brought nothing for longest, and long enough to say so. */
static fanin_pull_progress gather_progress(rank_watch *w, uint64_t now)
{
    const read_progress *all = w->progress;
    fanin_pull_progress p = {.struct_size = sizeof p,
                             .bytes_done = all->done,
                             .bytes_total = all->total,
                             .ranks = w->list};
    for (size_t i = 0; i < w->reading->client->n_peers; i++)
        p.bytes_done += w->of_peer[i].bytes;
    if (p.bytes_done > p.bytes_total)
        p.bytes_done = p.bytes_total;
    for (size_t i = 0; i < all->whole->n_sources; i++) {
        const fanin_rank_progress *r = describe_progress(w, i, now);
        if (!r)
            continue;
        w->list[p.n_ranks++] = r;
        if (r->quiet_ms >= SLOW_NS / MS &&
            (!p.slowest || r->quiet_ms > p.slowest->quiet_ms))
            p.slowest = r;
    }
    return p;
}

/* Who does not ask finds it in the log. */
static void tell_log(rank_watch *w, const fanin_pull_progress *p, uint64_t now)
{
    const path_plan *whole = w->progress->whole;
    bool silent = p->slowest && !w->options->rank_progress;
    for (size_t i = 0; i < whole->n_sources && silent; i++) {
        watched *of = &w->of_peer[whole->peer_of[i]];
        if (p->slowest != &w->ranks[i] || now - of->since_ns < of->log_ns)
            continue;
        of->log_ns *= 2;
        log_write(&w->reading->client->log, FANIN_LOG_WARNING, "slow-rank",
                  "%s waits for rank %d at %s: no byte for %" PRIu64
                  " s, %.1f of %.1f MB are here",
                  w->options->publication, (int)p->slowest->rank, p->slowest->address,
                  p->slowest->quiet_ms / 1000, (double)p->slowest->bytes_done / 1e6,
                  (double)p->slowest->bytes_total / 1e6);
    }
}

static void rank_watch_look(rank_watch *w, void *const *readings, deadline *wake)
{
    const fanin_pull_options *o = w->options;
    bool asked = o->progress || o->rank_progress;
    uint64_t now = clock_ns();
    if (now >= w->look_ns) {
        watch(w, readings, now);
        const fanin_pull_progress p = gather_progress(w, now);
        tell_log(w, &p, now);
        if (o->progress)
            o->progress(o->progress_cookie, p.bytes_done, p.bytes_total);
        if (o->rank_progress)
            o->rank_progress(o->progress_cookie, &p);
        w->progress->told_ns = now;
        w->look_ns = now + (asked ? TELL_NS : LOOK_NS);
    }
    *wake = deadline_sooner(*wake, w->look_ns);
}

typedef struct phase {
    pull *of;
    plan_part *part; /* that is read */
    path_reading reading;
    void *readings[PATH_READERS]; /* NULL: nothing is read by this path */
    rank_watch *watch;
    uint64_t first_ns, last_ns; /* first read posted, last byte in place */
} phase;

/* ------------------------------------------------------------------ starting */

/* What comes to devices by way of host memory goes through a sink. */
static fanin_status make_sink(phase *w, fanin_error *error)
{
    path_reading *r = &w->reading;
    bool used = false;
    for (size_t i = 0; i < r->plan->n_sources; i++)
        used = used || (r->plan->reader_of[i] && r->plan->reader_of[i]->uses_sink);
    return used && memory_range_on_devices(r->ranges, r->n_ranges)
               ? device_sink_create(r->client->devices->g, r->ranges, r->n_ranges,
                                    r->after, &r->sink, error)
               : FANIN_OK;
}

static fanin_status start_reading(phase *w, fanin_error *error)
{
    path_reading *r = &w->reading;
    const plan_part *part = w->part;
    bool used[PATH_READERS] = {false};
    r->done_ns = calloc(r->plan->n_sources + 1, sizeof *r->done_ns);
    w->watch = rank_watch_create(r, &w->of->progress, w->of->options);
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
static fanin_status check_sources(const phase *w, bool *all, fanin_error *error)
{
    const path_reading *r = &w->reading;
    *all = true;
    for (size_t i = 0; i < r->plan->n_sources; i++) {
        connection *c = path_source(r, i);
        bool done = false;
        if (!r->plan->reader_of[i])
            continue;
        if (c->state != CONNECTION_READY)
            return error_copy(error, &c->fault);
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

static fanin_status run_reading(phase *w, deadline at, fanin_error *error)
{
    for (;;) {
        bool all, busy = false;
        for (size_t i = 0; i < PATH_READERS; i++)
            busy = (w->readings[i] && path_readers[i]->step &&
                    path_readers[i]->step(w->readings[i])) ||
                   busy;
        fanin_status status = check_sources(w, &all, error);
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

/* Whether time has passed because the caller's stream, behind which devices write, is busy: no rank
   is late then. */
static bool waits_for_stream(const path_reading *r)
{
    return memory_range_on_devices(r->ranges, r->n_ranges) &&
           gpu_is_busy(r->client->devices->g, r->after);
}

/* -------------------------------------------------------------------- ending */

static void account_read(const phase *w)
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
                      .read_ns = s->read_ns + (r->done_ns[i] - w->first_ns),
                      .connections = here.connections,
                      .used = true};
    }
    w->of->progress.done += r->plan->plan->bytes;
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
            span_of_rank(r->client, r->plan->peer_of[i], TRACE_READ, w->first_ns,
                         done ? r->done_ns[i] : w->last_ns,
                         r->plan->reader_of[i]->bytes(reading, i, &waits),
                         done ? FANIN_OK : status);
    }
}

/* The calling thread's. */
static void trace_read(const phase *w, uint64_t scattered_before, fanin_status status)
{
    if (!trace_on())
        return;
    trace_span span = trace_span_of(TRACE_READ, w->first_ns, status, NULL);
    span.ended_ns = w->last_ns;
    span.bytes = status == FANIN_OK ? w->reading.plan->plan->bytes : 0;
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

static void end_reading(phase *w, fanin_status status)
{
    path_reading *r = &w->reading;
    destination *d = w->of->destination;
    if (status == FANIN_ERR_TRANSPORT && !device_sink_failed(r->sink, NULL))
        avoid_failed(w);
    for (size_t i = 0; i < PATH_READERS; i++) {
        if (!w->readings[i] || path_readers[i]->finish(w->readings[i]))
            continue;
        d->leak = true;
        w->part->shared[i] = NULL; /* what goes on may use it */
    }
    for (size_t i = 0; i < r->plan->n_sources; i++)
        connection_set_owing(path_source(r, i), false);
    if (device_sink_failed(r->sink, NULL)) /* another attempt would not mend it */
        w->of->state = PULL_FAILED;
    if (!device_sink_destroy(&r->sink))
        d->leak = true;
    rank_watch_destroy(&w->watch);
    free(r->done_ns);
}

static path_reading reading_for(const pull *p, const plan_part *part)
{
    return (path_reading){.client = p->client,
                          .publication = p->publication,
                          .plan = &part->plan,
                          .leases = p->leases,
                          .after = &p->options->stream,
                          .served = p->result->served};
}

/* What lands in the destination itself. */
static path_reading reading_into(const pull *p)
{
    const destination *d = p->destination;
    path_reading r = reading_for(p, pull_part(p));
    r.base = p->base;
    r.need = d->need;
    r.landed = d->landed;
    r.digested = d->digested;
    r.cookie = d->cookie;
    r.pinned = d->pinned;
    r.ranges = pull_ranges_of_part(p, &r.n_ranges);
    return r;
}

static fanin_status read_from_ranks(phase *w, fanin_error *error)
{
    pull *p = w->of;
    uint64_t scattered = p->result->info.scatter_ns;
    w->first_ns = clock_ns();
    fanin_status status = start_reading(w, error);
    if (status == FANIN_OK) {
        set_owing(w);
        status = run_reading(w, p->at, error);
    }
    w->last_ns = clock_ns();
    if (status == FANIN_OK)
        account_read(w);
    if (status == FANIN_ERR_TIMEOUT && waits_for_stream(&w->reading))
        devices_tell_busy(w->reading.after, "read", error);
    trace_read(w, scattered, status);
    end_reading(w, status);
    fanin_result_info *info = &p->result->info;
    uint64_t took = w->last_ns - w->first_ns;
    info->read_ns += took;
    info->fixed_ns += took;
    pull_log_part(p, TRACE_READ, status, took);
    return status;
}

fanin_status pull_read_aside(pull *p, plan_part *part, uint8_t *to, fanin_error *error)
{
    phase w = {.of = p, .part = part, .reading = reading_for(p, part)};
    w.reading.base = to;
    return read_from_ranks(&w, error);
}

void pull_read_follows(pull *p)
{
    if (p->options->verify)
        p->state = PULL_VERIFY;
    else
        pull_read_ended(p);
}

void pull_read_ended(pull *p)
{
    const plan *read = pull_part(p)->plan.plan;
    if (!p->only_verify) {
        p->bytes += read->bytes;
        p->tensors += read->tensors;
    }
    p->state = p->session ? PULL_HELD : PULL_END;
}

/* --------------------------------------------------- what the destination holds */

void pull_writes(pull *p)
{
    if (!p->writes)
        delta_base_enter(p->destination->base);
    p->writes = true;
    p->drops = delta_base_drop(p->destination->base);
}

void pull_base_leave(pull *p)
{
    if (p->writes)
        delta_base_leave(p->destination->base);
    p->writes = false;
}

const digest *pull_base_name(const pull *p)
{
    const digest none = {0};
    digest *name = &p->cache->base;
    if (digest_equal(name, &none))
        *name = base_name(p->publication, p->cache->whole.plan.plan);
    return name;
}

/* NULL: nobody asks, no memory, or a rank did not say which copy its lease is of. */
static base_step *what_is_held(const pull *p)
{
    return pull_wants_patches(p)
               ? base_step_of(p->client, pull_base_name(p), &p->cache->whole.plan,
                              p->announced, p->leases)
               : NULL;
}

void pull_base_keep(pull *p)
{
    base_step *now = what_is_held(p);
    if (now)
        delta_base_set(p->destination->base, now, p->drops);
}

void pull_base_tell(pull *p)
{
    uint64_t seed = p->destination->seed;
    /* What was converted is nothing that patches fit. */
    base_step *now = p->identity.dtype == 0 ? what_is_held(p) : NULL;
    if (now)
        p->identity.base = base_json(now, seed ? seed : p->client->plan_seed);
    free(now);
}

/* The destination is written from now on. */
static void drop_base(pull *p)
{
    if (p->destination->base && CLIENT_RULE(CLIENT_RULE_BASE_DROP))
        pull_writes(p);
}

fanin_status pull_read(pull *p, fanin_error *error)
{
    phase w = {.of = p, .part = pull_part(p), .reading = reading_into(p)};
    if (p->only_verify) {
        p->state = PULL_VERIFY;
        return FANIN_OK;
    }
    drop_base(p);
    fanin_status status = read_from_ranks(&w, error);
    if (status == FANIN_OK)
        pull_read_follows(p);
    return status;
}
