/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One try to get a step: the calling thread starts the threads that read, follows the list, breaks
 * off who is late, and sees the end.
 */
#include "inside.h"

#include "array.h"
#include "error_set.h"
#include "pull/pull_session.h"
#include "wake.h"
#include <inttypes.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FEEDS_MOST 127      /* holders that are read from */
#define LOOK_MS 20          /* how often somebody may be found late */
#define GRACE_NS (500 * MS) /* what others have just proven becomes known within */
#define HEAR_NS (5000 * MS) /* and what they hold at all */
#define TELL_NS (1000 * MS) /* numbers are told so often */
#define LIST_NS                                                                        \
    (500 * MS)      /* the list is waited for so long before the trainer is read */
#define ASK_MS 1000 /* the ranks say within whether the step stands */
#define REMEMBER_NS (1000 * MS) /* who held the last step has so long to come */
#define LEAVE_NS (250 * MS)     /* sessions that end well have so long for it */

/* ------------------------------------------------------------------------- its sessions */

uint32_t attempt_left_ms(const attempt *a)
{
    uint64_t ms = deadline_left_ns(a->at) / MS;
    return ms == 0 ? 1 : ms < UINT32_MAX ? (uint32_t)ms : UINT32_MAX;
}

fanin_pull_options attempt_options(const attempt *a)
{
    fanin_pull_options o = *a->options;
    o.timeout_ms = attempt_left_ms(a);
    o.progress = NULL;
    o.rank_progress = NULL;
    return o;
}

fanin_status attempt_begin_at_origin(const attempt *a, fanin_session **out,
                                     fanin_error *error)
{
    fanin_pull_options options = attempt_options(a);
    options.rule = FANIN_STEP_EXACT;
    options.step = a->step;
    fanin_status status =
        fanin_client_begin_into(a->relay->origin, &options, a->from_origin, out, error);
    if (status != FANIN_OK || relay_has_same_ranks(a->relay))
        return status;
    fanin_session_abandon(out);
    return error_set(error, FANIN_ERR_SUPERSEDED, NULL,
                     "the trainer has restarted: its step is of another launch");
}

/* --------------------------------------------------------------------------- the list */

static bool is_fed_by(const attempt *a, const holder *who)
{
    for (size_t i = 0; i < a->n_holders; i++) {
        feed *l = a->holders[i];
        if (!l->ended && !atomic_load(&l->stop) &&
            member_compare(&l->who.who, &who->who) == 0)
            return true;
    }
    return false;
}

static int compare_holders(const void *a, const void *b)
{
    return member_compare(&((const holder *)a)->who, &((const holder *)b)->who);
}

/* Those that follow this reader in a ring, so that few feeds join all. */
static void start_feeds(attempt *a, holder *all, size_t n)
{
    size_t start = 0;
    qsort(all, n, sizeof *all, compare_holders);
    while (start < n && member_compare(&all[start].who, &a->relay->self) < 0)
        start++;
    for (size_t i = 0; i < n && i < FEEDS_MOST; i++) {
        const holder *who = &all[(start + i) % n];
        fanin_error why = FANIN_ERROR_INIT;
        if (is_fed_by(a, who) || feed_start_holder(a, who, &why) == FANIN_OK)
            continue;
        log_write(&a->relay->log, FANIN_LOG_WARNING, "relay-holder",
                  "the relay at %s is not read: %s; %s", who->address, why.message,
                  why.remedy);
        return;
    }
}

static void deal_duties(attempt *a, const holder *all, size_t n)
{
    member *members = calloc(n + 1, sizeof *members);
    for (size_t i = 0; members && i < n; i++)
        members[i] = all[i].who;
    pthread_mutex_lock(&a->relay->lock);
    if (members)
        (void)!schedule_list(a->schedule, members, n, clock_ns());
    a->relay->stats.holders = n;
    pthread_mutex_unlock(&a->relay->lock);
    free(members);
}

/* NULL: it is not among them. */
static const holder *find_holder(const holder *all, size_t n, const member *who)
{
    for (size_t i = 0; i < n; i++) {
        if (member_compare(&all[i].who, who) == 0)
            return &all[i];
    }
    return NULL;
}

/* Whoever held the last step is taken to want this one, too, and to tell so soon: it is waited for
   by a session at it, and has its duties. *@p all grows. */
static void add_remembered(attempt *a, holder **all, size_t *n)
{
    const fanin_relay *r = a->relay;
    holder *more = calloc(*n + r->n_last + 1, sizeof *more);
    if (!more)
        return;
    if (*n > 0)
        memcpy(more, *all, *n * sizeof *more);
    size_t sum = *n;
    for (size_t i = 0; i < r->n_last; i++) {
        if (find_holder(*all, *n, &r->last[i].who))
            continue;
        more[sum] = r->last[i];
        more[sum++].remembered = true;
    }
    free(*all);
    *all = more;
    *n = sum;
}

