/* SPDX-License-Identifier: Apache-2.0 */
#include "fleet.h"

#include "schedule.h"
#include <stdlib.h>
#include <string.h>

#define RUNS 16
#define PATIENCE 20
#define SIZE 1000000 /* of a unit */
#define LOST_S 5.0   /* after which a silent peer's connection is given up */
#define LOOK_S 0.02  /* how often somebody may be found late */
#define NEVER 1e300

enum ask_state { IDLE, ASKED, QUEUED, SENDING, CONFIRMING };

/* What a reader asks of one source. */
typedef struct ask {
    size_t reader, server; /* the server: a reader's number, or that of the trainer */
    size_t source;         /* its number in the reader's schedule */
    enum ask_state state;
    unit_run runs[RUNS];
    size_t n_runs;
    double left, rate; /* bytes; a second */
    double *at;        /* when something comes of it: of those of its reader */
    double since;      /* when it was asked */
    size_t links[4], n_links;
    bool frozen, gone;
    struct ask *next; /* in the server's queue */
} ask;

/* One way of a host or of a rack. */
typedef struct link {
    double all, left;  /* bytes a second; that no flow has yet */
    size_t n;          /* flows that have none yet */
    size_t first, end; /* its flows in fleet.on */
} link;

typedef struct host {
    ask *first, **last; /* queue */
    size_t sending;
    bool dead, silent;
    /* as a reader */
    schedule *schedule;
    member who;
    ask *asks;
    double *at; /* of each ask */
    size_t n_asks;
    ask **read_by; /* those that ask it */
    size_t n_read_by;
    double looks; /* when it looks next who is late */
    uint8_t *has;
    bool there;
    double began, ended;
} host;

typedef struct told {
    double at;
    size_t who, unit;
} told;

typedef struct fleet {
    fleet_options o;
    host *hosts; /* the last is the trainer */
    link *links; /* of each host up, down; of a rack, as its first reader, up, down */
    size_t n_links;
    uint64_t *sizes;
    size_t trainer;
    ask **sending, **on;
    size_t n_sending;
    bool flows_change;
    told *told; /* in the order of time */
    size_t told_first, n_told, told_capacity;
    double now, tick;
    double sent;
    uint64_t random, n_messages;
} fleet;

static uint64_t draw(fleet *f)
{
    f->random ^= f->random << 13;
    f->random ^= f->random >> 7;
    f->random ^= f->random << 17;
    return f->random;
}

static uint64_t ns(double seconds)
{
    return (uint64_t)((seconds + 1000) * 1e9);
}

/* --------------------------------------------------------------------------- servers */

static void queue(fleet *f, ask *a)
{
    host *server = &f->hosts[a->server];
    if (server->dead || server->silent)
        return; /* a silent one takes requests, and sends nothing */
    a->state = QUEUED;
    a->next = NULL;
    *server->last = a;
    server->last = &a->next;
}

static void serve(fleet *f, host *server)
{
    bool is_trainer = server == &f->hosts[f->trainer];
    size_t most = is_trainer ? f->o.origin_threads : f->o.threads;
    while (server->first && server->sending < most) {
        ask *a = server->first;
        server->first = a->next;
        if (!server->first)
            server->last = &server->first;
        if (a->state != QUEUED)
            continue; /* it was broken off */
        a->state = SENDING;
        server->sending++;
        f->sending[f->n_sending++] = a;
        f->flows_change = true;
    }
}

static size_t rack_of(const fleet *f, size_t reader)
{
    return f->o.rack > 0 ? reader - reader % f->o.rack : reader;
}

static double smaller(double x, double y)
{
    return x < y ? x : y;
}

