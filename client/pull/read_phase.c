/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/read_phase.h"

#include "device/device_memory.h"
#include "error_set.h"
#include "ipc/device_reader.h"
#include "stream/stream_link.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PROGRESS_NS 50000000
/* How long a kernel is waited for before connections are looked at. */
#define KERNEL_NS 1000000
/* Bytes of sealed streams from which on threads check them. */
#define CHECKS_FROM ((uint64_t)8 << 20)

typedef struct works {
    stream_work *streams; /* one a source; used if the source's path is stream */
    one_sided_work *gets; /* compact: the one-sided sources only */
    size_t *get_source;   /* of each of them */
    size_t n_gets;
    one_sided *reader;
    device_sink *sink;      /* takes to devices what streams and gets bring */
    seal_checks *checks;    /* of what streams bring; NULL: who receives makes them */
    device_reader *kernels; /* reads the sources on cuda_ipc */
    const shard_table **shards; /* of these, one a source */
    uint32_t *first_region;
    uint64_t *
        done_ns; /* of each source: when its last byte was found in place; 0: not yet */
    bool kernels_failed;
    uint64_t inflight;
    uint64_t progress_ns;
} works;

static peer *peer_of(const read_phase *r, size_t source)
{
    return &r->client->peers[r->cache->peer_of[source]];
}

static bool is_needed(const read_phase *r, size_t source)
{
    return r->cache->plan->ranks[source].n_pieces > 0;
}

static bool is_stream(const read_phase *r, size_t source)
{
    return is_needed(r, source) && peer_of(r, source)->path == FANIN_PATH_STREAM;
}

static bool is_ipc(const read_phase *r, size_t source)
{
    return is_needed(r, source) && peer_of(r, source)->path == FANIN_PATH_CUDA_IPC;
}

static uint32_t first_region(const read_phase *r, size_t source)
{
    return r->leases[r->cache->peer_of[source]].first_region;
}

/* ------------------------------------------------------------------ starting */

static fanin_status start_stream(read_phase *r, works *w, size_t source,
                                 fanin_error *error)
{
    peer *p = peer_of(r, source);
    size_t index = r->cache->peer_of[source];
    if (!p->stream) {
        unsigned count = r->client->config.streams_per_rank;
        if (count == 0)
            count = connection_is_local(p->control) ? 1 : 4;
        fanin_status status =
            stream_link_create(r->client, p->control, count, &p->stream, error);
        if (status != FANIN_OK)
            return status;
    }
    stream_work *s = &w->streams[source];
    *s = (stream_work){.plan = r->cache->plan,
                       .pieces = &r->cache->plan->ranks[source],
                       .list = &r->cache->lists[source],
                       .base = r->base,
                       .need = r->destination->need,
                       .landed = r->destination->landed,
                       .landed_cookie = r->destination->cookie,
                       .devices = w->sink,
                       .checks = w->checks,
                       .inflight = &w->inflight,
                       .max_inflight = r->client->config.max_inflight,
                       .error = FANIN_ERROR_INIT};
    memcpy(s->token, r->leases[index].token, sizeof(s->token));
    connection_set_owing(p->control, true);
    stream_link_start(p->stream, s);
    return FANIN_OK;
}

/* Spans name the regions of the first arena; another one must be as large. */
static fanin_status check_arena(const read_phase *r, size_t source, fanin_error *error)
{
    size_t index = r->cache->peer_of[source];
    const connection *c = r->client->peers[index].control;
    const region_table *regions = r->publication->shards[index].regions;
    uint64_t first = first_region(r, source);
    uint32_t n = box_table_regions(r->publication->shards[index].boxes);
    for (uint32_t i = 0; i < n && first > 0; i++) {
        if (i + first < regions->count &&
            regions->entries[i + first].length >= regions->entries[i].length)
            continue;
        error_place place = connection_place(c, "begin");
        return error_set(error, FANIN_ERR_PROTOCOL, &place,
                         "rank %u at %s granted an arena outside of its regions",
                         connection_peer(c)->rank, connection_text(c));
    }
    return FANIN_OK;
}