/* The list, from which those that were remembered may have gone. */
static void take_list(attempt *a, holder *all, size_t n)
{
    deal_duties(a, all, n);
    for (size_t i = 0; i < a->n_holders; i++) {
        feed *l = a->holders[i];
        const holder *h = find_holder(all, n, &l->who.who);
        if (l->ended || atomic_load(&l->stop))
            continue;
        if (h) {
            atomic_store(&l->listed, !h->remembered);
            continue;
        }
        feed_stop(l);
        feed_break_off(l);
    }
    if (n > 0)
        start_feeds(a, all, n);
    feeds_wake(a);
}

static size_t without_blamed(const fanin_relay *r, holder *all, size_t n)
{
    size_t kept = 0;
    for (size_t i = 0; i < n; i++) {
        bool blamed = false;
        for (size_t j = 0; j < r->n_blamed && !blamed; j++)
            blamed = member_compare(&r->blamed[j], &all[i].who) == 0;
        if (!blamed)
            all[kept++] = all[i];
    }
    return kept;
}

static void follow_list(attempt *a)
{
    fanin_relay *r = a->relay;
    holder *all;
    size_t n;
    bool remembers = clock_ns() - a->listed_ns < REMEMBER_NS;
    if (!remembers && a->remembers)
        a->seen = 0; /* those that have not come are to go */
    if (!list_copy(r->list, &r->self, &a->seen, &all, &n))
        return;
    a->remembers = remembers && r->n_last > 0;
    if (a->remembers)
        add_remembered(a, &all, &n);
    n = without_blamed(r, all, n);
    take_list(a, all, n);
    if (!a->remembers && list_is_known(r->list))
        relay_forget_clients(r, all, n);
    free(all);
}

/* For the next step. */
static void remember_list(attempt *a)
{
    fanin_relay *r = a->relay;
    uint64_t seen = 0;
    holder *all;
    size_t n;
    if (!list_is_known(r->list) || !list_copy(r->list, &r->self, &seen, &all, &n))
        return;
    free(r->last);
    r->last = all;
    r->n_last = n;
}

static void reap_feeds(attempt *a)
{
    for (size_t i = 0; i < a->n_holders; i++) {
        feed *l = a->holders[i];
        if (!l->ended && atomic_load(&l->done))
            feed_end(l);
    }
}

/* ----------------------------------------------------------------------- looking around */

static void break_off_late(attempt *a)
{
    uint64_t now = clock_ns();
    pthread_mutex_lock(&a->relay->lock);
    if (schedule_break_off(a->schedule, SCHEDULE_ORIGIN, now))
        feed_break_off(&a->origin);
    for (size_t i = 0; i < a->n_holders; i++) {
        feed *l = a->holders[i];
        if (!l->ended && schedule_break_off(a->schedule, l->number, now))
            feed_break_off(l);
    }
    schedule_counts counts = schedule_get_counts(a->schedule);
    a->relay->stats.late = counts.late;
    a->relay->stats.taken_over = counts.taken_over;
    pthread_mutex_unlock(&a->relay->lock);
}

static fanin_status missing_at_end(const attempt *a, size_t left, fanin_error *error)
{
    const parts *p = &a->relay->parts;
    const fanin_error *why = &a->why_gone;
    error_place place = {.phase = "read",
                         .key = a->relay->publication,
                         .address = why->address,
                         .remedy = "allow more time, or look at the ranks with "
                                   "`nixl-fetch status`",
                         .rank_plus_1 = why->rank + 1};
    return error_set(error, FANIN_ERR_TIMEOUT, &place,
                     "the deadline passed with %zu of %zu units of step %" PRIu64
                     " missing (the trainer: %s)",
                     left, p->n_units, a->step,
                     why->status == FANIN_OK ? "is being read" : why->message);
}

/* Whether it is not known yet what others hold. */
static bool is_hearing(const attempt *a)
{
    for (size_t i = 0; i < a->n_holders; i++) {
        feed *l = a->holders[i];
        if (!l->ended && !atomic_load(&l->stop) && !atomic_load(&l->heard))
            return true;
    }
    return false;
}

