/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/reader_stream.h"

#include "error_set.h"
#include <stdlib.h>
#include <string.h>

/* Bytes of sealed streams from which on threads check them. */
#define CHECKS_FROM ((uint64_t)8 << 20)
/* One connection's window does not fill a network, loopback's does. */
#define REMOTE_CONNECTIONS 4

/* -------------------------------------------------------------- connections */

/* Of one peer. */
struct stream_end {
    stream_link *link;
    uint64_t generation; /* of the connection that it was made for */
};

fanin_status stream_open(fanin_client *client, size_t peer, bool bulk,
                         stream_link **out, fanin_error *error)
{
    const struct peer *p = &client->peers[peer];
    if (!client->streams)
        client->streams = calloc(client->n_peers, sizeof *client->streams);
    if (!client->streams)
        return error_set_memory(error);
    struct stream_end *end = &client->streams[peer];
    if (end->generation != p->generation)
        stream_link_destroy(&end->link);
    end->generation = p->generation;
    unsigned count = bulk ? client->config.streams_per_rank : 1;
    if (count == 0)
        count = connection_is_local(p->control) ? 1 : REMOTE_CONNECTIONS;
    fanin_status status = FANIN_OK;
    if (!end->link)
        status = stream_link_create(client, p->control, count, &end->link, error);
    *out = end->link;
    return status;
}

void stream_end_work(fanin_client *client, size_t peer)
{
    stream_link **link = &client->streams[peer].link;
    if (*link && !stream_link_stop(*link))
        stream_link_destroy(link);
}

void stream_disconnect(fanin_client *client)
{
    for (size_t i = 0; client->streams && i < client->n_peers; i++)
        stream_link_destroy(&client->streams[i].link);
    free(client->streams);
    client->streams = NULL;
}

/* ----------------------------------------------------------------- choosing */

/* What no other path takes is given up to stream; here are those that ask for it. */
static fanin_status probe(path_round *r, bool *open, fanin_error *error)
{
    (void)error;
    for (size_t i = 0; i < r->client->n_peers; i++) {
        if (!open[i] || r->client->config.path != FANIN_PATH_STREAM)
            continue;
        path_set(r, i, FANIN_PATH_STREAM, "asked for");
        open[i] = false;
    }
    return FANIN_OK;
}

/* ----------------------------------------------------------------- planning */

static fanin_status make_lists(const path_planning *how, void **detail,
                               fanin_error *error)
{
    const path_plan *p = how->plan;
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < p->n_sources && status == FANIN_OK; i++) {
        size_t peer = p->peer_of[i];
        if (p->plan->ranks[i].n_pieces == 0 ||
            path_taken(how->publication, peer)->path != FANIN_PATH_STREAM)
            continue;
        if (!*detail)
            *detail = calloc(p->n_sources, sizeof(read_list));
        read_list *lists = *detail;
        if (!lists)
            return error_set_memory(error);
        if (!lists[i].requests)
            status =
                read_list_build(&p->plan->ranks[i], p->sources[i].boxes,
                                how->publication->keys, how->stop, &lists[i], error);
    }
    return status;
}

static void forget_lists(void *detail, size_t n_sources)
{
    read_list *lists = detail;
    for (size_t i = 0; lists && i < n_sources; i++) {
        free(lists[i].requests);
        free(lists[i].entries);
    }
    free(lists);
}

/* ------------------------------------------------------------------ reading */

typedef struct stream_source {
    stream_work work;
    stream_link *link; /* NULL: another path's */
} stream_source;

typedef struct stream_reading {
    const path_reading *r;
    const read_list *lists;
    stream_source *sources;
    seal_checks *checks; /* NULL: who receives makes them */
    uint64_t inflight;
} stream_reading;

/* Threads cost more than they spare where little comes. */
static void make_checks(stream_reading *s)
{
    const path_reading *r = s->r;
    uint64_t bytes = 0;
    for (size_t i = 0; i < r->plan->n_sources; i++) {
        if (r->reader_of[i] == &stream_reader &&
            connection_is_sealed(path_source(r, i)->control))
            bytes += r->plan->plan->ranks[i].bytes;
    }
    if (bytes >= CHECKS_FROM && !r->sink)
        s->checks = seal_checks_create(&r->client->loop);
}

