/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The threads that read. Each has a client and at most one session, asks the schedule what to read,
 * reads it, has it confirmed, and proves it in the relay's own server. A source that fails is left
 * alone for a while, and begun anew.
 */
#include "inside.h"

#include "array.h"
#include "error_set.h"
#include "handing.h"
#include "text.h"
#include "thread.h"
#include "trace.h"
#include "wake.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BATCH_NS (5 * MS) /* what comes over a network at a time takes about so long */
/* A read of other memory costs about as much whatever it brings, so it brings much; but not all of
   a duty, so that others begin early. */
#define BATCH_MOST ((uint64_t)384 << 20)
#define BATCHES_LEAST 4
#define GATHER_NS (3 * MS) /* what a holder has, but for less, waits for more */
#define AGAIN_NS (20 * MS) /* who is not in the list yet is asked so often */
#define PARKED_MS 5000 /* a request for what has landed waits so long at the holder */

/* ----------------------------------------------------------------------------- waking */

void feeds_wake(attempt *a)
{
    pthread_mutex_lock(&a->feeds_lock);
    if (a->origin.started && !a->origin.ended)
        wake_up(a->origin.wake.fd);
    for (size_t i = 0; i < a->n_holders; i++) {
        if (!a->holders[i]->ended)
            wake_up(a->holders[i]->wake.fd);
    }
    pthread_mutex_unlock(&a->feeds_lock);
}

static bool is_feed_stopped(feed *f)
{
    return atomic_load(&f->stop);
}

/* Whether it still owes what it was broken off for. */
static bool is_broken_off(feed *f)
{
    pthread_mutex_lock(&f->of->relay->lock);
    bool broken = schedule_is_broken(f->of->schedule, f->number);
    pthread_mutex_unlock(&f->of->relay->lock);
    return broken;
}

/* Until something happens, or the time. What a break-off was for may have come before it. */
static fanin_status wait_on(feed *f, deadline until, fanin_error *error)
{
    fanin_status status = client_step(f->client, f->of->at, until, "wait", error);
    bool over = is_feed_stopped(f) || is_broken_off(f);
    return status == FANIN_ERR_CANCELLED && !over ? FANIN_OK : status;
}

/* ----------------------------------------------------------------------- what it brings */

static bool is_origin(const feed *f)
{
    return f->number == SCHEDULE_ORIGIN;
}

/* The next batch is what would have come in some milliseconds. */
static void learn_batch(feed *f, uint64_t bytes, uint64_t ns)
{
    double in_time = (double)bytes * (double)BATCH_NS / (double)(ns + 1);
    f->batch_bytes = in_time < (double)BATCH_MOST ? (uint64_t)in_time : BATCH_MOST;
}

static fanin_status prove_runs(feed *f, const unit_run *runs, size_t n,
                               fanin_error *error)
{
    const attempt *a = f->of;
    landed_range ranges[RUNS];
    for (size_t i = 0; i < n; i++) {
        const group_run of = tensors_of_units(a->relay->parts.unit_first, runs[i]);
        ranges[i] = (landed_range){(uint32_t)of.first, (uint32_t)of.count};
    }
    return handing_prove(a->relay->server, a->relay->publication, a->step, ranges, n,
                         error);
}

static uint64_t count_brought(feed *f, const unit_run *runs, size_t n)
{
    attempt *a = f->of;
    const parts *p = &a->relay->parts;
    uint64_t bytes = 0;
    for (size_t i = 0; i < n; i++) {
        for (uint32_t u = runs[i].first; u < runs[i].first + runs[i].count; u++) {
            bytes += p->unit_size[u];
            a->bringers[u] = f;
        }
    }
    return bytes;
}

static void account_brought(feed *f, const unit_run *runs, size_t n)
{
    attempt *a = f->of;
    pthread_mutex_lock(&a->relay->lock);
    fanin_relay_stats *stats = &a->relay->stats;
    uint64_t bytes = count_brought(f, runs, n);
    schedule_confirmed(a->schedule, f->number, runs, n, clock_ns());
    a->bytes_done += bytes;
    f->brought += bytes;
    *(is_origin(f) ? &stats->bytes_from_origin : &stats->bytes_from_relays) += bytes;
    stats->landed = stats->units - schedule_left(a->schedule);
    bool all = schedule_left(a->schedule) == 0;
    pthread_mutex_unlock(&a->relay->lock);
    if (all)
        wake_up(a->relay->wake);
}