/* The links that it takes. The trainer lies in no rack. */
static void route(const fleet *f, ask *a)
{
    size_t hosts = f->trainer + 1, to = rack_of(f, a->reader);
    size_t from = a->server == f->trainer ? hosts : rack_of(f, a->server);
    a->links[a->n_links++] = a->server;
    a->links[a->n_links++] = hosts + a->reader;
    if (f->o.rack == 0 || from == to)
        return;
    a->links[a->n_links++] = 3 * hosts + to;
    if (from < hosts)
        a->links[a->n_links++] = 2 * hosts + from;
}

static void sort_flows(fleet *f)
{
    size_t at = 0;
    for (size_t i = 0; i < f->n_links; i++) {
        f->links[i].left = f->links[i].all;
        f->links[i].n = 0;
    }
    for (size_t i = 0; i < f->n_sending; i++)
        for (size_t k = 0; k < f->sending[i]->n_links; k++)
            f->links[f->sending[i]->links[k]].n++;
    for (size_t i = 0; i < f->n_links; i++) {
        f->links[i].first = f->links[i].end = at;
        at += f->links[i].n;
    }
    for (size_t i = 0; i < f->n_sending; i++) {
        ask *a = f->sending[i];
        a->frozen = false;
        for (size_t k = 0; k < a->n_links; k++)
            f->on[f->links[a->links[k]].end++] = a;
    }
}

static double share_of(const link *l)
{
    return l->n > 0 ? l->left / (double)l->n : NEVER;
}

/* Those of the link that have none have theirs now: how many. */
static size_t freeze(fleet *f, const link *l)
{
    size_t n = 0;
    for (size_t i = l->first; i < l->end; i++) {
        ask *a = f->on[i];
        if (a->frozen)
            continue;
        a->frozen = true;
        a->rate = NEVER;
        n++;
        for (size_t k = 0; k < a->n_links; k++)
            a->rate = smaller(a->rate, share_of(&f->links[a->links[k]]));
        for (size_t k = 0; k < a->n_links; k++) {
            f->links[a->links[k]].left -= a->rate;
            f->links[a->links[k]].n--;
        }
    }
    return n;
}

/* Max-min fair, but that shares within three hundredths of each other are one. */
static void share_links(fleet *f)
{
    sort_flows(f);
    for (size_t left = f->n_sending; left > 0;) {
        double least = NEVER;
        for (size_t i = 0; i < f->n_links; i++)
            least = smaller(least, share_of(&f->links[i]));
        for (size_t i = 0; i < f->n_links; i++)
            if (share_of(&f->links[i]) <= least * 1.03)
                left -= freeze(f, &f->links[i]);
    }
    f->flows_change = false;
}

static void flow(fleet *f)
{
    size_t kept = 0;
    if (f->flows_change)
        share_links(f);
    for (size_t i = 0; i < f->n_sending; i++) {
        ask *a = f->sending[i];
        host *server = &f->hosts[a->server];
        bool stands = server->dead || server->silent || a->state != SENDING;
        double comes = smaller(a->left, a->rate * f->tick);
        if (a->server == f->trainer && !stands)
            f->sent += comes;
        if (!stands && comes < a->left) {
            a->left -= comes;
            f->sending[kept++] = a;
            continue;
        }
        server->sending--;
        if (stands)
            continue;
        a->state = CONFIRMING;
        *a->at = f->now + comes / a->rate + 2 * f->o.latency_s;
    }
    f->flows_change = kept < f->n_sending;
    f->n_sending = kept;
}

/* --------------------------------------------------------------------------- readers */

static void tell_all(fleet *f, size_t who, const ask *a)
{
    for (size_t r = 0; r < a->n_runs; r++) {
        for (size_t u = a->runs[r].first; u < a->runs[r].first + a->runs[r].count;
             u++) {
            f->hosts[who].has[u] = 1;
            if (f->n_told == f->told_capacity) {
                f->told_capacity = 2 * f->told_capacity + 64;
                f->told = realloc(f->told, f->told_capacity * sizeof *f->told);
            }
            f->told[f->n_told++] = (told){f->now + f->o.latency_s, who, u};
        }
    }
}

