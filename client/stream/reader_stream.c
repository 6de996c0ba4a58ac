/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/stream_link.h"

#include "error_set.h"
#include "net/threads.h"
#include "thread.h"
#include <stdlib.h>
#include <string.h>

/* --------------------------------------------------- connections to peers */

/* The data connections that a client keeps to its ranks. */

/* Of one peer. */
struct stream_end {
    stream_link *link;
    uint64_t generation; /* of the connection that it was made for */
};

/* NULL: there are none, or none that are of use. */
static stream_link *find_link(const fanin_client *client, size_t peer)
{
    const struct stream_end *end = client->streams ? &client->streams[peer] : NULL;
    bool is_current = end && end->generation == client->peers[peer].generation;
    /* They may have been closed while they rested. */
    return is_current && end->link && stream_link_is_whole(end->link) ? end->link
                                                                      : NULL;
}

bool stream_at_hand(const fanin_client *client, size_t peer)
{
    const stream_link *link = find_link(client, peer);
    return link && stream_link_is_made(link);
}

fanin_status stream_open(fanin_client *client, size_t peer, unsigned count,
                         stream_link **out, fanin_error *error)
{
    const struct peer *p = &client->peers[peer];
    fanin_status status = FANIN_OK;
    *out = find_link(client, peer);
    if (!client->streams)
        client->streams = calloc(client->n_peers, sizeof *client->streams);
    if (!client->streams)
        return error_set_memory(error);
    struct stream_end *end = &client->streams[peer];
    end->generation = p->generation;
    if (!*out)
        stream_link_destroy(&end->link);
    if (!end->link)
        status = stream_link_create(client, p->control, 1, &end->link, error);
    fanin_error why = FANIN_ERROR_INIT;
    *out = end->link;
    if (status != FANIN_OK || stream_link_widen(end->link, count, &why) == FANIN_OK ||
        client->config.streams_per_rank == 0)
        return status; /* more are faster; one does */
    return error_copy(error, &why);
}

void stream_end_work(fanin_client *client, size_t peer)
{
    stream_link **link = &client->streams[peer].link;
    if (*link && !stream_link_stop(*link))
        stream_link_destroy(link);
}

/* Closes those of all peers. */
static void stream_disconnect(fanin_client *client)
{
    for (size_t i = 0; client->streams && i < client->n_peers; i++)
        stream_link_destroy(&client->streams[i].link);
    free(client->streams);
    client->streams = NULL;
}

/* Shaking hands takes as long as so many bytes. */
#define HANDSHAKE_BYTES ((uint64_t)1 << 20)
/* What all others have when one connection to each rank is made, beside as long again. */
#define LATE_MS 100

/* ----------------------------------------------------------------- choosing */