static uint64_t bytes_of_runs(const parts *p, const unit_run *runs, size_t n)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < n; i++) {
        for (uint32_t u = runs[i].first; u < runs[i].first + runs[i].count; u++)
            bytes += p->unit_size[u];
    }
    return bytes;
}

/* Who brought which units, in as many spans as it takes to name all of them. */
static void trace_brought(const feed *f, const batch *b)
{
    for (size_t i = 0; trace_on() && i < b->n;) {
        char about[TRACE_ABOUT];
        const size_t first = i;
        text t = text_in(about, sizeof about);
        text_add(&t, "%s: units", is_origin(f) ? "trainer" : f->who.address);
        for (; i < b->n; i++) {
            const unit_run *run = &b->runs[i];
            if (!text_add_whole(&t, 0, " %u-%u", run->first,
                                run->first + run->count - 1))
                break;
        }
        trace_span span = trace_span_of(TRACE_BRING, b->began_ns, FANIN_OK, about);
        span.ended_ns = b->read_ns; /* within its row no other span is cut */
        span.bytes = bytes_of_runs(&f->of->relay->parts, b->runs + first, i - first);
        span.step = f->of->step;
        span.place = f->client->place;
        trace_add(&span);
    }
}

/* The source has answered: of what it has confirmed others may read. */
static void on_confirmed(void *cookie, fanin_status status, const fanin_error *why)
{
    batch *b = cookie;
    feed *f = b->of;
    b->of = NULL;
    if (status != FANIN_OK) {
        error_copy(&f->refusal, why);
        return;
    }
    fanin_error failed = FANIN_ERROR_INIT;
    if (prove_runs(f, b->runs, b->n, &failed) == FANIN_OK) {
        trace_brought(f, b);
        account_brought(f, b->runs, b->n);
        return;
    }
    error_copy(&f->refusal, &failed);
    pthread_mutex_lock(&f->of->relay->lock);
    error_copy(&f->of->failed, &failed);
    pthread_mutex_unlock(&f->of->relay->lock);
    wake_up(f->of->relay->wake);
}

/* NULL: all places are taken. */
static batch *free_batch(feed *f)
{
    for (size_t i = 0; i < BATCHES; i++) {
        if (!f->batches[i].of)
            return &f->batches[i];
    }
    return NULL;
}

static bool is_confirming(const feed *f)
{
    for (size_t i = 0; i < BATCHES; i++) {
        if (f->batches[i].of)
            return true;
    }
    return false;
}

/* Of what it reads nothing counts before its source has confirmed it, which is not waited for. */
static fanin_status bring_runs(feed *f, batch *b, fanin_error *error)
{
    attempt *a = f->of;
    const parts *p = &a->relay->parts;
    group_run runs[RUNS];
    uint64_t began = b->began_ns = clock_ns();
    for (size_t i = 0; i < b->n; i++)
        runs[i] = tensors_of_units(is_origin(f) ? p->unit_first : f->map->unit_first,
                                   b->runs[i]);
    fanin_status status = pull_session_read(f->session, runs, b->n, error);
    if (status != FANIN_OK)
        return status;
    uint64_t now = b->read_ns = clock_ns();
    learn_batch(f, bytes_of_runs(p, b->runs, b->n), now - began);
    pthread_mutex_lock(&a->relay->lock);
    schedule_read(a->schedule, f->number, b->runs, b->n, now);
    pthread_mutex_unlock(&a->relay->lock);
    b->of = f;
    return pull_session_confirm_later(f->session, on_confirmed, b, error);
}

/* With the relay's lock. How long a read takes says nothing where memory is read: of a GPU that
   many processes share, each waits for its turn. */
static uint64_t bytes_of_batch(const feed *f)
{
    const fanin_relay *r = f->of->relay;
    uint64_t share = r->parts.bytes / (BATCHES_LEAST * (r->stats.holders + 1));
    uint64_t most = share + share / 16; /* not all duties are equal */
    uint64_t wanted = pull_session_is_linked(f->session) ? f->batch_bytes : BATCH_MOST;
    return wanted < most ? wanted : most;
}

