/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/pull.h"

#include "convert.h"
#include "error_set.h"
#include "pull/plan_cache.h"
#include "versioned.h"
#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* After so many stale attempts the error explains what would help. */
#define ADVISE_AFTER 3
/* Lost paths that a forced path may cost before the pull gives up. */
#define MAX_TRANSPORT_FAILURES 3
/* Each pause before another attempt is random, of a width that grows up to here: by 1 ms where the
   trainer was faster, else twofold. */
#define MAX_PAUSE_MS 8
#define MAX_LONG_PAUSE_MS 512
/* Device memory of publications that are not pulled any more is unmapped after so long. Mapping it
   again costs an adapter less than a millisecond, and a model up to seconds. */
#define KEEP_MAPPED_NS (UINT64_C(60) * 1000 * 1000 * 1000)

/* ----------------------------------------------------------------- options */

void fanin_pull_options_init(fanin_pull_options *options, size_t size)
{
    fanin_pull_options defaults = {.timeout_ms = 60000};
    versioned_init(options, size, &defaults, sizeof defaults);
}

fanin_status pull_options_read(const fanin_pull_options *in, fanin_pull_options *out,
                               fanin_error *error)
{
    fanin_pull_options_init(out, sizeof *out);
    if (!versioned_read(out, sizeof *out, in, 0))
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "the options are NULL or their struct_size is not set");
    error_place place = {.remedy = "a publication is \"lora:<run>\" or \"full:<run>\""};
    if (!out->publication || !strchr(out->publication, ':') ||
        strlen(out->publication) >= sizeof(((publication *)0)->name))
        return error_set(error, FANIN_ERR_ARGUMENT, &place,
                         "the publication's name is missing or malformed");
    if (out->rule < FANIN_STEP_NEWEST || out->rule > FANIN_STEP_AT_LEAST)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "unknown step rule %d",
                         (int)out->rule);
    if (out->dtype != 0 && convert_between(FANIN_DTYPE_F32, out->dtype) < 0) {
        place.remedy = "use BF16 or F16, or nothing: as published";
        return error_set(error, FANIN_ERR_ARGUMENT, &place,
                         "F32 tensors cannot be converted to dtype %d",
                         (int)out->dtype);
    }
    if (out->dtype == FANIN_DTYPE_F32)
        out->dtype = 0;
    if (out->timeout_ms == 0)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "timeout_ms must not be 0: every pull has a deadline");
    return FANIN_OK;
}

fanin_status pull_check(const fanin_client *client, const fanin_pull_options *in,
                        fanin_pull_options *out, fanin_error *error)
{
    fanin_status status = client_check_connected(client, error);
    return status == FANIN_OK ? pull_options_read(in, out, error) : status;
}

/* ------------------------------------------------------- states of this file */

/* Whatever it was but an update may last, and each attempt costs the rank a connection. */
static uint64_t widest_pause_ms(pull *p, fanin_status why)
{
    uint64_t restarts = p->result->info.restarts;
    if (why == FANIN_ERR_STALE)
        return restarts < MAX_PAUSE_MS ? restarts : MAX_PAUSE_MS;
    uint64_t ms = p->pause_ms > 0 ? 2 * (uint64_t)p->pause_ms : 1;
    p->pause_ms = ms < MAX_LONG_PAUSE_MS ? (uint32_t)ms : MAX_LONG_PAUSE_MS;
    return p->pause_ms;
}

/* PULL_PAUSE */
static fanin_status pull_pause(pull *p, fanin_error *error)
{
    uint16_t random = 0;
    (void)random_bytes(&random, sizeof random); /* 0 will do as well */
    uint64_t ns = widest_pause_ms(p, p->why.status) * 1000000 * random / 65536;
    deadline until = clock_ns() + ns;
    fanin_status status = FANIN_OK;
    while (status == FANIN_OK && !deadline_passed(until))
        status = client_step(p->client, p->at, until, "wait", error);
    if (status == FANIN_OK)
        p->state = PULL_START;
    return status;
}

