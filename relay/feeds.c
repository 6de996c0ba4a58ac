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
#include "pull/pull_session.h"
#include "thread.h"
#include "wake.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BATCH_NS (5 * MS) /* what is read before one takes about so long */
#define BATCH_MOST ((uint64_t)64 << 20)
#define LINGER_NS                                                                      \
    (50 * MS) /* a session at the trainer with nothing to read lasts so long */
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

static bool is_feed_stopped(feed *l)
{
    return atomic_load(&l->stop);
}

/* Until something happens, or the time. */
static fanin_status wait_on(feed *l, deadline until, fanin_error *error)
{
    fanin_status status = client_step(l->client, l->of->at, until, "wait", error);
    return status == FANIN_ERR_CANCELLED && !is_feed_stopped(l) ? FANIN_OK : status;
}

/* ----------------------------------------------------------------------- what it brings */

static bool is_origin(const feed *l)
{
    return l->number == SCHEDULE_ORIGIN;
}

/* The next batch is what would have come in some milliseconds. */
static void learn_batch(feed *l, uint64_t bytes, uint64_t ns)
{
    double in_time = (double)bytes * (double)BATCH_NS / (double)(ns + 1);
    l->batch_bytes = in_time < (double)BATCH_MOST ? (uint64_t)in_time : BATCH_MOST;
}

static fanin_status prove_runs(feed *l, const unit_run *runs, size_t n,
                               fanin_error *error)
{
    attempt *a = l->of;
    const parts *p = &a->relay->parts;
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < n && status == FANIN_OK; i++) {
        uint32_t first = p->unit_first[runs[i].first];
        uint32_t end = p->unit_first[runs[i].first + runs[i].count];
        status = handing_prove(a->relay->server, a->relay->publication, a->step, first,
                               end - first, error);
    }
    return status;
}

static uint64_t count_brought(feed *l, const unit_run *runs, size_t n)
{
    attempt *a = l->of;
    const parts *p = &a->relay->parts;
    uint64_t bytes = 0;
    for (size_t i = 0; i < n; i++) {
        for (uint32_t u = runs[i].first; u < runs[i].first + runs[i].count; u++) {
            bytes += p->unit_size[u];
            a->bringers[u] = l;
        }
    }
    return bytes;
}

static void account_brought(feed *l, const unit_run *runs, size_t n)
{
    attempt *a = l->of;
    pthread_mutex_lock(&a->relay->lock);
    fanin_relay_stats *stats = &a->relay->stats;
    uint64_t bytes = count_brought(l, runs, n);
    schedule_confirmed(a->schedule, l->number, runs, n, clock_ns());
    a->bytes_done += bytes;
    l->brought += bytes;
    *(is_origin(l) ? &stats->bytes_from_origin : &stats->bytes_from_relays) += bytes;
    stats->landed = stats->units - schedule_left(a->schedule);
    bool all = schedule_left(a->schedule) == 0;
    pthread_mutex_unlock(&a->relay->lock);
    if (all)
        wake_up(a->relay->wake);
}

/* The source has answered: of what it has confirmed others may read. */
static void on_confirmed(void *cookie, fanin_status status, const fanin_error *why)
{
    batch *b = cookie;
    feed *l = b->of;
    b->of = NULL;
    if (status != FANIN_OK) {
        error_copy(&l->refusal, why);
        return;
    }
    fanin_error failed = FANIN_ERROR_INIT;
    if (prove_runs(l, b->runs, b->n, &failed) == FANIN_OK) {
        account_brought(l, b->runs, b->n);
        return;
    }
    error_copy(&l->refusal, &failed);
    pthread_mutex_lock(&l->of->relay->lock);
    error_copy(&l->of->failed, &failed);
    pthread_mutex_unlock(&l->of->relay->lock);
    wake_up(l->of->relay->wake);
}

/* NULL: all places are taken. */
static batch *free_batch(feed *l)
{
    for (size_t i = 0; i < BATCHES; i++) {
        if (!l->batches[i].of)
            return &l->batches[i];
    }
    return NULL;
}