/* Likewise. Whether there is enough for a read, or enough time has gone by since there was some. */
static bool is_worth_reading(feed *f, uint64_t wanted, uint64_t *wake_ns)
{
    bool rest;
    if (is_origin(f) || pull_session_is_linked(f->session))
        return true;
    uint64_t now = clock_ns();
    uint64_t bytes = schedule_offered(f->of->schedule, f->number, &rest);
    if (bytes == 0 || f->offered_ns == 0)
        f->offered_ns = bytes > 0 ? now : 0;
    if (rest || bytes >= wanted / 2 || now - f->offered_ns >= GATHER_NS)
        return true;
    *wake_ns = f->offered_ns + GATHER_NS;
    return false;
}

/* Reads what is due, if there is anything. *@p read_out: there was. */
static fanin_status read_next(feed *f, bool *read_out, bool *all_out, uint64_t *wake_ns,
                              fanin_error *error)
{
    attempt *a = f->of;
    batch *b = free_batch(f);
    *read_out = false;
    *wake_ns = UINT64_MAX;
    if (f->refusal.status != FANIN_OK)
        return error_copy(error, &f->refusal);
    pthread_mutex_lock(&a->relay->lock);
    uint64_t bytes = bytes_of_batch(f);
    size_t n = b && is_worth_reading(f, bytes, wake_ns)
                   ? schedule_next(a->schedule, f->number, bytes, b->runs, RUNS,
                                   clock_ns(), wake_ns)
                   : 0;
    *all_out = schedule_left(a->schedule) == 0;
    pthread_mutex_unlock(&a->relay->lock);
    if (n == 0)
        return FANIN_OK;
    b->n = n;
    f->offered_ns = 0;
    *read_out = true;
    return bring_runs(f, b, error);
}

/* What it was asked for others may bring. @p avoid: for a while it is asked for nothing. */
static void give_up_session(feed *f, bool avoid)
{
    attempt *a = f->of;
    fanin_session_abandon(&f->session);
    for (size_t i = 0; i < BATCHES; i++)
        f->batches[i].of = NULL;
    f->refusal = (fanin_error)FANIN_ERROR_INIT;
    pthread_mutex_lock(&a->relay->lock);
    if (avoid)
        schedule_failed(a->schedule, f->number, clock_ns());
    else
        schedule_return(a->schedule, f->number);
    schedule_forget(a->schedule, f->number);
    pthread_mutex_unlock(&a->relay->lock);
    feeds_wake(a);
}

/* ------------------------------------------------------------------------- the trainer */

static fanin_status begin_at_origin(feed *f, fanin_error *error)
{
    atomic_store(&f->is_beginning, true);
    fanin_status status = is_feed_stopped(f)
                              ? FANIN_ERR_CANCELLED
                              : attempt_begin_at_origin(f->of, &f->session, error);
    atomic_store(&f->is_beginning, false);
    return status;
}

/* Whether the trainer is to be read. What is asked of it for that is given back: others may bring
   it while a session is begun. */
static bool has_work(feed *f, bool *all_out, uint64_t *wake_ns)
{
    attempt *a = f->of;
    unit_run run;
    pthread_mutex_lock(&a->relay->lock);
    bool any =
        schedule_next(a->schedule, f->number, 1, &run, 1, clock_ns(), wake_ns) > 0;
    if (any)
        schedule_return(a->schedule, f->number);
    *all_out = schedule_left(a->schedule) == 0;
    pthread_mutex_unlock(&a->relay->lock);
    return any;
}

/* Keeps the result of the last one. All that was read is confirmed. */
static void end_at_origin(feed *f)
{
    fanin_result *result = NULL;
    if (!f->session)
        return;
    pull_session_leave(&f->session, &result);
    if (!result)
        return;
    fanin_result_free(&f->result);
    f->result = result;
}

/* Whether another begin of the step may succeed. Else the others have to do without it. A rank that
   is lost is connected anew once; that it is not there then ends a plain pull, too. */