static fanin_status start_source(stream_reading *s, size_t i, fanin_error *error)
{
    const path_reading *r = s->r;
    size_t peer = r->plan->peer_of[i];
    stream_source *source = &s->sources[i];
    fanin_status status = stream_open(r->client, peer, true, &source->link, error);
    if (status != FANIN_OK)
        return status;
    source->work = (stream_work){.plan = r->plan->plan,
                                 .pieces = &r->plan->plan->ranks[i],
                                 .list = &s->lists[i],
                                 .base = r->base,
                                 .need = r->need,
                                 .landed = r->landed,
                                 .landed_cookie = r->cookie,
                                 .devices = r->sink,
                                 .checks = s->checks,
                                 .inflight = &s->inflight,
                                 .max_inflight = r->client->config.max_inflight,
                                 .error = FANIN_ERROR_INIT};
    memcpy(source->work.token, r->leases[peer].token, sizeof source->work.token);
    stream_link_start(source->link, &source->work);
    return FANIN_OK;
}

static fanin_status start(const path_reading *r, void *detail, void **reading,
                          fanin_error *error)
{
    stream_reading *s = calloc(1, sizeof *s);
    *reading = s;
    if (!s)
        return error_set_memory(error);
    s->r = r;
    s->lists = detail;
    s->sources = calloc(r->plan->n_sources, sizeof *s->sources);
    if (!s->sources)
        return error_set_memory(error);
    make_checks(s);
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < r->plan->n_sources && status == FANIN_OK; i++) {
        if (r->reader_of[i] == &stream_reader)
            status = start_source(s, i, error);
    }
    return status;
}

static bool step(void *reading)
{
    stream_reading *s = reading;
    return s->inflight == 0 && seal_checks_help(s->checks);
}

static fanin_status check(void *reading, bool last, bool *done, fanin_error *error)
{
    (void)last;
    stream_reading *s = reading;
    const path_reading *r = s->r;
    for (size_t i = 0; i < r->plan->n_sources; i++) {
        stream_work *w = &s->sources[i].work;
        if (!s->sources[i].link)
            continue;
        if (w->failed) {
            error_copy(error, &w->error);
            return w->status;
        }
        if (w->done_requests == w->list->n_requests) {
            connection_set_owing(path_source(r, i)->control, false);
            path_note_done(r, i);
        } else {
            *done = false;
        }
        stream_link_pump(s->sources[i].link);
    }
    return path_check_ranks(r, &stream_reader, error);
}

static uint64_t bytes(const void *reading)
{
    const stream_reading *s = reading;
    uint64_t sum = 0;
    for (size_t i = 0; i < s->r->plan->n_sources; i++)
        sum += s->sources[i].work.bytes;
    return sum;
}

static uint64_t account(const void *reading)
{
    const stream_reading *s = reading;
    for (size_t i = 0; i < s->r->plan->n_sources; i++) {
        const stream_source *source = &s->sources[i];
        if (!source->link)
            continue;
        s->r->served[s->r->plan->peer_of[i]] =
            (served){.bytes = source->work.bytes,
                     .reads = source->work.done_requests,
                     .connections = stream_link_count(source->link)};
    }
    return 0;
}

static bool finish(void *reading, const fanin_error *why)
{
    (void)why; /* there is no other path to take instead */
    stream_reading *s = reading;
    /* First: they read the destination, and tell the links. */
    seal_checks_destroy(&s->checks);
    for (size_t i = 0; s->sources && i < s->r->plan->n_sources; i++) {
        if (s->sources[i].link)
            stream_end_work(s->r->client, s->r->plan->peer_of[i]);
    }
    free(s->sources);
    free(s);
    return true;
}

const path_reader stream_reader = {
    .paths = 1 << FANIN_PATH_STREAM,
    .asks = true,
    .uses_sink = true,
    .probe = probe,
    .plan = make_lists,
    .forget = forget_lists,
    .start = start,
    .step = step,
    .check = check,
    .bytes = bytes,
    .account = account,
    .finish = finish,
};