static bool is_confirming(const feed *l)
{
    for (size_t i = 0; i < BATCHES; i++) {
        if (l->batches[i].of)
            return true;
    }
    return false;
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

/* Of what it reads nothing counts before its source has confirmed it, which is not waited for. */
static fanin_status bring_runs(feed *l, batch *b, fanin_error *error)
{
    attempt *a = l->of;
    const parts *p = &a->relay->parts;
    uint64_t began = clock_ns();
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < b->n && status == FANIN_OK; i++) {
        uint32_t first = p->unit_first[b->runs[i].first];
        uint32_t end = p->unit_first[b->runs[i].first + b->runs[i].count];
        status = fanin_session_read(l->session, first, end - first, error);
    }
    if (status != FANIN_OK)
        return status;
    uint64_t now = clock_ns();
    learn_batch(l, bytes_of_runs(p, b->runs, b->n), now - began);
    pthread_mutex_lock(&a->relay->lock);
    schedule_read(a->schedule, l->number, b->runs, b->n, now);
    pthread_mutex_unlock(&a->relay->lock);
    b->of = l;
    return pull_session_confirm_later(l->session, on_confirmed, b, error);
}

/* Reads what is due, if there is anything. *@p read_out: there was. */
static fanin_status read_next(feed *l, bool *read_out, bool *all_out, uint64_t *wake_ns,
                              fanin_error *error)
{
    attempt *a = l->of;
    batch *b = free_batch(l);
    *read_out = false;
    *wake_ns = UINT64_MAX;
    if (l->refusal.status != FANIN_OK)
        return error_copy(error, &l->refusal);
    pthread_mutex_lock(&a->relay->lock);
    size_t n = b ? schedule_next(a->schedule, l->number, l->batch_bytes, b->runs, RUNS,
                                 clock_ns(), wake_ns)
                 : 0;
    *all_out = schedule_left(a->schedule) == 0;
    pthread_mutex_unlock(&a->relay->lock);
    if (n == 0)
        return FANIN_OK;
    b->n = n;
    *read_out = true;
    return bring_runs(l, b, error);
}

/* What it was asked for others may bring. @p avoid: for a while it is asked for nothing. */
static void give_up_session(feed *l, bool avoid)
{
    attempt *a = l->of;
    fanin_session_abandon(&l->session);
    for (size_t i = 0; i < BATCHES; i++)
        l->batches[i].of = NULL;
    l->refusal = (fanin_error)FANIN_ERROR_INIT;
    pthread_mutex_lock(&a->relay->lock);
    if (avoid)
        schedule_failed(a->schedule, l->number, clock_ns());
    else
        schedule_return(a->schedule, l->number);
    schedule_forget(a->schedule, l->number);
    pthread_mutex_unlock(&a->relay->lock);
    feeds_wake(a);
}

/* ------------------------------------------------------------------------- the trainer */

static fanin_status begin_at_origin(feed *l, fanin_error *error)
{
    atomic_store(&l->opening, true);
    fanin_status status = is_feed_stopped(l)
                              ? FANIN_ERR_CANCELLED
                              : attempt_begin_at_origin(l->of, &l->session, error);
    atomic_store(&l->opening, false);
    return status;
}

/* Whether the trainer is to be read. What is asked of it for that is given back: others may bring
   it while a session is begun. */
static bool has_work(feed *l, bool *all_out, uint64_t *wake_ns)
{
    attempt *a = l->of;
    unit_run run;
    pthread_mutex_lock(&a->relay->lock);
    bool any =
        schedule_next(a->schedule, l->number, 1, &run, 1, clock_ns(), wake_ns) > 0;
    if (any)
        schedule_return(a->schedule, l->number);
    *all_out = schedule_left(a->schedule) == 0;
    pthread_mutex_unlock(&a->relay->lock);
    return any;
}

/* Keeps the result of the last one. All that was read is confirmed. */
static void end_at_origin(feed *l)
{
    fanin_result *result = NULL;
    if (!l->session)
        return;
    pull_session_leave(&l->session, &result);
    if (!result)
        return;
    fanin_result_free(&l->result);
    l->result = result;
}

/* Whether another begin of the step may succeed. Else the others have to do without it. */
static bool origin_may_return(fanin_status why)
{
    switch (why) {
    case FANIN_ERR_STALE:
    case FANIN_ERR_CANCELLED:
    case FANIN_ERR_CLOSED:
    case FANIN_ERR_UNREACHABLE:
    case FANIN_ERR_TRANSPORT:
    case FANIN_ERR_LIMIT:
        return true;
    default:
        return false;
    }
}

static void origin_gone(feed *l, const fanin_error *why)
{
    attempt *a = l->of;
    pthread_mutex_lock(&a->relay->lock);
    a->origin_gone = true;
    a->gone_ns = clock_ns();
    error_copy(&a->why_gone, why);
    pthread_mutex_unlock(&a->relay->lock);
    wake_up(a->relay->wake);
}