static fanin_status add_gets(read_phase *r, works *w, size_t source, fanin_error *error)
{
    size_t index = r->cache->peer_of[source];
    w->get_source[w->n_gets] = source;
    w->gets[w->n_gets++] = (one_sided_work){.peer = peer_of(r, source),
                                            .rank = r->cache->sources[source].rank,
                                            .shards = &r->publication->shards[index],
                                            .spans = r->cache->spans[source],
                                            .first_region = first_region(r, source)};
    connection_set_owing(peer_of(r, source)->control, true);
    return check_arena(r, source, error);
}

static fanin_status start_gets(read_phase *r, works *w, fanin_error *error)
{
    if (w->n_gets == 0)
        return FANIN_OK;
    return one_sided_create(r->client, w->gets, w->n_gets, r->base, r->ranges,
                            r->n_ranges, r->destination->landed, r->destination->cookie,
                            w->sink, &w->reader, error);
}

static fanin_status start_kernels(read_phase *r, works *w, fanin_error *error)
{
    size_t n = r->cache->n_sources;
    bool any = false;
    for (size_t i = 0; i < n; i++) {
        if (!is_ipc(r, i))
            continue;
        fanin_status status = check_arena(r, i, error);
        if (status != FANIN_OK)
            return status;
        any = true;
        w->shards[i] = &r->publication->shards[r->cache->peer_of[i]];
        w->first_region[i] = first_region(r, i);
        connection_set_owing(peer_of(r, i)->control, true);
    }
    device_reading reading = {.client = r->client,
                              .plan = r->cache->device,
                              .shards = w->shards,
                              .first_region = w->first_region,
                              .base = r->base,
                              .pinned = r->destination->pinned,
                              .landed = r->destination->landed,
                              .landed_cookie = r->destination->cookie,
                              .after = &r->options->stream};
    if (!any)
        return FANIN_OK;
    fanin_status status = device_reader_start(&reading, &w->kernels, error);
    w->kernels_failed = status == FANIN_ERR_TRANSPORT;
    return status;
}

/* What other paths bring to devices goes through a sink. */
static fanin_status make_sink(read_phase *r, works *w, fanin_error *error)
{
    bool others = false;
    for (size_t i = 0; i < r->cache->n_sources; i++)
        others = others || (is_needed(r, i) && !is_ipc(r, i));
    for (size_t i = 0; i < r->n_ranges && others; i++) {
        if (r->ranges[i].device >= 0)
            return device_sink_create(r->client->gpu, r->ranges, r->n_ranges,
                                      &r->options->stream, &w->sink, error);
    }
    return FANIN_OK;
}

/* Threads cost more than they spare where little comes. */
static void make_checks(const read_phase *r, works *w)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < r->cache->n_sources; i++) {
        if (is_stream(r, i) && connection_is_sealed(peer_of(r, i)->control))
            bytes += r->cache->plan->ranks[i].bytes;
    }
    if (bytes >= CHECKS_FROM && !w->sink)
        w->checks = seal_checks_create(&r->client->loop);
}

static fanin_status start(read_phase *r, works *w, fanin_error *error)
{
    size_t n = r->cache->n_sources;
    w->streams = calloc(n + 1, sizeof(*w->streams));
    w->gets = calloc(n + 1, sizeof(*w->gets));
    w->get_source = calloc(n + 1, sizeof(*w->get_source));
    w->shards = calloc(n + 1, sizeof(*w->shards));
    w->first_region = calloc(n + 1, sizeof(*w->first_region));
    w->done_ns = calloc(n + 1, sizeof(*w->done_ns));
    if (!w->streams || !w->gets || !w->get_source || !w->shards || !w->first_region ||
        !w->done_ns)
        return error_set_memory(error);
    fanin_status status = start_kernels(r, w, error);
    if (status == FANIN_OK)
        status = make_sink(r, w, error);
    if (status == FANIN_OK)
        make_checks(r, w);
    for (size_t i = 0; i < n && status == FANIN_OK; i++) {
        if (is_stream(r, i))
            status = start_stream(r, w, i, error);
        else if (is_needed(r, i) && !is_ipc(r, i))
            status = add_gets(r, w, i, error);
    }
    return status == FANIN_OK ? start_gets(r, w, error) : status;
}

/* ------------------------------------------------------------------- running */

static void note_done(works *w, size_t source)
{
    if (w->done_ns[source] == 0)
        w->done_ns[source] = clock_ns();
}