/* What no other path takes is given up to stream; here are those that ask for it. */
static fanin_status probe(path_round *r, bool *open, fanin_error *error)
{
    (void)error;
    for (size_t i = 0; i < r->client->n_peers; i++) {
        if (!open[i] || r->client->forced != &stream_reader)
            continue;
        path_set(r, i, &stream_reader, "asked for");
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
    uint64_t threads;  /* that read it, a bit each */
    atomic_bool told;  /* of its end */
} stream_source;

/* What one thread reads: the calling one, number 0, in the client's loop; others in loops of
   theirs. */
typedef struct reader_thread {
    stream_share share;
    struct stream_reading *of;
    uint64_t bit;
    unsigned made; /* connections, as it has told */
} reader_thread;

typedef struct stream_reading {
    const path_reading *r;
    unsigned n_threads;
    reader_thread *threads;
    stream_source sources[];
} stream_reading;

/* Of a source that this path reads. */
static uint64_t bytes_of_works(const path_reading *r, size_t source)
{
    const path_plan *p = r->plan;
    return p->reader_of[source] == &stream_reader ? p->plan->ranks[source].bytes : 0;
}

/* Connections that a rank has at most, as far as this client wants them. @p ciphered_here: by TLS,
   on this host. */
static unsigned most_connections(const fanin_client *client, bool ciphered_here)
{
    const fanin_client_config *config = &client->config;
    bool few = ciphered_here && config->threads == 0;
    return config->streams_per_rank > 0
               ? config->streams_per_rank
               : reading_connections_for(few ? usable_cpus() : 0, few);
}

/* Data connections to a rank that @p threads read. */
static unsigned connections_for(const fanin_client *client, size_t peer,
                                unsigned threads)
{
    bool here = client->peers[peer].control->local;
    return client->config.streams_per_rank == 0 && here
               ? threads
               : most_connections(client, false);
}

/* Whether some of it is: one launch has one way to each host. */
static bool is_ciphered_here(const path_reading *r)
{
    for (size_t i = 0; i < r->plan->n_sources; i++) {
        const connection *c = r->client->peers[r->plan->peer_of[i]].control;
        if (bytes_of_works(r, i) > 0 && connection_tls(c) && c->local)
            return true;
    }
    return false;
}

/* What a source costs to read, as bytes: handshakes of connections that there are not yet are
   computed, too. */
static uint64_t cost_of(const path_reading *r, size_t source)
{
    size_t peer = r->plan->peer_of[source];
    uint64_t bytes = bytes_of_works(r, source), handshakes = 0;
    if (connection_tls(path_source(r, source)) && !stream_at_hand(r->client, peer))
        handshakes = connections_for(r->client, peer, 1);
    return bytes > 0 ? bytes + handshakes * HANDSHAKE_BYTES : 0;
}

/* Threads to read with: more than one if there are, or can be made. */
static unsigned find_reading_threads(const path_reading *r, const uint64_t *costs,
                                     unsigned most)
{
    fanin_client *client = r->client;
    reading_size size = {.configured = client->config.threads,
                         .window = client->config.max_inflight};
    for (size_t i = 0; i < r->plan->n_sources; i++) {
        size.sources += costs[i] > 0 ? most : 0;
        size.bytes += costs[i];
    }
    size.cpus = usable_cpus();
    /* What goes to devices does so by way of the calling thread. */
    if (memory_range_on_devices(r->ranges, r->n_ranges) ||
        reading_threads_for(&size) == 1)
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

static loop *loop_of(fanin_client *client, unsigned thread)
{
    return thread == 0 ? &client->loop
                       : reading_threads_loop(client->readers, thread - 1);
}

static fanin_status deal_to_threads(stream_reading *s, const uint64_t *costs,
                                    uint64_t *threads_of, fanin_error *error)
{
    fanin_client *client = s->r->client;
    unsigned most = most_connections(client, is_ciphered_here(s->r));
    unsigned n = find_reading_threads(s->r, costs, most);
    s->threads = calloc(n, sizeof *s->threads);
    if (!s->threads ||
        !reading_threads_share(costs, s->r->plan->n_sources, n, most, threads_of))
        return error_set_memory(error);
    for (size_t i = 0; i < s->r->plan->n_sources; i++)
        s->sources[i].threads = threads_of[i];
    for (unsigned i = 0; i < n; i++)
        s->threads[i] =
            (reader_thread){.share = {.loop = loop_of(client, i),
                                      .max_inflight = client->config.max_inflight / n},
                            .of = s,
                            .bit = UINT64_C(1) << i};
    s->n_threads = n;
    return FANIN_OK;
}

/* Who reads what. */
static fanin_status make_threads(stream_reading *s, fanin_error *error)
{
    size_t n = s->r->plan->n_sources;
    uint64_t *costs = calloc(n + 1, sizeof *costs);
    uint64_t *threads_of = calloc(n + 1, sizeof *threads_of);
    for (size_t i = 0; costs && i < n; i++)
        costs[i] = cost_of(s->r, i);
    fanin_status status = costs && threads_of
                              ? deal_to_threads(s, costs, threads_of, error)
                              : error_set_memory(error);
    free(costs);
    free(threads_of);
    return status;
}

/* Its connections to those that read it, in turn. */
static fanin_status deal_connections(stream_reading *s, stream_source *source,
                                     fanin_error *error)
{
    fanin_status status = FANIN_OK;
    unsigned n = stream_link_count(source->link), thread = s->n_threads;
    for (unsigned i = 0; i < n && status == FANIN_OK; i++) {
        do
            thread = thread + 1 < s->n_threads ? thread + 1 : 0;
        while (!(source->threads & s->threads[thread].bit));
        status = stream_link_deal(source->link, i, &s->threads[thread].share, error);
    }
    return status;
}

/* By those that are there, and @p count at least. */
static fanin_status start_source(stream_reading *s, size_t i, unsigned count,
                                 const read_list *list, fanin_error *error)
{
    const path_reading *r = s->r;
    size_t peer = r->plan->peer_of[i];
    stream_source *source = &s->sources[i];
    fanin_status status = stream_open(r->client, peer, count, &source->link, error);
    if (status == FANIN_OK)
        status = deal_connections(s, source, error);
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
                                 .error = FANIN_ERROR_INIT};
    if (r->leases)
        memcpy(source->work.token, r->leases[peer].token, sizeof source->work.token);
    stream_link_start(source->link, &source->work, &s->threads[0].share);
    return FANIN_OK;
}

static bool is_done(const stream_source *s)
{
    const stream_work *w = &s->work;
    return w->list ? w->done_requests == w->list->n_requests
                   : w->made + w->given_up >= stream_link_count(s->link);
}

/* In a thread of its own: sends what its window has room for, tells of each source's end, the first
   who sees it. */
static bool take_stream_turn(void *cookie, deadline *wake)
{
    reader_thread *t = cookie;
    stream_reading *s = t->of;
    bool left = false, tell = false, failed = false;
    unsigned made = 0;
    for (size_t i = 0; i < s->r->plan->n_sources; i++) {
        stream_source *source = &s->sources[i];
        if (!source->link || !(source->threads & t->bit))
            continue;
        made += source->work.made;
        if (source->told)
            continue;
        stream_link_look(source->link, &t->share, wake);
        stream_link_pump(source->link, &t->share);
        failed = failed || source->work.failed;
        bool ended = failed || is_done(source);
        tell = (ended && !atomic_exchange(&source->told, true)) || tell;
        left = left || !ended;
    }
    if (tell || made != t->made)
        reading_threads_tell(s->r->client->readers);
    t->made = made;
    return left && !failed;
}

/* @p details: NULL: nothing is read. @p all: other paths' sources are started as well. */
static fanin_status start_sources(stream_reading *s, void *const *details, bool all,
                                  fanin_error *error)
{
    const path_reading *r = s->r;
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < r->plan->n_sources && status == FANIN_OK; i++) {
        const path_reader *reader = r->plan->reader_of[i];
        unsigned n = 1, threads = (unsigned)__builtin_popcountll(s->sources[i].threads);
        if (reader == &stream_reader)
            n = connections_for(r->client, r->plan->peer_of[i], threads);
        if (reader == &stream_reader || (reader && all))
            status = start_source(s, i, n, details ? details[i] : NULL, error);
    }
    for (unsigned i = 1; i < s->n_threads && status == FANIN_OK; i++)
        reading_threads_go(r->client->readers, i - 1, take_stream_turn, &s->threads[i]);
    return status;
}

