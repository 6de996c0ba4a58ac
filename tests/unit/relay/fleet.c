/* SPDX-License-Identifier: Apache-2.0 */
#include "fleet.h"

#include "schedule.h"
#include <stdlib.h>
#include <string.h>

#define RUNS 16
#define PATIENCE 20
#define SIZE 1000000 /* of a unit */
#define LOST_S 5.0   /* after which a silent peer's connection is given up */

enum ask_state { IDLE, ASKED, QUEUED, SENDING, CONFIRMING };

/* What a reader asks of one source. */
typedef struct ask {
    size_t reader, server; /* the server: a reader's number, or that of the trainer */
    size_t source;         /* its number in the reader's schedule */
    enum ask_state state;
    unit_run runs[RUNS];
    size_t n_runs;
    double left, rate; /* bytes; a second */
    double due;        /* ASKED: the request is there; CONFIRMING: the proof */
    double wake;       /* IDLE: when to look again */
    double since;      /* when it was asked */
    bool frozen, gone;
    struct ask *next; /* in the server's queue */
} ask;

typedef struct host {
    double up, down; /* bytes a second */
    double up_left, down_left;
    size_t n_up, n_down;
    ask *first, **last; /* queue */
    size_t sending;
    bool dead, silent;
    /* as a reader */
    schedule *schedule;
    member who;
    ask *asks;
    size_t n_asks;
    uint32_t *ask_of; /* of each other host, 0: it is not read */
    uint8_t *has;
    bool there;
    double began, ended;
} host;

/* The links of a rack to the others. */
typedef struct rack {
    double up_left, down_left;
    size_t n_up, n_down;
} rack;

typedef struct told {
    double at;
    size_t who, unit;
} told;

typedef struct fleet {
    fleet_options o;
    host *hosts; /* the last is the trainer */
    rack *racks; /* of each reader, that of the first in it */
    uint64_t *sizes;
    size_t trainer;
    ask **sending;
    size_t n_sending;
    told *told; /* in the order of time */
    size_t told_first, n_told, told_capacity;
    double now, tick;
    uint64_t random, sent, n_messages;
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
    }
}

static size_t rack_of(const fleet *f, size_t reader)
{
    return f->o.rack > 0 ? reader - reader % f->o.rack : reader;
}

/* The racks' links that it takes. The trainer lies in none. */
static bool crosses(const fleet *f, const ask *a, rack **from, rack **to)
{
    *from = a->server == f->trainer ? NULL : &f->racks[rack_of(f, a->server)];
    *to = &f->racks[rack_of(f, a->reader)];
    return f->o.rack > 0 && *from != *to;
}

static double smaller(double x, double y)
{
    return x < y ? x : y;
}

static double share_of(const fleet *f, const ask *a)
{
    const host *from = &f->hosts[a->server], *to = &f->hosts[a->reader];
    rack *up, *down;
    double share =
        smaller(from->up_left / (double)from->n_up, to->down_left / (double)to->n_down);
    if (!crosses(f, a, &up, &down))
        return share;
    share = smaller(share, down->down_left / (double)down->n_down);
    return up ? smaller(share, up->up_left / (double)up->n_up) : share;
}

/* It is one more on its links, or one less, which takes @p rate of them. */
static void count_flow(fleet *f, const ask *a, int more, double rate)
{
    host *from = &f->hosts[a->server], *to = &f->hosts[a->reader];
    rack *up, *down;
    from->n_up += (size_t)more;
    from->up_left -= rate;
    to->n_down += (size_t)more;
    to->down_left -= rate;
    if (!crosses(f, a, &up, &down))
        return;
    down->n_down += (size_t)more;
    down->down_left -= rate;
    if (up) {
        up->n_up += (size_t)more;
        up->up_left -= rate;
    }
}

static void clear_links(fleet *f)
{
    double link = SIZE / f->o.unit_s * (double)f->o.rack / f->o.spine;
    for (size_t i = 0; i <= f->trainer; i++) {
        host *h = &f->hosts[i];
        h->up_left = h->up;
        h->down_left = h->down;
        h->n_up = h->n_down = 0;
        f->racks[i] = (rack){.up_left = link, .down_left = link};
    }
    for (size_t i = 0; i < f->n_sending; i++) {
        f->sending[i]->frozen = false;
        count_flow(f, f->sending[i], 1, 0);
    }
}

/* Max-min fair, but that shares within three hundredths of each other are one. */
static void share_links(fleet *f)
{
    clear_links(f);
    for (size_t left = f->n_sending; left > 0;) {
        double least = 1e300;
        for (size_t i = 0; i < f->n_sending; i++) {
            if (!f->sending[i]->frozen)
                least = smaller(least, share_of(f, f->sending[i]));
        }
        for (size_t i = 0; i < f->n_sending; i++) {
            ask *a = f->sending[i];
            if (a->frozen)
                continue;
            a->rate = share_of(f, a);
            if (a->rate > least * 1.03)
                continue;
            a->frozen = true;
            left--;
            count_flow(f, a, -1, a->rate);
        }
    }
}

