/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/stream_link.h"

#include "error_set.h"
#include "net/reading_threads.h"
#include "thread.h"
#include <stdlib.h>
#include <string.h>

/* Bytes of sealed streams from which on threads check them. */
#define CHECKS_FROM ((uint64_t)8 << 20)
/* One for a rank's thread, one for the calling one. */
#define BUSY_CPUS 2
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
    bool closed =
        end->link && !stream_link_is_whole(end->link); /* ... while it rested */
    if (closed || end->generation != p->generation)
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
    unsigned thread;   /* that reads it */
    bool told;         /* of its end; that thread's */
} stream_source;

/* What one thread reads. */
typedef struct stream_share {
    struct stream_reading *of;
    unsigned
        thread; /* 0: the calling one, in the client's loop; others in loops of theirs */
    uint64_t inflight;
} stream_share;

typedef struct stream_reading {
    const path_reading *r;
    seal_checks *checks; /* NULL: who receives makes them */
    unsigned n_shares;
    stream_share *shares; /* one a thread */
    stream_source sources[];
} stream_reading;

/* Of a source that this path reads. */
static uint64_t bytes_of(const path_reading *r, size_t source)
{
    const path_plan *p = r->plan;
    return p->reader_of[source] == &stream_reader ? p->plan->ranks[source].bytes : 0;
}

/* Threads cost more than they spare where little comes, and where the ranks and this one have all CPUs
   already. Readers that are several check what they receive, as the CPU's caches have it. */
static void make_checks(stream_reading *s)
{
    uint64_t sealed = 0;
    for (size_t i = 0; i < s->r->plan->n_sources; i++) {
        if (connection_is_sealed(path_source(s->r, i)))
            sealed += bytes_of(s->r, i);
    }
    if (sealed >= CHECKS_FROM && usable_cpus() > BUSY_CPUS && !s->r->sink &&
        s->n_shares == 1)
        s->checks = seal_checks_create(&s->r->client->loop);
}

/* Threads to read with: more than one if there are, or can be made. What goes to devices does so by
   way of the calling thread. */
static unsigned find_threads(const path_reading *r)
{
    fanin_client *client = r->client;
    reading_size size = {.configured = client->config.threads,
                         .window = client->config.max_inflight};
    for (size_t i = 0; i < r->plan->n_sources; i++) {
        size.sources += bytes_of(r, i) > 0;
        size.bytes += bytes_of(r, i);
    }
    size.cpus = usable_cpus();
    if (r->sink || reading_threads_for(&size) == 1)
        return 1;
    if (!client->readers)
        client->readers = reading_threads_create(&client->loop);
    if (!client->readers)
        return 1;
    size.cpus = reading_threads_cpus(client->readers);
    unsigned n = reading_threads_for(&size);
    unsigned others = reading_threads_have(client->readers, n - 1);
    return others + 1 < n ? others + 1 : n;
}

static fanin_status make_shares(stream_reading *s, fanin_error *error)
{
    size_t n = s->r->plan->n_sources;
    unsigned threads = find_threads(s->r);
    uint64_t *bytes = calloc(n + 1, sizeof *bytes);
    unsigned *thread_of = calloc(n + 1, sizeof *thread_of);
    s->shares = calloc(threads, sizeof *s->shares);
    for (size_t i = 0; bytes && i < n; i++)
        bytes[i] = bytes_of(s->r, i);
    bool good = bytes && thread_of && s->shares &&
                reading_threads_share(bytes, n, threads, thread_of);
    for (size_t i = 0; good && i < n; i++)
        s->sources[i].thread = thread_of[i];
    for (unsigned i = 0; good && i < threads; i++)
        s->shares[i] = (stream_share){.of = s, .thread = i};
    s->n_shares = good ? threads : 0;
    free(bytes);
    free(thread_of);
    return good ? FANIN_OK : error_set_memory(error);
}