static void origin_failed(feed *l, const fanin_error *why)
{
    pthread_mutex_lock(&l->of->relay->lock);
    error_copy(&l->of->why_gone, why); /* for the case that time runs out */
    pthread_mutex_unlock(&l->of->relay->lock);
    give_up_session(l, true);
}

/* A lease that is not used would hold up the trainer. */
static fanin_status origin_idle(feed *l, uint64_t *idle_ns, deadline wake,
                                fanin_error *error)
{
    uint64_t now = clock_ns();
    if (*idle_ns == 0 || is_confirming(l))
        *idle_ns = now;
    if (l->session && now - *idle_ns >= LINGER_NS)
        end_at_origin(l);
    return wait_on(l, l->session ? deadline_sooner(wake, *idle_ns + LINGER_NS) : wake,
                   error);
}

/* The session is begun once there is something to read. */
static fanin_status origin_turn(feed *l, uint64_t *idle_ns, bool *all,
                                fanin_error *error)
{
    uint64_t wake;
    bool read;
    fanin_status status = FANIN_OK;
    if (!l->session && has_work(l, all, &wake))
        status = begin_at_origin(l, error);
    else if (!l->session)
        return *all ? FANIN_OK : origin_idle(l, idle_ns, wake, error);
    if (status == FANIN_OK)
        status = read_next(l, &read, all, &wake, error);
    if (status != FANIN_OK)
        return status;
    if (!read && !*all)
        return origin_idle(l, idle_ns, wake, error);
    *idle_ns = 0;
    return FANIN_OK;
}

static void *origin_run(void *cookie)
{
    feed *l = cookie;
    uint64_t idle_ns = 0;
    bool all = false;
    while (!is_feed_stopped(l) && !all && !deadline_passed(l->of->at)) {
        fanin_error error = FANIN_ERROR_INIT;
        fanin_status status = origin_turn(l, &idle_ns, &all, &error);
        if (status == FANIN_OK)
            continue;
        if (is_feed_stopped(l) || origin_may_return(status)) {
            origin_failed(l, &error);
            continue;
        }
        give_up_session(l, true);
        origin_gone(l, &error);
        break;
    }
    end_at_origin(l);
    atomic_store(&l->done, true);
    wake_up(l->of->relay->wake);
    return NULL;
}

/* ------------------------------------------------------------------------------ holders */

static bool take_ranges(feed *l, const msg_landed_ok *m)
{
    attempt *a = l->of;
    const parts *p = &a->relay->parts;
    uint64_t now = clock_ns();
    for (uint32_t i = 0; i < m->n_ranges; i++) {
        uint64_t end = (uint64_t)m->ranges[i].first + m->ranges[i].count;
        if (end > p->n)
            return false;
        for (size_t part = m->ranges[i].first; part < end; part++) {
            uint32_t unit = p->unit_of[part];
            if (!l->has[part] && --l->missing[unit] == 0)
                schedule_has(a->schedule, l->number, unit, l->first, now);
            l->has[part] = 1;
        }
    }
    return true;
}

static void on_landed(void *cookie, connection *c, message_type type, body *b)
{
    feed *l = cookie;
    msg_landed_ok m;
    (void)c;
    l->asking = false;
    l->refused =
        type != MSG_LANDED_OK || decode_landed_ok(b, &m, l->ranges) != FANIN_OK;
    if (l->refused)
        return;
    pthread_mutex_lock(&l->of->relay->lock);
    l->refused = !take_ranges(l, &m);
    pthread_mutex_unlock(&l->of->relay->lock);
    l->version = m.version;
    l->first = false;
    atomic_store(&l->heard, true);
}

static void ask_landed(feed *l)
{
    connection *c = l->client->peers[0].control;
    msg_landed m = {.version = l->version, .timeout_ms = PARKED_MS};
    memcpy(m.token, pull_session_token(l->session, 0), sizeof m.token);
    l->asking = true;
    uint64_t request = connection_next_request(c);
    encode_landed(connection_out(c), request, &m);
    connection_ask(c, request, on_landed, l);
}

static void forget_landed(feed *l)
{
    const parts *p = &l->of->relay->parts;
    l->version = 0;
    l->first = true;
    l->refused = false;
    memset(l->has, 0, p->n);
    for (size_t u = 0; u < p->n_units; u++)
        l->missing[u] = p->unit_first[u + 1] - p->unit_first[u];
}