static void flow(fleet *f)
{
    share_links(f);
    size_t kept = 0;
    for (size_t i = 0; i < f->n_sending; i++) {
        ask *a = f->sending[i];
        host *server = &f->hosts[a->server];
        bool stands = server->dead || server->silent || a->state != SENDING;
        if (!stands)
            a->left -= a->rate * f->tick;
        if (a->server == f->trainer && !stands)
            f->sent += (uint64_t)(a->rate * f->tick);
        if (!stands && a->left > 0) {
            f->sending[kept++] = a;
            continue;
        }
        server->sending--;
        if (stands)
            continue;
        a->state = CONFIRMING;
        a->due = f->now + 2 * f->o.latency_s;
    }
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

static void listen(fleet *f)
{
    for (; f->told_first < f->n_told && f->told[f->told_first].at <= f->now;
         f->told_first++) {
        told *t = &f->told[f->told_first];
        for (size_t i = 0; i < f->trainer; i++) {
            host *reader = &f->hosts[i];
            ask *a = &reader->asks[reader->ask_of[t->who]];
            if (!reader->there || a == reader->asks || a->gone)
                continue;
            schedule_has(reader->schedule, a->source, t->unit, false, ns(f->now));
            f->n_messages++;
            a->wake = 0;
        }
    }
}

static void wake_all(host *reader)
{
    for (size_t k = 0; k < reader->n_asks; k++)
        reader->asks[k].wake = 0;
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
    uint64_t wake;
    a->n_runs = schedule_next(reader->schedule, a->source, f->o.batch * SIZE, a->runs,
                              RUNS, ns(f->now), &wake);
    a->wake = wake == UINT64_MAX ? 1e300 : (double)wake / 1e9 - 1000;
    if (a->n_runs == 0)
        return;
    a->left = 0;
    for (size_t r = 0; r < a->n_runs; r++)
        a->left += (double)a->runs[r].count * SIZE;
    a->state = ASKED;
    a->since = f->now;
    a->due = f->now + f->o.latency_s;
}

/* Who is only silent stays in the list. */
static bool is_broken_off(const fleet *f, host *reader, const ask *a,
                          const host *server)
{
    return schedule_break_off(reader->schedule, a->source, ns(f->now)) ||
           (server->silent && f->now - a->since > LOST_S);
}

static void turn(fleet *f, host *reader, ask *a)
{
    const host *server = &f->hosts[a->server];
    if (a->state == IDLE && a->wake <= f->now)
        ask_next(f, reader, a);
    if (a->state == ASKED && a->due <= f->now)
        queue(f, a);
    if (a->state == CONFIRMING && a->due <= f->now) {
        schedule_proven(reader->schedule, a->source, ns(f->now));
        a->state = IDLE;
        a->wake = 0;
        tell_all(f, a->reader, a);
        if (schedule_left(reader->schedule) == 0)
            reader->ended = f->now;
    } else if (a->state != IDLE && server->dead) {
        lose(f, reader, a); /* the connection was reset */
    } else if (a->state != IDLE && a->state != CONFIRMING &&
               is_broken_off(f, reader, a, server)) {
        schedule_failed(reader->schedule, a->source, ns(f->now));
        a->state = IDLE;
        for (size_t u = 0; u < f->o.units; u++) { /* it says anew what it has */
            if (a->source != SCHEDULE_ORIGIN && !server->silent && server->has[u])
                schedule_has(reader->schedule, a->source, u, true, ns(f->now));
        }
        wake_all(reader);
    }
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
               .source = source};
    reader->ask_of[other - f->hosts] = (uint32_t)reader->n_asks++;
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
    reader->asks[0] = (ask){.reader = self, .server = f->trainer};
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
    double link = SIZE / f->o.unit_s;
    f->trainer = n;
    f->random = 88172645463325252u;
    f->hosts = calloc(n + 1, sizeof *f->hosts);
    f->sizes = calloc(f->o.units, sizeof *f->sizes);
    f->racks = calloc(n + 1, sizeof *f->racks);
    f->sending = calloc(n * (n + 1), sizeof *f->sending);
    for (size_t u = 0; u < f->o.units; u++)
        f->sizes[u] = SIZE;
    for (size_t i = 0; i <= n; i++) {
        host *h = &f->hosts[i];
        h->up = i == f->o.slow ? link / f->o.slow_by : link;
        h->down = link;
        h->last = &h->first;
        h->asks = calloc(n + 1, sizeof *h->asks);
        h->ask_of = calloc(n + 1, sizeof *h->ask_of);
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
        free(f->hosts[i].ask_of);
        free(f->hosts[i].has);
    }
    free(f->hosts);
    free(f->racks);
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
        for (size_t k = 0;
             !out && reader->there && reader->ended == 0 && k < reader->n_asks; k++) {
            if (!reader->asks[k].gone)
                turn(f, reader, &reader->asks[k]);
        }
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
                          .models = (double)f.sent / SIZE / (double)options->units};
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