/* PULL_START */
static fanin_status pull_start(pull *p, fanin_error *error)
{
    (void)error;
    pull_patches_forget(p);
    p->attempt_ns = clock_ns();
    p->client->place.attempt++;
    p->state = PULL_CONNECT;
    return FANIN_OK;
}

/* PULL_PUBLISH */
static fanin_status pull_publish(pull *p, fanin_error *error)
{
    fanin_result_info *info = &p->result->info;
    uint64_t clock = clock_ns();
    if (!info->reused)
        info->transport_checksums = result_guard(p->result, p->client, p->publication);
    p->identity.verified = info->verified;
    p->identity.transport_checksums = info->transport_checksums;
    /* Before it is published: what is must not fail for want of memory any more. */
    fanin_status status = result_finish(p->result, p->client, p->publication, error);
    if (status == FANIN_OK && p->destination->publish && !info->reused) {
        pull_base_tell(p);
        status = p->destination->publish(p->destination->cookie, &p->identity, error);
        json_decref(p->identity.base);
        p->identity.base = NULL;
    }
    if (p->destination->publish)
        span_of_call(p->client, TRACE_PUBLISH, clock, status, NULL);
    info->write_ns += clock_ns() - clock;
    info->step = p->identity.step;
    memcpy(info->world_id, p->identity.world_id, sizeof info->world_id);
    info->bytes = p->bytes;
    info->tensors = p->tensors;
    info->total_ns = clock_ns() - p->started_ns;
    info->fixed_ns = info->total_ns - info->fixed_ns;
    if (status == FANIN_OK)
        pull_base_keep(p);
    if (status == FANIN_OK)
        p->state = PULL_DONE;
    return status;
}

/* ------------------------------------------------------------------- the table */

#define TIME(field) offsetof(fanin_result_info, field)

/* What runs in a state, and what the pull holds in it; where its time is added, 0: nowhere, and
   what the trace calls it then. */
static const struct {
    fanin_status (*run)(pull *p, fanin_error *error);
    enum {
        NO_ATTEMPT, /* it is between two */
        NO_LEASE,   /* what fails has read nothing */
        LEASES, /* ranks delay updates for it, or the answer whether they did is out */
        BYTES,  /* that count: the attempt is over */
    } holds;
    trace_name name;
    size_t time;
} states[] = {
    [PULL_START] = {.run = pull_start, .holds = NO_ATTEMPT},
    [PULL_PAUSE] = {.run = pull_pause, .holds = NO_ATTEMPT},
    [PULL_CONNECT] = {pull_connect, NO_LEASE, TRACE_CONNECT, TIME(connect_ns)},
    [PULL_AGREE] = {pull_agree, NO_LEASE, TRACE_WAIT, TIME(wait_ns)},
    [PULL_TABLES] = {pull_tables, NO_LEASE, TRACE_CATALOG, TIME(catalog_ns)},
    [PULL_PLAN] = {pull_plan, NO_LEASE, TRACE_PLAN, TIME(plan_ns)},
    [PULL_SETTLE] = {pull_settle, NO_LEASE, TRACE_WRITE, TIME(write_ns)},
    [PULL_RANGES] = {pull_ranges, NO_LEASE, TRACE_PLAN, TIME(plan_ns)},
    [PULL_PATHS] = {pull_paths, NO_LEASE, TRACE_PATHS, TIME(connect_ns)},
    [PULL_CHOOSE] = {pull_choose, NO_LEASE, TRACE_PLAN, TIME(plan_ns)},
    [PULL_RECALL] = {pull_recall, NO_LEASE, TRACE_WRITE, TIME(write_ns)},
    [PULL_ROOM] = {.run = pull_room, .holds = NO_LEASE},
    [PULL_DETAIL] = {pull_detail, NO_LEASE, TRACE_PLAN, TIME(plan_ns)},
    [PULL_STREAMS] = {pull_streams, NO_LEASE, TRACE_CONNECT, TIME(connect_ns)},
    [PULL_BEGIN] = {pull_begin, NO_LEASE, TRACE_BEGIN, TIME(begin_ns)},
    [PULL_PATCHES] = {.run = pull_patches, .holds = LEASES},
    [PULL_READ] = {.run = pull_read, .holds = LEASES}, /* which tells of each rank */
    [PULL_VERIFY] = {pull_verify, LEASES, TRACE_DIGEST, TIME(verify_ns)},
    [PULL_END] = {pull_end, LEASES, TRACE_END, TIME(end_ns)},
    [PULL_APPLY] = {pull_apply, BYTES, TRACE_APPLY, TIME(apply_ns)},
    [PULL_COMPARE] = {pull_compare, BYTES, TRACE_DIGEST, TIME(verify_ns)},
    [PULL_PUBLISH] = {.run = pull_publish, .holds = BYTES},
};