static void wake(ask *a)
{
    if (a->state == IDLE)
        *a->at = 0;
}

static void listen(fleet *f)
{
    for (; f->told_first < f->n_told && f->told[f->told_first].at <= f->now;
         f->told_first++) {
        const told *t = &f->told[f->told_first];
        const host *who = &f->hosts[t->who];
        for (size_t i = 0; i < who->n_read_by; i++) {
            ask *a = who->read_by[i];
            if (a->gone)
                continue;
            schedule_has(f->hosts[a->reader].schedule, a->source, t->unit, false,
                         ns(f->now));
            f->n_messages++;
            wake(a);
        }
    }
    if (f->told_first == f->n_told)
        f->told_first = f->n_told = 0;
}

static void wake_all(host *reader)
{
    for (size_t k = 0; k < reader->n_asks; k++)
        wake(&reader->asks[k]);
}

static void lose(fleet *f, host *reader, ask *a)
{
    schedule_leave(reader->schedule, a->source);
    a->gone = true;
    a->state = IDLE;
    wake_all(reader);
    member all[4096];
    size_t n = 0;
    for (size_t i = 0; i < f->trainer; i++) {
        if (f->hosts[i].there && !f->hosts[i].dead && !f->hosts[i].silent)
            all[n++] = f->hosts[i].who;
    }
    schedule_list(reader->schedule, all, n, ns(f->now));
}

static void ask_next(fleet *f, host *reader, ask *a)
{
    uint64_t wake_ns;
    a->n_runs = schedule_next(reader->schedule, a->source, f->o.batch * SIZE, a->runs,
                              RUNS, ns(f->now), &wake_ns);
    *a->at = wake_ns == UINT64_MAX ? NEVER : (double)wake_ns / 1e9 - 1000;
    if (a->n_runs == 0)
        return;
    a->left = 0;
    for (size_t r = 0; r < a->n_runs; r++)
        a->left += (double)a->runs[r].count * SIZE;
    a->state = ASKED;
    a->since = f->now;
    *a->at = f->now + f->o.latency_s;
}

/* Who is only silent stays in the list. */
static bool is_broken_off(const fleet *f, host *reader, const ask *a,
                          const host *server)
{
    return schedule_break_off(reader->schedule, a->source, ns(f->now)) ||
           (server->silent && f->now - a->since > LOST_S);
}

static void confirm(fleet *f, host *reader, ask *a)
{
    schedule_read(reader->schedule, a->source, a->runs, a->n_runs, ns(f->now));
    schedule_confirmed(reader->schedule, a->source, a->runs, a->n_runs, ns(f->now));
    a->state = IDLE;
    *a->at = 0;
    tell_all(f, a->reader, a);
    if (schedule_left(reader->schedule) == 0)
        reader->ended = f->now;
}

static void turn(fleet *f, host *reader, ask *a)
{
    bool is_due = *a->at <= f->now;
    if (a->state == IDLE && is_due) {
        ask_next(f, reader, a);
    } else if (a->state == ASKED && is_due) {
        *a->at = NEVER;
        queue(f, a);
    } else if (a->state == CONFIRMING && is_due) {
        confirm(f, reader, a);
    }
}

/* Likewise, but it is not due. */
static void look(fleet *f, host *reader, ask *a)
{
    const host *server = &f->hosts[a->server];
    if (a->state == IDLE || a->state == CONFIRMING)
        return;
    if (server->dead) {
        lose(f, reader, a); /* the connection was reset */
    } else if (is_broken_off(f, reader, a, server)) {
        schedule_failed(reader->schedule, a->source, ns(f->now));
        a->state = IDLE;
        for (size_t u = 0; u < f->o.units; u++) { /* it says anew what it has */
            if (a->source != SCHEDULE_ORIGIN && !server->silent && server->has[u])
                schedule_has(reader->schedule, a->source, u, true, ns(f->now));
        }
        wake_all(reader);
    }
}

