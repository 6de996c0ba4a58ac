/* SPDX-License-Identifier: Apache-2.0 */
#include "read_phase.h"

#include "error_set.h"
#include "stream_link.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PROGRESS_NS 50000000

typedef struct works {
    stream_work *streams; /* one a source; used if the source's path is stream */
    one_sided_work *gets; /* compact: the one-sided sources only */
    size_t *get_source;   /* of each of them */
    size_t n_gets;
    one_sided *reader;
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
                       .landed = r->destination->landed,
                       .landed_cookie = r->destination->cookie,
                       .inflight = &w->inflight,
                       .max_inflight = r->client->config.max_inflight,
                       .error = FANIN_ERROR_INIT};
    memcpy(s->token, r->leases[index].token, sizeof(s->token));
    connection_set_owing(p->control, true);
    stream_link_start(p->stream, s);
    return FANIN_OK;
}

static fanin_status start_gets(read_phase *r, works *w, fanin_error *error)
{
    if (w->n_gets == 0)
        return FANIN_OK;
    const memory_range *ranges = NULL;
    size_t n_ranges = 0;
    r->destination->ranges(r->destination->cookie, &ranges, &n_ranges);
    return one_sided_create(r->client, w->gets, w->n_gets, r->base, ranges, n_ranges,
                            r->destination->landed, r->destination->cookie, &w->reader,
                            error);
}

static fanin_status start(read_phase *r, works *w, fanin_error *error)
{
    size_t n = r->cache->n_sources;
    w->streams = calloc(n + 1, sizeof(*w->streams));
    w->gets = calloc(n + 1, sizeof(*w->gets));
    w->get_source = calloc(n + 1, sizeof(*w->get_source));
    if (!w->streams || !w->gets || !w->get_source)
        return error_set_memory(error);
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < n && status == FANIN_OK; i++) {
        if (is_stream(r, i)) {
            status = start_stream(r, w, i, error);
        } else if (is_needed(r, i)) {
            size_t index = r->cache->peer_of[i];
            w->get_source[w->n_gets] = i;
            w->gets[w->n_gets++] =
                (one_sided_work){.peer = peer_of(r, i),
                                 .rank = r->cache->sources[i].rank,
                                 .shards = &r->publication->shards[index],
                                 .spans = r->cache->spans[i]};
            connection_set_owing(peer_of(r, i)->control, true);
        }
    }
    return status == FANIN_OK ? start_gets(r, w, error) : status;
}

/* ------------------------------------------------------------------- running */

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
        if (s->done_requests == s->list->n_requests)
            connection_set_owing(peer_of(r, i)->control, false);
        else
            *done = false;
        stream_link_pump(peer_of(r, i)->stream);
    }
    return FANIN_OK;
}

static fanin_status check_gets(const works *w, bool *done, fanin_error *error)
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
    }
    return FANIN_OK;
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
    r->options->progress(r->options->progress_cookie, bytes < total ? bytes : total,
                         total);
}

static fanin_status run(read_phase *r, works *w, deadline at, fanin_error *error)
{
    for (;;) {
        bool done = true;
        bool busy = w->reader && one_sided_step(w->reader);
        fanin_status status = check_streams(r, w, &done, error);
        if (status == FANIN_OK)
            status = check_gets(w, &done, error);
        if (status != FANIN_OK || done)
            return status;
        report_progress(r, w);
        if (!busy && w->reader && !one_sided_arm(w->reader))
            busy = true;
        status = client_step(r->client, at, busy ? 0 : UINT64_MAX, "read", error);
        if (status != FANIN_OK)
            return status;
    }
}

/* -------------------------------------------------------------------- ending */

static void account(read_phase *r, const works *w, uint64_t elapsed)
{
    for (size_t i = 0; i < r->cache->n_sources; i++) {
        if (!is_stream(r, i))
            continue;
        r->result->served[r->cache->peer_of[i]] =
            (served){.used = true,
                     .bytes = w->streams[i].bytes,
                     .reads = w->streams[i].done_requests,
                     .read_ns = elapsed,
                     .connections = stream_link_count(peer_of(r, i)->stream)};
    }
    for (size_t i = 0; i < w->n_gets; i++)
        r->result->served[r->cache->peer_of[w->get_source[i]]] =
            (served){.used = true,
                     .bytes = w->gets[i].bytes,
                     .reads = w->gets[i].done_spans,
                     .read_ns = elapsed};
    if (w->reader)
        r->result->info.scatter_ns += one_sided_scatter_ns(w->reader);
}

/* A one-sided path that failed is not tried again on this connection unless it is forced. */
static void demote(read_phase *r, const works *w)
{
    for (size_t i = 0; i < w->n_gets; i++) {
        peer *p = w->gets[i].peer;
        if (!w->gets[i].failed)
            continue;
        char reason[sizeof(p->reason)];
        snprintf(reason, sizeof(reason), "%.150s", w->gets[i].error.message);
        peer_drop_paths(r->client, (size_t)(p - r->client->peers));
        if (r->client->config.path == FANIN_PATH_AUTO) {
            p->path = FANIN_PATH_STREAM;
            memcpy(p->reason, reason, sizeof(reason));
        }
    }
}

static void finish(read_phase *r, works *w, fanin_status status)
{
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
    if (status == FANIN_ERR_TRANSPORT)
        demote(r, w);
}

fanin_status read_phase_run(read_phase *r, deadline at, fanin_error *error)
{
    works w = {.progress_ns = 0}; /* the first report comes at once */
    r->first_ns = clock_ns();
    fanin_status status = start(r, &w, error);
    if (status == FANIN_OK)
        status = run(r, &w, at, error);
    r->last_ns = clock_ns();
    if (status == FANIN_OK)
        account(r, &w, r->last_ns - r->first_ns);
    finish(r, &w, status);
    free(w.streams);
    free(w.gets);
    free(w.get_source);
    return status;
}