/* Whether leases had been granted before the state @p at. */
static bool had_leases(pull_state at)
{
    return states[at].holds == LEASES || states[at].holds == BYTES;
}

/* ------------------------------------------------------------ trying again */

/* A session that has its leases begins no more attempts. */
static bool holds_leases(const pull *p, pull_state at)
{
    return p->session && (p->part || had_leases(at));
}

static bool may_restart(pull *p, pull_state at)
{
    switch (p->why.status) {
    case FANIN_ERR_STALE:
        return p->options->max_attempts == 0 || !had_leases(at) ||
               p->result->info.stale + 1 < p->options->max_attempts;
    case FANIN_ERR_CLOSED:
    case FANIN_ERR_UNREACHABLE:
        /* Lost on the way: its boxes may be had from a replica, or it is back. */
        return true;
    case FANIN_ERR_TRANSPORT:
        /* A checksum that does not fit says nothing of the next attempt's bytes. */
        if (p->why.sys_errno == EBADMSG)
            return true;
        return ++p->transport_failures < MAX_TRANSPORT_FAILURES;
    case FANIN_ERR_LIMIT:
        /* While bytes are read a rank has too many data connections, or too little memory for
           them: it may not have seen yet that those of a pull before, which was broken off, are
           closed. What this process has too little of has no phase. */
        return strcmp(p->why.phase, "read") == 0;
    default:
        return false;
    }
}

/* Who was lost on the way, or cannot read its memory: the next plan, of this pull or another,
   prefers others, as long as there are any. Where a path failed, another one is taken first. */
static void note_lost(const pull *p)
{
    fanin_status why = p->why.status;
    bool lost = why == FANIN_ERR_CLOSED || why == FANIN_ERR_UNREACHABLE ||
                why == FANIN_ERR_LIMIT;
    for (size_t i = 0; i < p->client->n_peers; i++) {
        peer *of = &p->client->peers[i];
        const path_reader *path = path_taken(p->publication, i)->path;
        bool fails = why == FANIN_ERR_TRANSPORT && path && path->is_fallback;
        if ((lost || fails) && strcmp(p->why.address, of->control->text) == 0)
            of->lost_ns = clock_ns();
    }
}

static void begin_again(pull *p, pull_state at)
{
    if (p->why.status != FANIN_ERR_STALE || !had_leases(at))
        p->lost = p->why;
    p->result->info.restarts++;
    log_write(&p->client->log, FANIN_LOG_DEBUG, "restart", "%s", p->why.message);
    if (p->destination->restart)
        p->destination->restart(p->destination->cookie);
}

/* ------------------------------------------------------------------ failing */

static fanin_status stale_error(const pull *p, bool outlasted, fanin_error *error)
{
    const fanin_result_info *info = &p->result->info;
    error_place place = {.phase = p->stale.phase,
                         .address = p->stale.address,
                         .key = p->publication->name,
                         .rank_plus_1 = p->stale.rank + 1};
    if (info->stale < ADVISE_AFTER && !outlasted) {
        place.remedy = "pull again";
        return error_set(error, FANIN_ERR_STALE, &place, "%s", p->stale.message);
    }
    uint64_t stable = 0;
    for (size_t i = 0; i < p->client->n_peers; i++) {
        if (p->announced[i].stable_ns > stable)
            stable = p->announced[i].stable_ns;
    }
    place.remedy = outlasted
                       ? "publish snapshots, which updates leave alone; or keep the "
                         "weights stable for as long as reading takes, or raise "
                         "the lease"
                       : "keep the weights stable for longer, raise the lease, or "
                         "publish snapshots";
    return error_set(
        error, FANIN_ERR_STALE, &place,
        "overtaken by the trainer in each of %u attempts: one reads for %.1f ms, a "
        "lease "
        "delays updates for %u ms, the weights are stable for %.1f ms (last: %s)",
        info->stale, (double)p->held_ns / 1e6, (unsigned)p->lease_ms,
        (double)stable / 1e6, p->stale.message);
}