/* Whoever is due, and now and then whoever may be late. */
static void turn_all(fleet *f, host *reader)
{
    bool looks = f->now >= reader->looks;
    for (size_t k = 0; k < reader->n_asks && reader->ended == 0; k++) {
        ask *a = &reader->asks[k];
        if (!a->gone && reader->at[k] <= f->now)
            turn(f, reader, a);
        if (!a->gone && looks)
            look(f, reader, a);
    }
    if (looks)
        reader->looks = f->now + LOOK_S;
}

static bool is_near(const fleet *f, const host *a, const host *b)
{
    return f->o.rack > 0 && !f->o.unsaid &&
           rack_of(f, (size_t)(a - f->hosts)) == rack_of(f, (size_t)(b - f->hosts));
}

static void meet(fleet *f, host *reader, host *other)
{
    ask *a = &reader->asks[reader->n_asks];
    size_t source = schedule_join(reader->schedule, &other->who,
                                  is_near(f, reader, other) ? NEAR_RACK : NEAR_SITE);
    *a = (ask){.reader = (size_t)(reader - f->hosts),
               .server = (size_t)(other - f->hosts),
               .source = source,
               .at = &reader->at[reader->n_asks++]};
    route(f, a);
    other->read_by[other->n_read_by++] = a;
    for (size_t u = 0; u < f->o.units; u++) {
        if (other->has[u])
            schedule_has(reader->schedule, source, u, true, ns(f->now));
    }
}

static void come(fleet *f, host *reader)
{
    size_t self = (size_t)(reader - f->hosts);
    reader->there = true;
    reader->began = f->now;
    reader->schedule = schedule_create(f->sizes, f->o.units, &reader->who, ns(f->now));
    reader->asks[0] = (ask){.reader = self, .server = f->trainer, .at = reader->at};
    route(f, reader->asks);
    reader->n_asks = 1;
}

/* Everybody has one list. */
static void list_all(fleet *f)
{
    member *all = calloc(f->trainer, sizeof *all);
    size_t n = 0;
    for (size_t i = 0; i < f->trainer; i++) {
        if (f->hosts[i].there)
            all[n++] = f->hosts[i].who;
    }
    for (size_t i = 0; i < f->trainer; i++) {
        host *other = &f->hosts[i];
        if (other->there)
            schedule_list(other->schedule, all, n, ns(f->now));
    }
    free(all);
}

/* The holders that it reads from: all, or those that follow in a ring. */
static void befriend(fleet *f, host *reader)
{
    size_t self = (size_t)(reader - f->hosts), n = f->trainer;
    size_t want = f->o.neighbours > 0 ? f->o.neighbours : n;
    for (size_t i = 1; i < n && reader->n_asks <= want; i++) {
        host *other = &f->hosts[(self + i) % n];
        if (other->there)
            meet(f, reader, other);
    }
}

/* ------------------------------------------------------------------------------- run */

static void set_up(fleet *f)
{
    size_t n = f->o.readers;
    double one = SIZE / f->o.unit_s;
    f->trainer = n;
    f->random = 88172645463325252u;
    f->hosts = calloc(n + 1, sizeof *f->hosts);
    f->sizes = calloc(f->o.units, sizeof *f->sizes);
    f->sending = calloc(n * (n + 1), sizeof *f->sending);
    f->on = calloc(4 * n * (n + 1), sizeof *f->on);
    f->n_links = (f->o.rack > 0 ? 4 : 2) * (n + 1);
    f->links = calloc(4 * (n + 1), sizeof *f->links);
    for (size_t u = 0; u < f->o.units; u++)
        f->sizes[u] = SIZE;
    for (size_t i = 0; i <= n; i++) {
        host *h = &f->hosts[i];
        f->links[i].all = i == f->o.slow ? one / f->o.slow_by : one;
        f->links[n + 1 + i].all = one;
        f->links[2 * (n + 1) + i].all = f->links[3 * (n + 1) + i].all =
            one * (double)f->o.rack / f->o.spine;
        h->last = &h->first;
        h->asks = calloc(n + 1, sizeof *h->asks);
        h->at = calloc(n + 1, sizeof *h->at);
        h->read_by = calloc(n + 1, sizeof(ask *));
        h->has = calloc(f->o.units, 1);
        for (size_t b = 0; b < sizeof h->who.id; b++)
            h->who.id[b] = (uint8_t)draw(f);
    }
    for (size_t i = 0; i < n; i++) {
        if (i != f->o.late)
            come(f, &f->hosts[i]);
    }
    list_all(f);
    for (size_t i = 0; i < n; i++) {
        if (i != f->o.late)
            befriend(f, &f->hosts[i]);
    }
}