static bool origin_may_return(fanin_status why, bool was_begun)
{
    switch (why) {
    case FANIN_ERR_UNREACHABLE:
        return was_begun;
    case FANIN_ERR_STALE:
    case FANIN_ERR_CANCELLED:
    case FANIN_ERR_CLOSED:
    case FANIN_ERR_TRANSPORT:
    case FANIN_ERR_LIMIT:
        return true;
    default:
        return false;
    }
}

static void origin_gone(feed *f, const fanin_error *why)
{
    attempt *a = f->of;
    bool says_who = why->status != FANIN_ERR_TIMEOUT || why->rank >= 0;
    pthread_mutex_lock(&a->relay->lock);
    a->origin_gone = true;
    a->gone_ns = clock_ns();
    if (attempt_is_last(a, why->status))
        schedule_without_trainer(a->schedule);
    if (says_who)
        error_copy(&a->why_gone, why);
    pthread_mutex_unlock(&a->relay->lock);
    wake_up(a->relay->wake);
}

static void origin_failed(feed *f, const fanin_error *why)
{
    pthread_mutex_lock(&f->of->relay->lock);
    error_copy(&f->of->why_gone, why); /* for the case that time runs out */
    pthread_mutex_unlock(&f->of->relay->lock);
    /* Whether an update has come is known by the next begin alone. */
    give_up_session(f, why->status != FANIN_ERR_STALE);
}

/* A lease that is not used would hold up the trainer. */
static fanin_status origin_idle(feed *f, uint64_t *idle_ns, deadline wake,
                                fanin_error *error)
{
    uint64_t now = clock_ns();
    if (*idle_ns == 0 || is_confirming(f))
        *idle_ns = now;
    if (f->session && now - *idle_ns >= LINGER_NS)
        end_at_origin(f);
    return wait_on(f, f->session ? deadline_sooner(wake, *idle_ns + LINGER_NS) : wake,
                   error);
}

/* The session is begun once there is something to read. */
static fanin_status origin_turn(feed *f, uint64_t *idle_ns, bool *all,
                                fanin_error *error)
{
    uint64_t wake;
    bool read;
    fanin_status status = FANIN_OK;
    if (!f->session && has_work(f, all, &wake))
        status = begin_at_origin(f, error);
    else if (!f->session)
        return *all ? FANIN_OK : origin_idle(f, idle_ns, wake, error);
    if (status == FANIN_OK)
        status = read_next(f, &read, all, &wake, error);
    if (status != FANIN_OK)
        return status;
    if (!read && !*all)
        return origin_idle(f, idle_ns, wake, error);
    *idle_ns = 0;
    return FANIN_OK;
}

static void *origin_run(void *cookie)
{
    feed *f = cookie;
    uint64_t idle_ns = 0;
    bool all = false;
    while (!is_feed_stopped(f) && !all) { /* the deadline is an error, which says why */
        fanin_error error = FANIN_ERROR_INIT;
        fanin_status status = origin_turn(f, &idle_ns, &all, &error);
        if (status == FANIN_OK)
            continue;
        if (is_feed_stopped(f) || origin_may_return(status, f->session != NULL)) {
            origin_failed(f, &error);
            continue;
        }
        give_up_session(f, true);
        origin_gone(f, &error);
        break;
    }
    end_at_origin(f);
    atomic_store(&f->done, true);
    wake_up(f->of->relay->wake);
    return NULL;
}

/* ------------------------------------------------------------------------------ holders */

/* Where a part's units begin in used_by. */
static size_t first_use(const unit_map *b, size_t part)
{
    return b->used_first ? b->used_first[part] : part;
}

static void take_part(feed *f, size_t part, uint64_t now_ns)
{
    attempt *a = f->of;
    if (f->has[part])
        return;
    f->has[part] = 1;
    for (size_t i = first_use(f->map, part); i < first_use(f->map, part + 1); i++) {
        uint32_t unit = f->map->used_by[i];
        if (--f->missing[unit] > 0)
            continue;
        schedule_has(a->schedule, f->number, unit, f->first, now_ns);
        atomic_store(&f->holds_units, true);
        a->news_ns = now_ns;
    }
}