static fanin_status connect_holder(feed *l, fanin_error *error)
{
    const char *address = l->who.address;
    uint32_t left = attempt_left_ms(l->of), most = l->client->config.connect_timeout_ms;
    fanin_status status = FANIN_OK;
    if (!l->client->connected)
        status = fanin_client_connect(l->client, &address, 1, left < most ? left : most,
                                      error);
    if (status != FANIN_OK)
        return status;
    const msg_hello_ok *hello = connection_peer(l->client->peers[0].control);
    if (memcmp(hello->incarnation, l->who.who.id, sizeof l->who.who.id) == 0)
        return FANIN_OK;
    fanin_client_disconnect(l->client);
    return error_set(error, FANIN_ERR_WORLD, NULL, "another relay listens at %s",
                     l->who.address);
}

static fanin_status begin_at_holder(feed *l, fanin_error *error)
{
    fanin_pull_options options = attempt_options(l->of);
    options.rule = FANIN_STEP_EXACT;
    options.step = l->of->step;
    options.dtype = 0; /* it has what was made of it */
    options.verify = false;
    atomic_store(&l->opening, true);
    fanin_status status =
        is_feed_stopped(l) ? FANIN_ERR_CANCELLED : connect_holder(l, error);
    if (status == FANIN_OK)
        status = fanin_client_begin_into(l->client, &options, l->of->from_holders,
                                         &l->session, error);
    atomic_store(&l->opening, false);
    forget_landed(l);
    return status;
}

/* Also hears of what the holder has. */
static fanin_status holder_turn(feed *l, bool *all, fanin_error *error)
{
    uint64_t wake;
    bool read;
    fanin_status status = l->session ? FANIN_OK : begin_at_holder(l, error);
    if (status != FANIN_OK)
        return status;
    if (l->refused || !peer_ready(&l->client->peers[0]))
        return error_set(error, FANIN_ERR_CLOSED, NULL,
                         "the relay at %s does not say what it has", l->who.address);
    if (!l->asking)
        ask_landed(l);
    status = read_next(l, &read, all, &wake, error);
    return status != FANIN_OK || read || *all ? status : wait_on(l, wake, error);
}

static void drop_landed(feed *l)
{
    if (l->asking && l->client->n_peers > 0)
        connection_forget(l->client->peers[0].control, l);
    l->asking = false;
}

/* It failed, and is left alone until the schedule says so. */
static void holder_failed(feed *l, const fanin_error *why)
{
    unit_run run;
    bool all;
    fanin_error ignored = FANIN_ERROR_INIT;
    log_write(&l->of->relay->log, FANIN_LOG_DEBUG, "relay-holder", "%s: %s",
              l->who.address, why->message);
    drop_landed(l);
    if (!atomic_load(&l->listed)) { /* it may be about to come */
        give_up_session(l, false);
        (void)wait_on(l, clock_ns() + AGAIN_NS, &ignored);
        return;
    }
    give_up_session(l, true);
    pthread_mutex_lock(&l->of->relay->lock);
    uint64_t wake;
    schedule_next(l->of->schedule, l->number, 0, &run, 0, clock_ns(), &wake);
    pthread_mutex_unlock(&l->of->relay->lock);
    for (all = false; !is_feed_stopped(l) && !all && !deadline_passed(wake);) {
        if (wait_on(l, wake, &ignored) != FANIN_OK)
            break;
        pthread_mutex_lock(&l->of->relay->lock);
        all = schedule_left(l->of->schedule) == 0;
        pthread_mutex_unlock(&l->of->relay->lock);
    }
}

static void *holder_run(void *cookie)
{
    feed *l = cookie;
    bool all = false;
    while (!is_feed_stopped(l) && !all && !deadline_passed(l->of->at)) {
        fanin_error error = FANIN_ERROR_INIT;
        if (holder_turn(l, &all, &error) != FANIN_OK)
            holder_failed(l, &error);
    }
    drop_landed(l);
    if (l->session)
        pull_session_leave(&l->session, NULL);
    atomic_store(&l->done, true);
    wake_up(l->of->relay->wake);
    return NULL;
}

/* --------------------------------------------------------------------------- life cycle */

static fanin_status feed_open(feed *l, attempt *a, fanin_error *error)
{
    l->of = a;
    l->batch_bytes = 1;
    l->refusal = (fanin_error)FANIN_ERROR_INIT;
    fanin_status status = loop_source_wake(&l->wake, error);
    return status == FANIN_OK ? loop_add(&l->client->loop, &l->wake, error) : status;
}