static fanin_status check_streams(read_phase *r, works *w, bool *done,
                                  fanin_error *error)
{
    for (size_t i = 0; i < r->cache->n_sources; i++) {
        if (!is_stream(r, i))
            continue;
        stream_work *s = &w->streams[i];
        const connection *c = peer_of(r, i)->control;
        if (s->failed) {
            error_copy(error, &s->error);
            return s->status;
        }
        if (connection_get_state(c) != CONNECTION_READY) {
            error_copy(error, connection_fault(c));
            return connection_fault(c)->status;
        }
        if (s->done_requests == s->list->n_requests) {
            connection_set_owing(peer_of(r, i)->control, false);
            note_done(w, i);
        } else {
            *done = false;
        }
        stream_link_pump(peer_of(r, i)->stream);
    }
    return FANIN_OK;
}

static fanin_status check_gets(works *w, bool *done, fanin_error *error)
{
    for (size_t i = 0; i < w->n_gets; i++) {
        const connection *c = w->gets[i].peer->control;
        if (connection_get_state(c) != CONNECTION_READY) {
            /* Tells of a dead rank long before a fabric would. */
            error_copy(error, connection_fault(c));
            return connection_fault(c)->status;
        }
        if (w->gets[i].failed) {
            error_copy(error, &w->gets[i].error);
            return FANIN_ERR_TRANSPORT;
        }
        if (w->gets[i].done_spans < w->gets[i].spans->n_spans)
            *done = false;
        else
            note_done(w, w->get_source[i]);
    }
    return FANIN_OK;
}

/* Waits for the kernels only if nothing else is to be done meanwhile. */
static fanin_status check_kernels(const read_phase *r, works *w, bool *done,
                                  fanin_error *error)
{
    if (!w->kernels)
        return FANIN_OK;
    for (size_t i = 0; i < r->cache->n_sources; i++) {
        const connection *c = peer_of(r, i)->control;
        if (!is_ipc(r, i) || connection_get_state(c) == CONNECTION_READY)
            continue;
        error_copy(error, connection_fault(c));
        return connection_fault(c)->status;
    }
    bool finished;
    deadline until = *done ? clock_ns() + KERNEL_NS : 0;
    fanin_status status = device_reader_step(w->kernels, until, &finished, error);
    w->kernels_failed = status == FANIN_ERR_TRANSPORT;
    for (size_t i = 0; status == FANIN_OK && finished && i < r->cache->n_sources; i++) {
        if (is_ipc(r, i))
            note_done(w, i);
    }
    *done = *done && finished;
    return status;
}

static void report_progress(const read_phase *r, works *w)
{
    if (!r->options->progress)
        return;
    uint64_t now = clock_ns();
    if (now - w->progress_ns < PROGRESS_NS)
        return;
    w->progress_ns = now;
    uint64_t bytes = 0, total = r->cache->plan->bytes;
    for (size_t i = 0; i < r->cache->n_sources; i++)
        bytes += w->streams[i].bytes;
    for (size_t i = 0; i < w->n_gets; i++)
        bytes += w->gets[i].bytes;
    if (w->kernels)
        bytes += device_reader_bytes(w->kernels);
    r->options->progress(r->options->progress_cookie, bytes < total ? bytes : total,
                         total);
}

static fanin_status run(read_phase *r, works *w, deadline at, fanin_error *error)
{
    for (;;) {
        bool done = true;
        bool busy = w->reader && one_sided_step(w->reader);
        if (w->inflight == 0 && seal_checks_help(w->checks))
            busy = true;
        fanin_status status = check_streams(r, w, &done, error);
        if (status == FANIN_OK)
            status = check_gets(w, &done, error);
        bool others = !done;
        if (status == FANIN_OK)
            status = check_kernels(r, w, &done, error);
        if (status != FANIN_OK || done)
            return status;
        report_progress(r, w);
        if (!busy && w->reader && !one_sided_arm(w->reader))
            busy = true;
        deadline wake = busy || !others ? 0
                        : w->kernels    ? deadline_in_ms(1)
                                        : UINT64_MAX;
        status = client_step(r->client, at, wake, "read", error);
        if (status != FANIN_OK)
            return status;
    }
}

/* -------------------------------------------------------------------- ending */

static uint64_t own_ns(const read_phase *r, const works *w, size_t source)
{
    return w->done_ns[source] - r->first_ns;
}