static bool take_ranges(feed *f, const msg_landed_ok *m)
{
    uint64_t now = clock_ns();
    for (uint32_t i = 0; i < m->n_ranges; i++) {
        uint64_t end = (uint64_t)m->ranges[i].first + m->ranges[i].count;
        if (end > f->map->n_parts)
            return false;
        for (size_t part = m->ranges[i].first; part < end; part++)
            take_part(f, part, now);
    }
    return true;
}

static void note_tried(feed *f)
{
    if (!atomic_exchange(&f->was_tried, true))
        wake_up(f->of->relay->wake);
}

static void on_landed(void *cookie, connection *c, message_type type, body *b)
{
    feed *f = cookie;
    msg_landed_ok m;
    (void)c;
    f->asking = false;
    f->refused =
        type != MSG_LANDED_OK || decode_landed_ok(b, &m, f->ranges) != FANIN_OK;
    if (f->refused)
        return;
    pthread_mutex_lock(&f->of->relay->lock);
    f->refused = !take_ranges(f, &m);
    pthread_mutex_unlock(&f->of->relay->lock);
    f->version = m.version;
    f->first = false;
    atomic_store(&f->has_answered, true);
    note_tried(f);
}

static void ask_landed(feed *f)
{
    connection *c = f->client->peers[0].control;
    /* That it has nothing yet is heard at once: who has nothing is not waited for. */
    msg_landed m = {.version = f->version, .timeout_ms = f->first ? 0 : PARKED_MS};
    memcpy(m.token, pull_session_token(f->session, 0), sizeof m.token);
    f->asking = true;
    encode_landed(connection_out(c), c->next_request, &m);
    connection_ask(c, on_landed, f);
}

static void forget_landed(feed *f)
{
    const unit_map *b = f->map;
    atomic_store(&f->holds_units, false);
    f->version = 0;
    f->first = true;
    f->refused = false;
    memset(f->has, 0, b->n_parts);
    memset(f->missing, 0, f->of->relay->parts.n_units * sizeof *f->missing);
    for (size_t i = 0; i < first_use(b, b->n_parts); i++)
        f->missing[b->used_by[i]]++;
}

static fanin_status connect_holder(feed *f, fanin_error *error)
{
    const char *address = f->who.address;
    uint32_t left = attempt_left_ms(f->of), most = f->client->config.connect_timeout_ms;
    fanin_status status = FANIN_OK;
    if (!f->client->connected)
        status = fanin_client_connect(f->client, &address, 1, left < most ? left : most,
                                      error);
    if (status != FANIN_OK)
        return status;
    const msg_hello_ok *hello = &f->client->peers[0].control->peer;
    if (memcmp(hello->incarnation, f->who.who.id, sizeof f->who.who.id) == 0)
        return FANIN_OK;
    fanin_client_disconnect(f->client);
    error_place place = {
        .phase = "relay",
        .address = f->who.address,
        .remedy = "give each reader an address and port of its own, also behind NAT"};
    return error_set(error, FANIN_ERR_WORLD, &place, "another relay listens at %s",
                     f->who.address);
}

static fanin_status begin_at_holder(feed *f, fanin_error *error)
{
    fanin_pull_options options = attempt_options(f->of);
    options.rule = FANIN_STEP_EXACT;
    options.step = f->of->step;
    if (!f->who.is_whole)
        options.dtype = 0; /* it has what was made of it */
    options.verify = false;
    atomic_store(&f->is_beginning, true);
    fanin_status status =
        is_feed_stopped(f) ? FANIN_ERR_CANCELLED : connect_holder(f, error);
    if (status == FANIN_OK)
        status = fanin_client_begin_into(f->client, &options, f->map->destination,
                                         &f->session, error);
    atomic_store(&f->is_beginning, false);
    forget_landed(f);
    return status;
}

/* Also hears of what the holder has. */
static fanin_status holder_turn(feed *f, bool *all, fanin_error *error)
{
    uint64_t wake;
    bool read;
    fanin_status status = f->session ? FANIN_OK : begin_at_holder(f, error);
    if (status != FANIN_OK)
        return status;
    if (f->refused || !peer_ready(&f->client->peers[0]))
        return error_set(error, FANIN_ERR_CLOSED, NULL,
                         "the relay at %s does not say what it has", f->who.address);
    if (!f->asking)
        ask_landed(f);
    status = read_next(f, &read, all, &wake, error);
    return status != FANIN_OK || read || *all ? status : wait_on(f, wake, error);
}