/* Whether the last attempt was still reading when an update had no more to wait for it. */
static bool outlasted(const pull *p)
{
    return p->leased_ns > 0 && p->held_ns > (uint64_t)p->lease_ms * 1000000;
}

fanin_status pull_overtaken(pull *p, const fanin_error *why, fanin_error *error)
{
    p->held_ns = clock_ns() - p->leased_ns;
    if (why->status != FANIN_ERR_STALE || !outlasted(p))
        return error_copy(error, why);
    p->stale = *why;
    p->result->info.stale++;
    return stale_error(p, true, error);
}

/* The time went by with attempts to go on without something that was lost. */
static fanin_status lost_error(const pull *p, fanin_error *error)
{
    const fanin_error *lost = &p->lost;
    error_place place = {.phase = lost->phase,
                         .address = lost->address,
                         .key = lost->key,
                         .remedy = lost->remedy,
                         .rank_plus_1 = lost->rank + 1,
                         .sys_errno = lost->sys_errno};
    return error_set(error, FANIN_ERR_TIMEOUT, &place,
                     "the deadline passed after %u restarts (last: %s)",
                     p->result->info.restarts, lost->message);
}

/* An error of the agreement has a key, and tells of lost ranks itself; not if it was cut short
   right after something was lost: then nobody had the time to answer. */
static bool is_of_lost(const pull *p)
{
    bool at_once = clock_ns() - p->attempt_ns < MAX_LONG_PAUSE_MS * UINT64_C(1000000);
    return p->why.status == FANIN_ERR_TIMEOUT && p->lost.status != FANIN_OK &&
           (!p->why.key[0] || at_once);
}

/* The last word on why the pull failed in the state @p at. */
static void pull_explain(pull *p, pull_state at)
{
    fanin_error why = FANIN_ERROR_INIT;
    bool timeout = p->why.status == FANIN_ERR_TIMEOUT;
    if (at == PULL_PUBLISH)
        return;
    error_copy(&why, &p->why);
    if (holds_leases(p, at))
        (void)pull_overtaken(p, &why, &p->why);
    else if (p->result->info.stale > 0 && (timeout || why.status == FANIN_ERR_STALE))
        (void)stale_error(p, outlasted(p), &p->why);
    else if (is_of_lost(p))
        (void)lost_error(p, &p->why);
}

/* The function of the state @p at failed, and may have chosen what follows. */
static void pull_fail(pull *p, pull_state at)
{
    bool is_over =
        holds_leases(p, at) || p->destination->leak || p->state == PULL_FAILED;
    bool stale = p->why.status == FANIN_ERR_STALE && !holds_leases(p, at);
    bool again =
        !is_over && at != PULL_PAUSE && (p->state == PULL_PAUSE || may_restart(p, at));
    if (stale) {
        p->result->info.stale += had_leases(at);
        p->stale = p->why;
    }
    p->state = again ? PULL_PAUSE : PULL_FAILED;
    note_lost(p);
    if (again)
        begin_again(p, at);
    else
        pull_explain(p, at);
}

/* ------------------------------------------------------------------- stepping */

static void add_time(pull *p, pull_state of, uint64_t began, fanin_status status)
{
    uint64_t passed = clock_ns() - began;
    if (states[of].time == 0)
        return;
    span_of_call(p->client, states[of].name, began, status, NULL);
    *(uint64_t *)((char *)&p->result->info + states[of].time) += passed;
    pull_log_part(p, states[of].name, status, passed);
}