static void tear_down(fleet *f)
{
    for (size_t i = 0; i <= f->trainer; i++) {
        schedule_free(f->hosts[i].schedule);
        free(f->hosts[i].asks);
        free(f->hosts[i].at);
        free(f->hosts[i].read_by);
        free(f->hosts[i].has);
    }
    free(f->hosts);
    free(f->links);
    free(f->on);
    free(f->sizes);
    free(f->sending);
    free(f->told);
}

static void strike(fleet *f, double one)
{
    if (f->now < f->o.at * one)
        return;
    if (f->o.dead < f->trainer)
        f->hosts[f->o.dead].dead = true;
    if (f->o.silent < f->trainer)
        f->hosts[f->o.silent].silent = true;
    if (f->o.late < f->trainer && !f->hosts[f->o.late].there) {
        host *late = &f->hosts[f->o.late];
        come(f, late);
        list_all(f);
        befriend(f, late);
        for (size_t i = 0; i < f->trainer; i++) {
            if (f->hosts[i].there && &f->hosts[i] != late && f->o.neighbours == 0)
                meet(f, &f->hosts[i], late);
        }
    }
}

static bool one_tick(fleet *f)
{
    size_t running = 0;
    listen(f);
    for (size_t i = 0; i < f->trainer; i++) {
        host *reader = &f->hosts[i];
        bool out = reader->dead || reader->silent;
        running += !out && reader->ended == 0;
        if (!out && reader->there)
            turn_all(f, reader);
    }
    for (size_t i = 0; i <= f->trainer; i++)
        serve(f, &f->hosts[i]);
    flow(f);
    return running > 0;
}

fleet_options fleet_defaults(void)
{
    return (fleet_options){
        .readers = 8,
        .units = 512,
        .ticks = 32,
        .threads = SIZE_MAX,
        .origin_threads = SIZE_MAX,
        .spine = 1,
        .batch = 1,
        .unit_s = 0.01,
        .latency_s = 0.0002,
        .slow = FLEET_NOBODY,
        .dead = FLEET_NOBODY,
        .silent = FLEET_NOBODY,
        .late = FLEET_NOBODY,
        .slow_by = 10,
        .at = 0.4,
    };
}

bool fleet_run(const fleet_options *options, fleet_result *out)
{
    fleet f = {.o = *options};
    double one = options->unit_s * (double)options->units;
    f.tick = options->unit_s / options->ticks;
    set_up(&f);
    while (one_tick(&f) && f.now < PATIENCE * one) {
        f.now += f.tick;
        strike(&f, one);
    }
    *out = (fleet_result){.told = f.n_messages,
                          .models = f.sent / SIZE / (double)options->units};
    for (size_t i = 0; i < f.trainer; i++) {
        const host *h = &f.hosts[i];
        double took = (h->ended - h->began) / one;
        if (i == options->late)
            out->late = took;
        else if (took > out->times && !h->dead && !h->silent)
            out->times = took;
    }
    bool all = f.now < PATIENCE * one;
    tear_down(&f);
    return all;
}