static loop *loop_of(const stream_reading *s, unsigned thread)
{
    fanin_client *client = s->r->client;
    return thread == 0 ? &client->loop
                       : reading_threads_loop(client->readers, thread - 1);
}

static fanin_status start_source(stream_reading *s, size_t i, const read_list *list,
                                 fanin_error *error)
{
    const path_reading *r = s->r;
    size_t peer = r->plan->peer_of[i];
    stream_source *source = &s->sources[i];
    fanin_status status = stream_open(r->client, peer, true, &source->link, error);
    if (status == FANIN_OK && source->thread > 0)
        status = stream_link_move(source->link, loop_of(s, source->thread), error);
    if (status != FANIN_OK)
        return status;
    source->work =
        (stream_work){.plan = r->plan->plan,
                      .pieces = &r->plan->plan->ranks[i],
                      .list = list,
                      .base = r->base,
                      .need = r->need,
                      .landed = r->landed,
                      .landed_cookie = r->cookie,
                      .devices = r->sink,
                      .checks = s->checks,
                      .inflight = &s->shares[source->thread].inflight,
                      .max_inflight = r->client->config.max_inflight / s->n_shares,
                      .error = FANIN_ERROR_INIT};
    memcpy(source->work.token, r->leases[peer].token, sizeof source->work.token);
    stream_link_start(source->link, &source->work);
    return FANIN_OK;
}

static bool is_done(const stream_source *s)
{
    return s->work.done_requests == s->work.list->n_requests;
}

/* In a thread of its own: sends what its window has room for, tells of each source's end. */
static bool turn(void *cookie)
{
    const stream_share *share = cookie;
    stream_reading *s = share->of;
    bool left = false, tell = false, failed = false;
    for (size_t i = 0; i < s->r->plan->n_sources; i++) {
        stream_source *source = &s->sources[i];
        if (!source->link || source->thread != share->thread || source->told)
            continue;
        stream_link_pump(source->link);
        failed = failed || source->work.failed;
        source->told = failed || is_done(source);
        tell = tell || source->told;
        left = left || !source->told;
    }
    if (tell)
        reading_threads_tell(s->r->client->readers);
    return left && !failed;
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
    fanin_status status = make_shares(s, error);
    if (status == FANIN_OK)
        make_checks(s);
    for (size_t i = 0; i < r->plan->n_sources && status == FANIN_OK; i++) {
        if (r->plan->reader_of[i] == &stream_reader)
            status = start_source(s, i, details[i], error);
    }
    for (unsigned i = 1; i < s->n_shares && status == FANIN_OK; i++)
        reading_threads_go(r->client->readers, i - 1, turn, &s->shares[i]);
    return status;
}

static bool step(void *reading)
{
    stream_reading *s = reading;
    return s->shares[0].inflight == 0 && seal_checks_help(s->checks);
}

static fanin_status check(void *reading, size_t source, bool *done, fanin_error *error)
{
    stream_source *s = &((stream_reading *)reading)->sources[source];
    if (s->work.failed)
        return error_copy(error, &s->work.error);
    *done = is_done(s);
    if (s->thread == 0)
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

/* All links are the calling thread's again, and the client's loop reads them. */
static void take_back(stream_reading *s)
{
    const path_reading *r = s->r;
    if (s->n_shares > 1)
        reading_threads_rest(r->client->readers);
    for (size_t i = 0; i < r->plan->n_sources; i++) {
        stream_source *source = &s->sources[i];
        if (source->link && source->thread > 0)
            (void)stream_link_move(source->link, &r->client->loop, NULL);
    }
}

static bool finish(void *reading)
{
    stream_reading *s = reading;
    take_back(s);
    /* First: they read the destination, and tell the links. */
    seal_checks_destroy(&s->checks);
    for (size_t i = 0; i < s->r->plan->n_sources; i++) {
        if (s->sources[i].link)
            stream_end_work(s->r->client, s->r->plan->peer_of[i]);
    }
    free(s->shares);
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