/* The attempt has left the state @p at: in the last one, or it failed. */
static void end_attempt(pull *p, pull_state at, fanin_status status)
{
    path_end_ahead(&p->goal);
    if (p->state != PULL_HELD)
        lease_round_abandon(p->client, p->leases);
    if (had_leases(at))
        p->held_ns = clock_ns() - p->leased_ns;
    span_of_call(p->client, TRACE_ATTEMPT, p->attempt_ns, status,
                 status == FANIN_OK ? NULL : p->why.message);
}

static void pull_step(pull *p)
{
    const pull_state at = p->state;
    const uint64_t began = clock_ns();
    fanin_status status = states[at].run(p, &p->why);
    add_time(p, at, began, status);
    if ((states[at].holds == NO_LEASE || states[at].holds == LEASES) &&
        !holds_leases(p, at) &&
        (status != FANIN_OK || p->state == PULL_HELD ||
         states[p->state].holds == BYTES))
        end_attempt(p, at, status);
    if (status != FANIN_OK)
        pull_fail(p, at);
}

fanin_status pull_go(pull *p, pull_state until, fanin_error *error)
{
    while (p->state != until && p->state != PULL_FAILED)
        pull_step(p);
    return p->state == until ? FANIN_OK : error_copy(error, &p->why);
}

/* -------------------------------------------------------------------- whole */

void pull_release(pull *p)
{
    if (p->leases)
        lease_round_abandon(p->client, p->leases);
    pull_patches_forget(p);
    pull_base_leave(p);
    free(p->announced);
    free(p->use);
    free(p->needed);
    free(p->versions);
    free(p->ranks);
    free(p->leases);
    fanin_result_free(&p->result);
    p->client->place = (trace_place){0};
}

fanin_status pull_open(pull *p, fanin_error *error)
{
    uint64_t began = p->destination->started_ns;
    p->started_ns = began ? began : clock_ns();
    p->at = p->started_ns + (uint64_t)p->options->timeout_ms * 1000000;
    p->client->place = (trace_place){.pull = trace_next_pull()};
    p->why = p->stale = p->lost = (fanin_error)FANIN_ERROR_INIT;
    size_t n = p->client->n_peers;
    p->publication = kept_of(p->client, p->options->publication);
    p->cache = p->publication ? plan_cache_of(p->publication, p->destination) : NULL;
    p->announced = calloc(n, sizeof *p->announced);
    p->use = calloc(n, sizeof *p->use);
    p->needed = calloc(n, sizeof *p->needed);
    p->versions = calloc(n, sizeof *p->versions);
    p->ranks = calloc(n, sizeof *p->ranks);
    p->leases = calloc(n, sizeof *p->leases);
    p->result = result_create(n);
    if (!p->cache || !p->announced || !p->use || !p->needed || !p->versions ||
        !p->ranks || !p->leases || !p->result)
        return error_set_memory(error);
    uint64_t now = clock_ns();
    p->publication->used_ns = now;
    if (now > KEEP_MAPPED_NS)
        path_unmap_idle(p->client, now - KEEP_MAPPED_NS);
    return FANIN_OK;
}

void pull_ended(pull *p, trace_name name, fanin_status status, const fanin_error *error)
{
    if (name == TRACE_PULL || status != FANIN_OK)
        pull_log_whole(p, status, error);
    if (!trace_on())
        return;
    trace_span span =
        trace_span_of(name, p->started_ns, status, p->options->publication);
    span.place = p->client->place;
    span.bytes = p->bytes;
    span.step = p->identity.step;
    trace_add(&span);
    trace_settle(status);
}

fanin_status pull_run(fanin_client *client, const fanin_pull_options *options,
                      destination *d, fanin_result **result_out, fanin_error *error)
{
    pull p = {.client = client, .options = options, .destination = d};
    fanin_status status = pull_open(&p, error);
    if (status == FANIN_OK)
        status = pull_go(&p, PULL_DONE, error);
    pull_ended(&p, TRACE_PULL, status, error);
    if (status == FANIN_OK && result_out) {
        *result_out = p.result;
        p.result = NULL;
    }
    pull_release(&p);
    return status;
}