static stream_reading *create_reading(const path_reading *r, fanin_error *error)
{
    stream_reading *s = calloc(1, sizeof *s + r->plan->n_sources * sizeof *s->sources);
    if (s)
        s->r = r;
    else
        error_set_memory(error);
    return s;
}

static fanin_status start(const path_reading *r, void *const *details, void *shared,
                          void **reading, fanin_error *error)
{
    (void)shared;
    stream_reading *s = create_reading(r, error);
    *reading = s;
    if (!s)
        return FANIN_ERR_MEMORY;
    fanin_status status = make_threads(s, error);
    return status == FANIN_OK ? start_sources(s, details, false, error) : status;
}

static bool busy(void *reading, deadline *wake)
{
    stream_reading *s = reading;
    bool failed = false;
    for (size_t i = 0; i < s->r->plan->n_sources; i++) {
        stream_source *source = &s->sources[i];
        if (!source->link || !(source->threads & s->threads[0].bit))
            continue;
        stream_link_look(source->link, &s->threads[0].share, wake);
        failed = failed || source->work.failed;
    }
    return failed; /* which is told at once */
}

static fanin_status check(void *reading, size_t source, bool *done, fanin_error *error)
{
    const stream_reading *all = reading;
    const stream_source *s = &all->sources[source];
    if (s->work.failed)
        return error_copy(error, &s->work.error);
    *done = is_done(s);
    if (s->threads & all->threads[0].bit)
        stream_link_pump(s->link, &all->threads[0].share);
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
    if (s->n_threads > 1)
        reading_threads_rest(r->client->readers);
    for (size_t i = 0; i < r->plan->n_sources; i++) {
        if (s->sources[i].link)
            stream_link_gather(s->sources[i].link);
    }
}