/* What is to be returned now; FANIN_OK with *over false: it goes on. */
static fanin_status judge_attempt(attempt *a, bool *over, fanin_error *error)
{
    fanin_relay *relay = a->relay;
    fanin_status status = FANIN_OK;
    pthread_mutex_lock(&relay->lock);
    size_t left = schedule_left(a->schedule);
    uint64_t grace = is_hearing(a) ? HEAR_NS : relay->stats.holders > 0 ? GRACE_NS : 0;
    bool lost = a->origin_gone && !schedule_without_origin(a->schedule) &&
                clock_ns() - a->gone_ns >= grace;
    *over = true;
    if (left == 0)
        status = FANIN_OK;
    else if (a->failed.status != FANIN_OK)
        status = error_copy(error, &a->failed);
    else if (atomic_exchange(&relay->cancelled, false))
        status = error_set(error, FANIN_ERR_CANCELLED, NULL, "the call was cancelled");
    else if (lost)
        status = error_copy(error, &a->why_gone);
    else if (deadline_passed(a->at))
        status = missing_at_end(a, left, error);
    else
        *over = false;
    pthread_mutex_unlock(&relay->lock);
    return status;
}

static void sleep_a_little(const fanin_relay *relay)
{
    struct pollfd fd = {relay->wake, POLLIN, 0};
    poll(&fd, 1, LOOK_MS);
    wake_heard(relay->wake);
}

static void tell_progress(attempt *a, uint64_t *told_ns)
{
    const fanin_pull_options *o = a->options;
    uint64_t now = clock_ns();
    pthread_mutex_lock(&a->relay->lock);
    uint64_t done = a->bytes_done;
    pthread_mutex_unlock(&a->relay->lock);
    if (o->progress)
        o->progress(o->progress_cookie, done, a->relay->parts.bytes);
    if (now - *told_ns < TELL_NS)
        return;
    *told_ns = now;
    relay_tell(a->relay);
}

/* -------------------------------------------------------------------------- life cycle */

static bool feeds_done(attempt *a)
{
    bool done = !a->origin.started || atomic_load(&a->origin.done);
    for (size_t i = 0; i < a->n_holders; i++)
        done = done && (a->holders[i]->ended || atomic_load(&a->holders[i]->done));
    return done;
}

/* Those that can end their sessions well, the others at once. */
static void end_feeds(attempt *a, bool good)
{
    feed_stop(&a->origin);
    for (size_t i = 0; i < a->n_holders; i++) {
        if (!a->holders[i]->ended)
            feed_stop(a->holders[i]);
    }
    deadline until = clock_ns() + (good ? LEAVE_NS : 0);
    while (!feeds_done(a) && !deadline_passed(until))
        sleep_a_little(a->relay);
    if (a->origin.started && !atomic_load(&a->origin.done))
        feed_break_off(&a->origin);
    for (size_t i = 0; i < a->n_holders; i++) {
        if (!a->holders[i]->ended && !atomic_load(&a->holders[i]->done))
            feed_break_off(a->holders[i]);
    }
    feed_end(&a->origin);
    for (size_t i = 0; i < a->n_holders; i++) {
        if (!a->holders[i]->ended)
            feed_end(a->holders[i]);
    }
}

static fanin_status open_attempt(attempt *a, fanin_error *error)
{
    const parts *p = &a->relay->parts;
    pthread_mutex_init(&a->feeds_lock, NULL);
    a->origin.wake.fd = -1;
    a->origin.of = a;
    a->failed = a->why_gone = (fanin_error)FANIN_ERROR_INIT;
    a->bringers = calloc(p->n_units, sizeof *a->bringers);
    a->schedule =
        schedule_create(p->unit_size, p->n_units, &a->relay->self, clock_ns());
    if (!a->bringers || !a->schedule)
        return error_set_memory(error);
    fanin_status status =
        fanin_destination_create(p->origin, p->n, &a->from_origin, error);
    return status == FANIN_OK
               ? fanin_destination_create(p->own, p->n, &a->from_holders, error)
               : status;
}

void attempt_free(attempt *a)
{
    for (size_t i = 0; i < a->n_holders; i++)
        free(a->holders[i]);
    free(a->holders);
    free(a->bringers);
    schedule_free(a->schedule);
    fanin_destination_free(&a->from_origin);
    fanin_destination_free(&a->from_holders);
    fanin_result_free(&a->origin.result);
    pthread_mutex_destroy(&a->feeds_lock);
}

static fanin_status follow(attempt *a, fanin_error *error)
{
    uint64_t told_ns = 0;
    for (bool over = false; !over;) {
        follow_list(a);
        reap_feeds(a);
        break_off_late(a);
        fanin_status status = judge_attempt(a, &over, error);
        tell_progress(a, &told_ns);
        if (over)
            return status;
        sleep_a_little(a->relay);
    }
    return FANIN_OK;
}

uint64_t attempt_relayed(const attempt *a)
{
    const parts *p = &a->relay->parts;
    uint64_t bytes = 0;
    for (size_t u = 0; u < p->n_units; u++)
        bytes += a->bringers[u] != &a->origin ? p->unit_size[u] : 0;
    return bytes;
}

