/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/stream_link.h"

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

static fanin_status make_list(const path_planning *how, size_t source, void **detail,
                              fanin_error *error)
{
    const path_plan *p = how->plan;
    read_list *list = calloc(1, sizeof *list);
    fanin_status status =
        list ? read_list_build(p->plan, source, p->sources[source].boxes,
                               how->publication->keys, how->stop, list, error)
             : error_set_memory(error);
    if (status == FANIN_OK)
        *detail = list;
    else
        free(list);
    return status;
}

static void forget_list(void *detail)
{
    read_list *list = detail;
    if (list) {
        free(list->requests);
        free(list->entries);
    }
    free(list);
}

/* ------------------------------------------------------------------ reading */

typedef struct stream_source {
    stream_work work;
    stream_link *link; /* NULL: another path's */
} stream_source;

typedef struct stream_reading {
    const path_reading *r;
    seal_checks *checks; /* NULL: who receives makes them */
    uint64_t inflight;
    stream_source sources[];
} stream_reading;

/* Threads cost more than they spare where little comes. */
static void make_checks(stream_reading *s)
{
    const path_plan *p = s->r->plan;
    uint64_t bytes = 0;
    for (size_t i = 0; i < p->n_sources; i++) {
        if (p->reader_of[i] == &stream_reader &&
            connection_is_sealed(path_source(s->r, i)))
            bytes += p->plan->ranks[i].bytes;
    }
    if (bytes >= CHECKS_FROM && !s->r->sink)
        s->checks = seal_checks_create(&s->r->client->loop);
}

static fanin_status start_source(stream_reading *s, size_t i, const read_list *list,
                                 fanin_error *error)
{
    const path_reading *r = s->r;
    size_t peer = r->plan->peer_of[i];
    stream_source *source = &s->sources[i];
    fanin_status status = stream_open(r->client, peer, true, &source->link, error);
    if (status != FANIN_OK)
        return status;
    source->work = (stream_work){.plan = r->plan->plan,
                                 .pieces = &r->plan->plan->ranks[i],
                                 .list = list,
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

static fanin_status start(const path_reading *r, void *const *details, void *shared,
                          void **reading, fanin_error *error)
{
    (void)shared;
    stream_reading *s = calloc(1, sizeof *s + r->plan->n_sources * sizeof *s->sources);
    *reading = s;
    if (!s)
        return error_set_memory(error);
    s->r = r;
    make_checks(s);
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < r->plan->n_sources && status == FANIN_OK; i++) {
        if (r->plan->reader_of[i] == &stream_reader)
            status = start_source(s, i, details[i], error);
    }
    return status;
}

static bool step(void *reading)
{
    stream_reading *s = reading;
    return s->inflight == 0 && seal_checks_help(s->checks);
}

static fanin_status check(void *reading, size_t source, bool *done, fanin_error *error)
{
    stream_source *s = &((stream_reading *)reading)->sources[source];
    if (s->work.failed)
        return error_copy(error, &s->work.error);
    *done = s->work.done_requests == s->work.list->n_requests;
    stream_link_pump(s->link);
    return FANIN_OK;
}

static uint64_t bytes(const void *reading, size_t source, bool *waits)
{
    const stream_work *w = &((const stream_reading *)reading)->sources[source].work;
    *waits = w->done_requests < w->next_request;
    return w->bytes;
}

static void account(const void *reading, size_t source, served *out)
{
    const stream_source *s = &((const stream_reading *)reading)->sources[source];
    out->bytes = s->work.bytes;
    out->reads = s->work.done_requests;
    out->connections = stream_link_count(s->link);
}

static bool finish(void *reading)
{
    stream_reading *s = reading;
    /* First: they read the destination, and tell the links. */
    seal_checks_destroy(&s->checks);
    for (size_t i = 0; i < s->r->plan->n_sources; i++) {
        if (s->sources[i].link)
            stream_end_work(s->r->client, s->r->plan->peer_of[i]);
    }
    free(s);
    return true;
}

const path_reader stream_reader = {
    .paths = 1 << FANIN_PATH_STREAM,
    .asks = true,
    .uses_sink = true,
    .probe = probe,
    .plan = make_list,
    .forget = forget_list,
    .start = start,
    .step = step,
    .check = check,
    .bytes = bytes,
    .account = account,
    .finish = finish,
};