static void drop_landed(feed *f)
{
    if (f->asking && f->client->n_peers > 0)
        connection_forget(f->client->peers[0].control, f);
    f->asking = false;
}

/* Who is not believed is warned of once, since nothing else shows it, and so is who is listed at
   another one's address. Others may be about to come, or to go. */
static void tell_failure(feed *f, const fanin_error *why)
{
    fanin_relay *r = f->of->relay;
    bool warn = why->status == FANIN_ERR_AUTH ||
                (why->status == FANIN_ERR_WORLD && atomic_load(&f->is_in_list));
    pthread_mutex_lock(&r->lock);
    for (size_t i = 0; i < r->n_disbelieved && warn; i++)
        warn = member_compare(&r->disbelieved[i], &f->who.who) != 0;
    if (warn && array_reserve(&r->disbelieved, &r->disbelieved_capacity,
                              r->n_disbelieved + 1, sizeof *r->disbelieved))
        r->disbelieved[r->n_disbelieved++] = f->who.who;
    pthread_mutex_unlock(&r->lock);
    log_write(&r->log, warn ? FANIN_LOG_WARNING : FANIN_LOG_DEBUG, "relay-holder",
              "the relay at %s is not read: %s; %s", f->who.address, why->message,
              why->remedy);
}

/* It failed, and is left alone until the schedule says so. */
static void holder_failed(feed *f, const fanin_error *why)
{
    unit_run run;
    bool all;
    fanin_error ignored = FANIN_ERROR_INIT;
    tell_failure(f, why);
    drop_landed(f);
    note_tried(f);
    if (!atomic_load(&f->is_in_list)) { /* it may be about to come */
        give_up_session(f, false);
        (void)wait_on(f, clock_ns() + AGAIN_NS, &ignored);
        return;
    }
    give_up_session(f, true);
    pthread_mutex_lock(&f->of->relay->lock);
    uint64_t wake;
    schedule_next(f->of->schedule, f->number, 0, &run, 0, clock_ns(), &wake);
    pthread_mutex_unlock(&f->of->relay->lock);
    for (all = false; !is_feed_stopped(f) && !all && !deadline_passed(wake);) {
        if (wait_on(f, wake, &ignored) != FANIN_OK)
            break;
        pthread_mutex_lock(&f->of->relay->lock);
        all = schedule_left(f->of->schedule) == 0;
        pthread_mutex_unlock(&f->of->relay->lock);
    }
}

static void *holder_run(void *cookie)
{
    feed *f = cookie;
    bool all = false;
    while (!is_feed_stopped(f) && !all && !deadline_passed(f->of->at)) {
        fanin_error error = FANIN_ERROR_INIT;
        if (holder_turn(f, &all, &error) == FANIN_OK)
            continue;
        if (deadline_passed(f->of->at)) /* the schedule keeps what it owes */
            fanin_session_abandon(&f->session);
        else
            holder_failed(f, &error);
    }
    drop_landed(f);
    if (f->session)
        pull_session_leave(&f->session, NULL);
    atomic_store(&f->done, true);
    wake_up(f->of->relay->wake);
    return NULL;
}

/* --------------------------------------------------------------------------- life cycle */

static fanin_status feed_open(feed *f, attempt *a, fanin_error *error)
{
    f->of = a;
    f->batch_bytes = 1;
    f->refusal = (fanin_error)FANIN_ERROR_INIT;
    fanin_status status = loop_source_wake(&f->wake, error);
    return status == FANIN_OK ? loop_add(&f->client->loop, &f->wake, error) : status;
}

fanin_status feed_start_origin(attempt *a, fanin_session *session, fanin_error *error)
{
    feed *f = &a->origin;
    f->client = a->relay->origin;
    f->session = session;
    fanin_status status = feed_open(f, a, error);
    if (status == FANIN_OK)
        status = thread_start(&f->thread, "fanin-origin", origin_run, f, error);
    pthread_mutex_lock(&a->feeds_lock); /* holders' threads wake it from now on */
    f->started = status == FANIN_OK;
    pthread_mutex_unlock(&a->feeds_lock);
    return status;
}