static bool finish(void *reading)
{
    stream_reading *s = reading;
    take_back(s);
    for (size_t i = 0; i < s->r->plan->n_sources; i++) {
        if (s->sources[i].link)
            stream_end_work(s->r->client, s->r->plan->peer_of[i]);
    }
    free(s->threads);
    free(s);
    return true;
}

/* --------------------------------------------------------------- connecting */

/* Whether a rank that is needed has no connection that is made. */
static bool lacks_any(const path_reading *r, bool all)
{
    bool lacks = false;
    for (size_t i = 0; i < r->plan->n_sources; i++) {
        const path_reader *reader = r->plan->reader_of[i];
        if (reader == &stream_reader || (reader && all))
            lacks = lacks || !stream_at_hand(r->client, r->plan->peer_of[i]);
    }
    return lacks;
}

/* *some: a connection to each rank is made; *done: nothing more is to come. */
static fanin_status look_at_links(const stream_reading *s, bool *some, bool *done,
                                  fanin_error *error)
{
    *some = *done = true;
    for (size_t i = 0; i < s->r->plan->n_sources; i++) {
        const stream_source *source = &s->sources[i];
        const connection *c = path_source(s->r, i);
        if (!source->link)
            continue;
        if (source->work.failed)
            return error_copy(error, &source->work.error);
        if (c->state != CONNECTION_READY)
            return error_copy(error, &c->fault);
        *some = *some && source->work.made > 0;
        *done = *done && is_done(source);
    }
    return FANIN_OK;
}

/* Who is silent meanwhile holds the pull up: ranks without a connection, and once there are none,
   those with some that are still to come. */
static void set_links_owing(const stream_reading *s, bool some)
{
    for (size_t i = 0; i < s->r->plan->n_sources; i++) {
        const stream_source *source = &s->sources[i];
        if (source->link)
            connection_set_owing(path_source(s->r, i),
                                 some ? !is_done(source) : source->work.made == 0);
    }
}

static fanin_status wait_for_them(stream_reading *s, deadline at, fanin_error *error)
{
    uint64_t began = clock_ns();
    deadline until = UINT64_MAX;
    for (;;) {
        bool some, done;
        deadline wake = UINT64_MAX;
        (void)busy(s, &wake);
        fanin_status status = look_at_links(s, &some, &done, error);
        if (some && until == UINT64_MAX)
            until = deadline_in_ms(LATE_MS) + (clock_ns() - began);
        if (status != FANIN_OK || done || deadline_passed(until))
            return status;
        set_links_owing(s, some);
        status = client_step(s->r->client, at, deadline_sooner(wake, until), "connect",
                             error);
        if (status != FANIN_OK)
            return status;
    }
}

fanin_status stream_connect(const path_reading *r, bool all, deadline at,
                            fanin_error *error)
{
    uint64_t began = clock_ns();
    if (!lacks_any(r, all))
        return FANIN_OK;
    stream_reading *s = create_reading(r, error);
    if (!s)
        return FANIN_ERR_MEMORY;
    fanin_status status = make_threads(s, error);
    if (status == FANIN_OK)
        status = start_sources(s, NULL, all, error);
    if (status == FANIN_OK)
        status = wait_for_them(s, at, error);
    for (size_t i = 0; i < r->plan->n_sources; i++)
        connection_set_owing(path_source(r, i), false);
    (void)finish(s);
    span_of_call(r->client, TRACE_CONNECT, began, status, NULL);
    return status;
}

static fanin_checksums guard(const connection *c)
{
    if (c->is_unix)
        return FANIN_CHECKSUMS_LOCAL;
    return c->in.sealed || connection_tls(c) ? FANIN_CHECKSUMS_ALL
                                             : FANIN_CHECKSUMS_NONE;
}

const path_reader stream_reader = {
    .name = "stream",
    .number = FANIN_PATH_STREAM,
    .is_fallback = true,
    .is_linked = true,
    .disconnect = stream_disconnect,
    .guard = guard,
    .asks = true,
    .uses_sink = true,
    .probe = probe,
    .plan = make_list,
    .forget = forget_list,
    .start = start,
    .check = check,
    .busy = busy,
    .bytes = bytes,
    .account = account,
    .finish = finish,
};