fanin_status feed_start_origin(attempt *a, fanin_session *session, fanin_error *error)
{
    feed *l = &a->origin;
    l->client = a->relay->origin;
    l->session = session;
    fanin_status status = feed_open(l, a, error);
    if (status == FANIN_OK)
        status = thread_start(&l->thread, "fanin-origin", origin_run, l, error);
    pthread_mutex_lock(&a->feeds_lock); /* holders' threads wake it from now on */
    l->started = status == FANIN_OK;
    pthread_mutex_unlock(&a->feeds_lock);
    return status;
}

static fanin_status make_holder_client(feed *l, fanin_error *error)
{
    fanin_client_config config = l->of->relay->client_config;
    l->client = relay_take_client(l->of->relay, &l->who.who);
    if (l->client)
        return FANIN_OK;
    memcpy(config.world_id, l->of->relay->world_id, sizeof config.world_id);
    config.server_name = NULL;
    config.partial = false;
    if (config.threads == 0)
        config.threads = 1; /* there is one of these a holder */
    fanin_status status = fanin_client_create(&config, &l->client, error);
    if (status == FANIN_OK)
        l->client->shared.relays = true;
    return status;
}

static fanin_status open_holder(feed *l, attempt *a, fanin_error *error)
{
    const parts *p = &a->relay->parts;
    l->of = a;
    l->wake.fd = -1;
    l->has = calloc(p->n, sizeof *l->has);
    l->missing = calloc(p->n_units, sizeof *l->missing);
    l->ranges = calloc(LIMIT_LANDED_RANGES, sizeof *l->ranges);
    if (!l->has || !l->missing || !l->ranges)
        return error_set_memory(error);
    fanin_status status = make_holder_client(l, error);
    if (status == FANIN_OK)
        status = feed_open(l, a, error);
    if (status != FANIN_OK)
        return status;
    pthread_mutex_lock(&a->relay->lock);
    l->number = schedule_join(a->schedule, &l->who.who);
    pthread_mutex_unlock(&a->relay->lock);
    if (l->number == SCHEDULE_ORIGIN)
        return error_set_memory(error);
    status = thread_start(&l->thread, "fanin-holder", holder_run, l, error);
    l->started = status == FANIN_OK;
    return status;
}

fanin_status feed_start_holder(attempt *a, const holder *who, fanin_error *error)
{
    feed *l = calloc(1, sizeof *l);
    pthread_mutex_lock(&a->feeds_lock);
    bool room = array_reserve(&a->holders, &a->holder_capacity, a->n_holders + 1,
                              sizeof *a->holders);
    pthread_mutex_unlock(&a->feeds_lock);
    if (!l || !room) {
        free(l);
        return error_set_memory(error);
    }
    l->who = *who;
    atomic_init(&l->listed, !who->remembered);
    fanin_status status = open_holder(l, a, error);
    if (status != FANIN_OK) {
        feed_end(l);
        free(l);
        return status;
    }
    pthread_mutex_lock(&a->feeds_lock);
    a->holders[a->n_holders++] = l;
    pthread_mutex_unlock(&a->feeds_lock);
    return FANIN_OK;
}

void feed_stop(feed *l)
{
    atomic_store(&l->stop, true);
    if (l->wake.fd >= 0)
        wake_up(l->wake.fd);
    if (atomic_load(&l->opening))
        fanin_client_cancel(l->client);
}

void feed_break_off(feed *l)
{
    fanin_client_cancel(l->client);
}

void feed_end(feed *l)
{
    if (l->started)
        pthread_join(l->thread, NULL);
    fanin_session_abandon(&l->session);
    if (l->client && l->wake.fd >= 0)
        loop_remove(&l->client->loop, &l->wake);
    pthread_mutex_lock(&l->of->feeds_lock);
    l->ended = true;
    pthread_mutex_unlock(&l->of->feeds_lock);
    if (l->wake.fd >= 0)
        close(l->wake.fd);
    l->wake.fd = -1;
    if (l->number != SCHEDULE_ORIGIN) {
        pthread_mutex_lock(&l->of->relay->lock);
        schedule_leave(l->of->schedule, l->number);
        pthread_mutex_unlock(&l->of->relay->lock);
    }
    if (l->client)
        atomic_store(&l->client->cancelled, false); /* what comes next was not meant */
    if (l != &l->of->origin && l->client)
        relay_keep_client(l->of->relay, &l->who.who, l->client);
    l->client = NULL;
    free(l->has);
    free(l->missing);
    free(l->ranges);
    l->has = NULL;
    l->missing = NULL;
    l->ranges = NULL;
}