static void account(read_phase *r, const works *w)
{
    for (size_t i = 0; i < r->cache->n_sources; i++) {
        if (!is_stream(r, i))
            continue;
        r->result->served[r->cache->peer_of[i]] =
            (served){.used = true,
                     .bytes = w->streams[i].bytes,
                     .reads = w->streams[i].done_requests,
                     .read_ns = own_ns(r, w, i),
                     .connections = stream_link_count(peer_of(r, i)->stream)};
    }
    for (size_t i = 0; i < w->n_gets; i++)
        r->result->served[r->cache->peer_of[w->get_source[i]]] =
            (served){.used = true,
                     .bytes = w->gets[i].bytes,
                     .reads = w->gets[i].done_spans,
                     .read_ns = own_ns(r, w, w->get_source[i])};
    for (size_t i = 0; i < r->cache->n_sources; i++) {
        if (is_ipc(r, i))
            r->result->served[r->cache->peer_of[i]] =
                (served){.used = true,
                         .bytes = r->cache->plan->ranks[i].bytes,
                         .reads = r->cache->spans[i]->n_spans,
                         .read_ns = own_ns(r, w, i)};
    }
    if (w->reader)
        r->result->info.scatter_ns += one_sided_scatter_ns(w->reader);
    if (w->kernels)
        r->result->info.scatter_ns += device_reader_scatter_ns(w->kernels);
}

/* A path that failed is not tried again on this connection unless it is forced. */
static void demote_peer(read_phase *r, peer *p, const char *why)
{
    char reason[PATH_REASON];
    snprintf(reason, sizeof(reason), "%.250s", why);
    peer_drop_paths(r->client, (size_t)(p - r->client->peers));
    memcpy(p->reason, reason, sizeof(reason));
    p->spoiled = true;
}

static void demote(read_phase *r, const works *w, const fanin_error *why)
{
    for (size_t i = 0; i < w->n_gets; i++) {
        if (w->gets[i].failed)
            demote_peer(r, w->gets[i].peer, w->gets[i].error.message);
    }
    for (size_t i = 0; i < r->cache->n_sources && w->kernels_failed; i++) {
        if (is_ipc(r, i))
            demote_peer(r, peer_of(r, i), why->message);
    }
}

/* A device does not end what it was given: what that may touch stays for good. */
static void leave_to_device(read_phase *r)
{
    r->destination->leak = true;
    r->cache->device = NULL;
    ipc_map_abandon(r->client->ipc);
    device_memory_leave(r->client->devices);
}

static void finish(read_phase *r, works *w, fanin_status status, const fanin_error *why)
{
    /* First: kernels read what lives with the peers' paths. */
    if (!device_reader_destroy(&w->kernels))
        leave_to_device(r);
    seal_checks_destroy(
        &w->checks); /* they read the destination, and tell the streams */
    for (size_t i = 0; w->streams && i < r->cache->n_sources; i++) {
        peer *p = peer_of(r, i);
        connection_set_owing(p->control, false);
        if (!is_stream(r, i))
            continue;
        if (p->stream && !stream_link_stop(p->stream))
            stream_link_destroy(&p->stream);
    }
    if (w->reader && !one_sided_destroy(&w->reader))
        r->destination->leak = true;
    r->final = device_sink_failed(w->sink, NULL);
    if (!device_sink_destroy(&w->sink))
        r->destination->leak = true;
    if (status == FANIN_ERR_TRANSPORT && !r->final)
        demote(r, w, why);
}

fanin_status read_phase_run(read_phase *r, deadline at, fanin_error *error)
{
    works w = {.progress_ns = 0}; /* the first report comes at once */
    fanin_error local = FANIN_ERROR_INIT;
    fanin_error *why =
        error ? error : &local; /* what is to be said of a demoted path */
    r->first_ns = clock_ns();
    fanin_status status = start(r, &w, why);
    if (status == FANIN_OK)
        status = run(r, &w, at, why);
    r->last_ns = clock_ns();
    if (status == FANIN_OK)
        account(r, &w);
    finish(r, &w, status, why);
    free(w.streams);
    free(w.gets);
    free(w.get_source);
    free(w.shards);
    free(w.first_region);
    free(w.done_ns);
    return status;
}