/* --------------------------------------------------------------------------- verifying */

static fanin_status blame(const attempt *a, size_t unit, const fanin_error *why,
                          fanin_error *error)
{
    fanin_relay *r = a->relay;
    error_place place = {.phase = "verify",
                         .address = a->bringers[unit]->who.address,
                         .key = why->key,
                         .remedy =
                             "look at that worker's host, and at those that it reads "
                             "from; pull again, which does without it"};
    if (array_reserve(&r->blamed, &r->blamed_capacity, r->n_blamed + 1,
                      sizeof *r->blamed))
        r->blamed[r->n_blamed++] = a->bringers[unit]->who.who;
    return error_set(error, FANIN_ERR_TRANSPORT, &place,
                     "the relay at %s brought other bytes than the trainer holds: %s",
                     a->bringers[unit]->who.address, why->message);
}

/* Run by run, so that an error leads to the relay. */
static fanin_status verify_relayed(attempt *a, fanin_session *session,
                                   fanin_error *error)
{
    const parts *p = &a->relay->parts;
    for (size_t u = 0, end; u < p->n_units; u = end) {
        fanin_error why = FANIN_ERROR_INIT;
        for (end = u + 1; end < p->n_units && a->bringers[end] == a->bringers[u];)
            end++;
        if (a->bringers[u] == &a->origin)
            continue;
        fanin_status status = pull_session_verify(
            session, p->unit_first[u], p->unit_first[end] - p->unit_first[u], &why);
        if (status == FANIN_ERR_TRANSPORT)
            return blame(a, u, &why, error);
        if (status != FANIN_OK)
            return error_copy(error, &why);
    }
    return FANIN_OK;
}

/* The ranks, which have not served it, digest what relays brought. */
static fanin_status verify(attempt *a, fanin_error *error)
{
    fanin_session *session = NULL;
    fanin_status status = attempt_begin_at_origin(a, &session, error);
    if (status == FANIN_OK)
        status = verify_relayed(a, session, error);
    if (status == FANIN_OK)
        status = fanin_session_end(&session, NULL, error);
    fanin_session_abandon(&session);
    return status;
}

/* -------------------------------------------------------------------------- withdrawals */

typedef struct inquiry {
    const attempt *of;
    bool withdrawn;
    uint32_t rank;
} inquiry;

static bool look_at_rank(void *cookie, const fanin_publication_info *info)
{
    inquiry *q = cookie;
    if (strcmp(info->name, q->of->relay->publication) != 0 ||
        info->step != q->of->step || info->state != FANIN_PUBLICATION_UNPUBLISHED)
        return true;
    q->withdrawn = true;
    q->rank = info->rank;
    return false;
}

/* What others have brought is of the step; whether the step still stands is for the trainer to say.
   One that is away, or further, says nothing. */
static fanin_status check_standing(const attempt *a, fanin_error *error)
{
    inquiry q = {.of = a};
    uint32_t left = attempt_left_ms(a);
    (void)!fanin_client_list(a->relay->origin, left < ASK_MS ? left : ASK_MS,
                             look_at_rank, &q, NULL);
    if (!q.withdrawn)
        return FANIN_OK;
    error_place place = {.phase = "end",
                         .key = a->relay->publication,
                         .rank_plus_1 = (int32_t)q.rank + 1,
                         .remedy = "pull again"};
    return error_set(error, FANIN_ERR_STALE, &place,
                     "rank %u has taken step %" PRIu64 " back", q.rank, a->step);
}

/* What others have, or take, is not to be read of the trainer by who has just come. */
static void await_list(attempt *a)
{
    a->listed_ns = clock_ns();
    deadline until = a->listed_ns + LIST_NS;
    while (a->relay->n_last == 0 && !list_is_known(a->relay->list) &&
           !deadline_passed(until) && !atomic_load(&a->relay->cancelled))
        sleep_a_little(a->relay);
    follow_list(a);
}

fanin_status attempt_run(attempt *a, fanin_session *session, fanin_error *error)
{
    fanin_status status = open_attempt(a, error);
    if (status == FANIN_OK)
        await_list(a);
    if (status == FANIN_OK)
        status = feed_start_origin(a, session, error);
    if (status != FANIN_OK) {
        fanin_session_abandon(&session);
        end_feeds(a, false);
        return status;
    }
    status = follow(a, error);
    remember_list(a);
    end_feeds(a, status == FANIN_OK);
    if (status == FANIN_OK && attempt_relayed(a) > 0)
        status = check_standing(a, error);
    if (status == FANIN_OK && a->options->verify)
        status = verify(a, error);
    return status;
}