static fanin_status make_holder_client(feed *f, fanin_error *error)
{
    fanin_client_config config = f->of->relay->client_config;
    f->client = relay_take_client(f->of->relay, &f->who.who);
    if (f->client)
        return FANIN_OK;
    memcpy(config.world_id, f->of->relay->world_id, sizeof config.world_id);
    config.server_name = NULL;
    config.partial = false;
    if (config.threads == 0)
        config.threads = 1; /* there is one of these a holder */
    fanin_status status = fanin_client_create(&config, &f->client, error);
    if (status == FANIN_OK)
        f->client->shared.relays = true;
    return status;
}

static fanin_status open_holder(feed *f, attempt *a, fanin_error *error)
{
    f->of = a;
    f->map = f->who.is_whole ? &a->relay->whole.map : &a->relay->alike;
    f->wake.fd = -1;
    f->has = calloc(f->map->n_parts, sizeof *f->has);
    f->missing = calloc(a->relay->parts.n_units, sizeof *f->missing);
    f->ranges = calloc(LIMIT_LANDED_RANGES, sizeof *f->ranges);
    if (!f->has || !f->missing || !f->ranges)
        return error_set_memory(error);
    fanin_status status = make_holder_client(f, error);
    if (status == FANIN_OK)
        status = feed_open(f, a, error);
    if (status != FANIN_OK)
        return status;
    pthread_mutex_lock(&a->relay->lock);
    f->number = schedule_join(a->schedule, &f->who.who, f->who.near);
    pthread_mutex_unlock(&a->relay->lock);
    if (f->number == SCHEDULE_ORIGIN)
        return error_set_memory(error);
    status = thread_start(&f->thread, "fanin-holder", holder_run, f, error);
    f->started = status == FANIN_OK;
    return status;
}

fanin_status feed_start_holder(attempt *a, const holder *who, fanin_error *error)
{
    feed *f = calloc(1, sizeof *f);
    pthread_mutex_lock(&a->feeds_lock);
    bool room = array_reserve(&a->holders, &a->holder_capacity, a->n_holders + 1,
                              sizeof *a->holders);
    pthread_mutex_unlock(&a->feeds_lock);
    if (!f || !room) {
        free(f);
        return error_set_memory(error);
    }
    f->who = *who;
    f->began_ns = clock_ns();
    atomic_init(&f->is_in_list, !who->remembered);
    fanin_status status = open_holder(f, a, error);
    if (status != FANIN_OK) {
        feed_end(f);
        free(f);
        return status;
    }
    pthread_mutex_lock(&a->feeds_lock);
    a->holders[a->n_holders++] = f;
    pthread_mutex_unlock(&a->feeds_lock);
    return FANIN_OK;
}

void feed_stop(feed *f)
{
    atomic_store(&f->stop, true);
    if (f->wake.fd >= 0)
        wake_up(f->wake.fd);
    if (atomic_load(&f->is_beginning))
        fanin_client_cancel(f->client);
}

void feed_break_off(feed *f)
{
    fanin_client_cancel(f->client);
}

void feed_end(feed *f)
{
    if (f->started)
        pthread_join(f->thread, NULL);
    fanin_session_abandon(&f->session);
    if (f->client && f->wake.fd >= 0)
        loop_remove(&f->client->loop, &f->wake);
    pthread_mutex_lock(&f->of->feeds_lock);
    f->ended = true;
    pthread_mutex_unlock(&f->of->feeds_lock);
    if (f->wake.fd >= 0)
        close(f->wake.fd);
    f->wake.fd = -1;
    if (f->number != SCHEDULE_ORIGIN) {
        pthread_mutex_lock(&f->of->relay->lock);
        schedule_leave(f->of->schedule, f->number);
        pthread_mutex_unlock(&f->of->relay->lock);
    }
    if (f->client)
        atomic_store(&f->client->cancelled, false); /* what comes next was not meant */
    if (f != &f->of->origin && f->client)
        relay_keep_client(f->of->relay, &f->who.who, f->client);
    f->client = NULL;
    free(f->has);
    free(f->missing);
    free(f->ranges);
    f->has = NULL;
    f->missing = NULL;
    f->ranges = NULL;
}
