/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/rank_watch.h"

#include <inttypes.h>
#include <stdlib.h>

#define MS UINT64_C(1000000)
#define TELL_NS (50 * MS)   /* who asked to be told */
#define LOOK_NS (1000 * MS) /* nobody did: for the log alone */
#define SLOW_NS (1000 * MS) /* from when on a rank holds a pull up */
#define LOG_NS                                                                         \
    (5000 * MS) /* and from when on the log says so; then at twice the time each */

/* One rank in this read. */
typedef struct watched {
    uint64_t bytes;    /* brought */
    uint64_t since_ns; /* it has owed some, and brought none; 0: it owes none */
    uint64_t log_ns;   /* how long that lasts when the log says it next */
} watched;

struct rank_watch {
    const path_reading *reading;
    read_progress *progress;
    const fanin_pull_options *options;
    uint64_t look_ns; /* when to look again */
    watched *of_peer;
    /* what is told, of those that the whole is read from */
    fanin_rank_progress *ranks;
    const fanin_rank_progress **list;
};

rank_watch *rank_watch_create(const path_reading *r, read_progress *progress,
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

void rank_watch_destroy(rank_watch **w)
{
    if (!*w)
        return;
    free((*w)->of_peer);
    free((*w)->ranks);
    free((void *)(*w)->list);
    free(*w);
    *w = NULL;
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
static const fanin_rank_progress *describe(rank_watch *w, size_t source, uint64_t now)
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
                              .rank = (int32_t)connection_peer(c)->rank,
                              .path = path ? path->number : FANIN_PATH_AUTO,
                              .address = connection_text(c),
                              .bytes_done = done < total ? done : total,
                              .bytes_total = total,
                              .quiet_ms = since ? (now - since) / MS : 0};
    return &w->ranks[source];
}

/* The rank that has brought nothing for longest, and long enough to say so. */
static fanin_pull_progress gather(rank_watch *w, uint64_t now)
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
        const fanin_rank_progress *r = describe(w, i, now);
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

void rank_watch_look(rank_watch *w, void *const *readings, deadline *wake)
{
    const fanin_pull_options *o = w->options;
    bool asked = o->progress || o->rank_progress;
    uint64_t now = clock_ns();
    if (now >= w->look_ns) {
        watch(w, readings, now);
        const fanin_pull_progress p = gather(w, now);
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
