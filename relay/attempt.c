/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One try to get a step: the calling thread starts the threads that read, follows the list, breaks
 * off who is late, and sees the end.
 */
#include "inside.h"

#include "array.h"
#include "error_set.h"
#include "wake.h"
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FEEDS_MOST 127 /* holders that are read from */
/* So many hold all tensors whole, as each costs a plan; and with those that have nothing. */
#define WHOLE_MOST 4
#define WHOLE_TRIED_MOST 16
#define LOOK_MS 20 /* how often somebody may be found late */
/* When the trainer does not serve the step any more: what others have just proven becomes known
   within, and what they hold at all. Who can have no other step waits longer. */
#define GRACE_NS (100 * MS)
#define GRACE_LAST_NS (500 * MS)
#define HEAR_NS (1000 * MS)
#define HEAR_LAST_NS (5000 * MS)
#define TELL_NS (1000 * MS) /* numbers are told so often */
#define LIST_NS                                                                        \
    (500 * MS) /* the list is waited for so long before the trainer is read */
#define REMEMBER_NS (1000 * MS) /* who held the last step has so long to come */
#define LEAVE_NS (250 * MS)     /* sessions that end well have so long for it */

/* ------------------------------------------------------------------------- its sessions */

/* Up: a feed whose time runs out is not to find it before the attempt does. */
uint32_t attempt_left_ms(const attempt *a)
{
    uint64_t ms = (deadline_left_ns(a->at) + MS - 1) / MS;
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

typedef struct passing {
    const char *publication;
    uint64_t step;
    size_t ranks; /* that have committed a later one */
} passing;

static bool count_passed(void *cookie, const fanin_publication_info *info)
{
    passing *p = cookie;
    p->ranks += strcmp(info->name, p->publication) == 0 && info->step > p->step;
    return true;
}

/* A rank that is silent for longer is lost: what it does not say is left open. */
static uint32_t most_ms_for_ranks(const attempt *a)
{
    uint32_t left_ms = attempt_left_ms(a), lost_ms = a->relay->client_config.lost_ms;
    return left_ms < lost_ms ? left_ms : lost_ms;
}

/* Only FANIN_ERR_CANCELLED is an error. */
static fanin_status ask_ranks(const attempt *a, fanin_publication_fn fn, void *cookie,
                              fanin_error *error)
{
    fanin_status status =
        fanin_client_list(a->relay->origin, most_ms_for_ranks(a), fn, cookie, error);
    return status == FANIN_ERR_CANCELLED ? status : FANIN_OK;
}

fanin_status attempt_look_passed(attempt *a, uint64_t step, fanin_error *error)
{
    passing p = {.publication = a->relay->publication, .step = step};
    fanin_status status = ask_ranks(a, count_passed, &p, error);
    a->passed = p.ranks == a->relay->n_addresses;
    return status;
}

fanin_status attempt_begin_at_origin(const attempt *a, fanin_session **out,
                                     fanin_error *error)
{
    fanin_pull_options options = attempt_options(a);
    options.rule = FANIN_STEP_EXACT;
    options.step = a->step;
    if (a->passed)
        return error_set(error, FANIN_ERR_SUPERSEDED, NULL,
                         "step %" PRIu64 " of %s has passed", a->step,
                         a->relay->publication);
    fanin_status status = fanin_client_begin_into(a->relay->origin, &options,
                                                  a->relay->from_origin, out, error);
    if (status != FANIN_OK || relay_has_same_ranks(a->relay))
        return status;
    fanin_session_abandon(out);
    return error_set(error, FANIN_ERR_SUPERSEDED, NULL,
                     "the trainer has restarted: its step is of another launch");
}

/* --------------------------------------------------------------------------- the list */

static bool is_live(const feed *f)
{
    return !f->ended && !atomic_load(&f->stop);
}

static bool is_fed_by(const attempt *a, const holder *who)
{
    for (size_t i = 0; i < a->n_holders; i++) {
        const feed *f = a->holders[i];
        if (is_live(f) && member_compare(&f->who.who, &who->who) == 0)
            return true;
    }
    return false;
}

/* Holders are taken in this order, and by their ids. */
typedef enum round { ALIKE, WHOLE_HERE, WHOLE_ELSEWHERE } round;

static round round_of(const holder *who)
{
    return !who->is_whole ? ALIKE : who->is_here ? WHOLE_HERE : WHOLE_ELSEWHERE;
}

static int compare_holders(const void *a, const void *b)
{
    int order = (int)round_of(a) - (int)round_of(b);
    return order ? order
                 : member_compare(&((const holder *)a)->who, &((const holder *)b)->who);
}

/* Whether those that are read are all that may be. Who has nothing takes no place of others: it may
   be dead, or say what is not so. One that fills has a while. */
static bool are_whole_enough(const attempt *a)
{
    size_t useful = 0, all = 0;
    for (size_t i = 0; i < a->n_holders; i++) {
        const feed *f = a->holders[i];
        if (!f->who.is_whole || !is_live(f))
            continue;
        bool failed = atomic_load(&f->was_tried) && !atomic_load(&f->has_answered);
        bool is_new = !failed && clock_ns() - f->began_ns < LIST_NS;
        useful += is_new || atomic_load(&f->holds_units);
        all++;
    }
    return useful >= WHOLE_MOST || all >= WHOLE_TRIED_MOST;
}

static bool start_feed(attempt *a, const holder *who)
{
    fanin_error why = FANIN_ERROR_INIT;
    if (is_fed_by(a, who) || feed_start_holder(a, who, &why) == FANIN_OK)
        return true;
    log_write(&a->relay->log, FANIN_LOG_WARNING, "relay-holder",
              "the relay at %s is not read: %s; %s", who->address, why.message,
              why.remedy);
    return false;
}

/* Those of a round that follow this reader in a ring, so that few feeds join all. */
static bool start_ring(attempt *a, const holder *all, size_t n)
{
    size_t start = 0;
    bool good = true;
    while (start < n && member_compare(&all[start].who, &a->relay->self) < 0)
        start++;
    for (size_t i = 0; i < n && good; i++) {
        if (all->is_whole ? are_whole_enough(a) : i == FEEDS_MOST) {
            a->whole_left = all->is_whole;
            break;
        }
        good = start_feed(a, &all[(start + i) % n]);
    }
    return good;
}

static void start_feeds(attempt *a, holder *all, size_t n)
{
    qsort(all, n, sizeof *all, compare_holders);
    a->whole_left = false;
    for (size_t at = 0, end = 0; at < n; at = end) {
        while (end < n && round_of(&all[end]) == round_of(&all[at]))
            end++;
        if (!start_ring(a, &all[at], end - at))
            return;
    }
}

static void deal_duties(attempt *a, const holder *all, size_t n)
{
    member *members = calloc(n + 1, sizeof *members);
    size_t alike = 0;
    for (size_t i = 0; members && i < n; i++) {
        if (!all[i].is_whole)
            members[alike++] = all[i].who;
    }
    pthread_mutex_lock(&a->relay->lock);
    if (members)
        (void)!schedule_list(a->schedule, members, alike, clock_ns());
    a->relay->stats.holders = alike;
    a->n_others = n;
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
        feed *f = a->holders[i];
        const holder *h = find_holder(all, n, &f->who.who);
        if (!is_live(f))
            continue;
        if (h) {
            atomic_store(&f->is_in_list, !h->remembered);
            continue;
        }
        feed_stop(f);
        feed_break_off(f);
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

/* Whether as many have come as held the last step. One may have come in the place of another, such
   as the next copy of a cache, and who is not there is not waited for then. */
static bool have_all_come(const fanin_relay *r, const holder *all, size_t n)
{
    size_t alike = 0;
    for (size_t i = 0; i < n; i++)
        alike += !all[i].is_whole;
    return alike >= r->n_last;
}

static void follow_list(attempt *a)
{
    fanin_relay *r = a->relay;
    holder *all;
    size_t n;
    bool remembers = clock_ns() - a->listed_ns < REMEMBER_NS;
    if (!remembers && a->remembers)
        a->seen = 0; /* those that have not come are to go */
    if (a->whole_left && !are_whole_enough(a))
        a->seen = 0; /* others take the places of those that have nothing */
    if (!list_copy(r->list, &r->self, &a->seen, &all, &n))
        return;
    a->remembers = remembers && !have_all_come(r, all, n);
    if (a->remembers)
        add_remembered(a, &all, &n);
    n = without_blamed(r, all, n);
    take_list(a, all, n);
    if (!a->remembers && list_is_known(r->list))
        relay_forget_clients(r, all, n);
    free(all);
}

/* For the next step. Whoever holds all whole may hold that one in another place. */
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
    r->n_last = 0;
    r->last_whole = false;
    for (size_t i = 0; i < n; i++) {
        if (!all[i].is_whole)
            all[r->n_last++] = all[i];
        r->last_whole = r->last_whole || all[i].is_whole;
    }
}

/* Those that end with the attempt's time are still to tell what they owe. */
static void reap_feeds(attempt *a)
{
    bool over = deadline_passed(a->at);
    for (size_t i = 0; i < a->n_holders; i++) {
        feed *f = a->holders[i];
        if (!over && !f->ended && atomic_load(&f->done))
            feed_end(f);
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
        feed *f = a->holders[i];
        if (!f->ended && schedule_break_off(a->schedule, f->number, now))
            feed_break_off(f);
    }
    schedule_counts counts = schedule_get_counts(a->schedule);
    a->relay->stats.late = counts.late;
    a->relay->stats.taken_over = counts.taken_over;
    pthread_mutex_unlock(&a->relay->lock);
}

/* Lock held. */
static void note_owing(attempt *a)
{
    for (size_t i = 0; i < a->n_holders; i++) {
        const feed *f = a->holders[i];
        size_t owed = f->ended ? 0 : schedule_owed(a->schedule, f->number);
        if (owed <= a->owed)
            continue;
        a->owing = f;
        a->owed = owed;
    }
}

/* The threads have ended, and said what they know. */
static fanin_status missing_at_end(const attempt *a, size_t missing, fanin_error *error)
{
    const parts *p = &a->relay->parts;
    const fanin_error *why = &a->why_gone;
    bool has_why = why->status != FANIN_OK;
    char who[160] = "the trainer was to bring them", before[64] = "";
    error_place place = {.phase = "read",
                         .key = a->relay->publication,
                         .address = why->address,
                         .remedy = "allow more time, or look at the ranks with "
                                   "`nixl-fetch status`",
                         .rank_plus_1 = why->rank + 1};
    if (a->n_others > 0)
        snprintf(who, sizeof who, "others were to bring them");
    if (a->owing)
        snprintf(who, sizeof who, "the relay at %s was asked for %zu of them",
                 a->owing->who.address, a->owed);
    if (a->before > 0)
        snprintf(before, sizeof before, " in attempt %u", a->before + 1);
    return error_set(error, FANIN_ERR_TIMEOUT, &place,
                     "the deadline passed%s with %zu of %zu units of step %" PRIu64
                     " missing (%s%s%s%s)",
                     before, missing, p->n_units, a->step,
                     has_why ? "the trainer: " : "", why->message,
                     has_why && a->owing ? "; " : "", has_why && !a->owing ? "" : who);
}

/* Whether it is not known yet what others hold of the step. */
static bool are_answers_awaited(const attempt *a)
{
    for (size_t i = 0; i < a->n_holders; i++) {
        feed *f = a->holders[i];
        if (is_live(f) && atomic_load(&f->is_in_list) && !atomic_load(&f->has_answered))
            return true;
    }
    return false;
}

bool attempt_is_last(const attempt *a, fanin_status why)
{
    return a->options->rule == FANIN_STEP_EXACT || why == FANIN_ERR_UNREACHABLE ||
           why == FANIN_ERR_PAUSED;
}

/* Whether the trainer does not serve the step any more, and the others do not hold all that is
   left. Lock held. */
static bool is_step_gone(const attempt *a)
{
    bool last = attempt_is_last(a, a->why_gone.status);
    uint64_t grace = 0, since = a->gone_ns;
    if (!a->origin_gone || schedule_without_origin(a->schedule))
        return false;
    if (are_answers_awaited(a)) {
        grace = last ? HEAR_LAST_NS : HEAR_NS;
    } else if (a->n_others > 0) {
        grace = last ? GRACE_LAST_NS : GRACE_NS;
        since = a->news_ns > since ? a->news_ns : since;
    }
    return clock_ns() - since >= grace;
}

/* Whether it is over, and what has ended it: whether that is good is for require_units() to say. */
static fanin_status judge_attempt(attempt *a, bool *over, fanin_error *error)
{
    fanin_relay *relay = a->relay;
    fanin_status status = FANIN_OK;
    pthread_mutex_lock(&relay->lock);
    *over = true;
    if (schedule_left(a->schedule) == 0)
        status = FANIN_OK;
    else if (a->failed.status != FANIN_OK)
        status = error_copy(error, &a->failed);
    else if (atomic_exchange(&relay->cancelled, false))
        status = error_set(error, FANIN_ERR_CANCELLED, NULL, "the call was cancelled");
    else if (deadline_passed(a->at)) /* for which holders fail, too */
        status = FANIN_ERR_TIMEOUT;
    else if (is_step_gone(a))
        status = error_copy(error, &a->why_gone);
    else
        *over = false;
    if (*over)
        note_owing(a);
    pthread_mutex_unlock(&relay->lock);
    return status;
}

/* However the attempt has ended: it is good if somebody has brought every unit, and only then. */
static fanin_status require_units(const attempt *a, fanin_status ended,
                                  fanin_error *error)
{
    size_t missing = 0;
    for (size_t u = 0; u < a->relay->parts.n_units; u++)
        missing += a->bringers[u] == NULL;
    if (ended != FANIN_OK && ended != FANIN_ERR_TIMEOUT)
        return ended;
    return missing == 0 ? FANIN_OK : missing_at_end(a, missing, error);
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

/* Those that can end their sessions well, the others at once. When time has run out the trainer's
   says itself on whom it has waited. */
static void end_feeds(attempt *a, fanin_status status)
{
    if (status != FANIN_ERR_TIMEOUT)
        feed_stop(&a->origin);
    for (size_t i = 0; i < a->n_holders; i++) {
        if (!a->holders[i]->ended)
            feed_stop(a->holders[i]);
    }
    bool waits = status == FANIN_OK || status == FANIN_ERR_TIMEOUT;
    deadline until = clock_ns() + (waits ? LEAVE_NS : 0);
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
    if (a->schedule && a->passed)
        schedule_without_trainer(a->schedule);
    return a->bringers && a->schedule ? FANIN_OK : error_set_memory(error);
}

void attempt_free(attempt *a)
{
    for (size_t i = 0; i < a->n_holders; i++)
        free(a->holders[i]);
    free(a->holders);
    free(a->bringers);
    schedule_free(a->schedule);
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

static fanin_status blame(const attempt *a, const feed *f, const fanin_error *why,
                          fanin_error *error)
{
    fanin_relay *r = a->relay;
    error_place place = {.phase = "verify",
                         .address = f->who.address,
                         .key = why->key,
                         .remedy =
                             "look at that worker's host, and at those that it reads "
                             "from; pull again, which does without it"};
    if (array_reserve(&r->blamed, &r->blamed_capacity, r->n_blamed + 1,
                      sizeof *r->blamed))
        r->blamed[r->n_blamed++] = f->who.who;
    return error_set(error, FANIN_ERR_TRANSPORT, &place,
                     "the relay at %s brought other bytes than the trainer holds: %s",
                     f->who.address, why->message);
}

/* Relay by relay, so that an error leads to the one. */
static fanin_status verify_relayed(attempt *a, fanin_session *session,
                                   fanin_error *error)
{
    const parts *p = &a->relay->parts;
    group_run *runs = calloc(p->n_units, sizeof *runs);
    fanin_status status = runs ? FANIN_OK : error_set_memory(error);
    for (size_t i = 0; i < a->n_holders && status == FANIN_OK; i++) {
        fanin_error why = FANIN_ERROR_INIT;
        size_t n = 0;
        for (uint32_t u = 0; u < p->n_units; u++) {
            if (a->bringers[u] == a->holders[i])
                runs[n++] = tensors_of_units(p->unit_first, (unit_run){u, 1});
        }
        if (n > 0)
            status = pull_session_verify(session, runs, n, &why);
        if (status == FANIN_ERR_TRANSPORT)
            status = blame(a, a->holders[i], &why, error);
        else
            error_copy(error, &why);
    }
    free(runs);
    return status;
}

static fanin_status refuse_unverified(const attempt *a, fanin_error *error)
{
    error_place place = {.phase = "verify",
                         .key = a->relay->publication,
                         .remedy = "pull a later step, or this one without verify"};
    return error_set(error, FANIN_ERR_SUPERSEDED, &place,
                     "relays brought step %" PRIu64
                     ", which the trainer has passed and cannot compare any more",
                     a->step);
}

/* The ranks, which have not served it, digest what relays brought. */
static fanin_status verify(attempt *a, fanin_error *error)
{
    fanin_session *session = NULL;
    fanin_status status = attempt_begin_at_origin(a, &session, error);
    if (status == FANIN_ERR_SUPERSEDED)
        return refuse_unverified(a, error);
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
    int32_t rank; /* that has taken the step back; -1: none */
} inquiry;

static bool look_at_rank(void *cookie, const fanin_publication_info *info)
{
    inquiry *q = cookie;
    if (strcmp(info->name, q->of->relay->publication) != 0 ||
        info->taken_back != q->of->step + 1)
        return true;
    q->rank = (int32_t)info->rank;
    return false;
}

static fanin_status refuse_withdrawn(const attempt *a, int32_t rank, fanin_error *error)
{
    error_place place = {.phase = "end",
                         .key = a->relay->publication,
                         .rank_plus_1 = rank + 1,
                         .remedy = "pull another step, or the newest"};
    return error_set(error, FANIN_ERR_STALE, &place,
                     "rank %d has taken step %" PRIu64 " back", (int)rank, a->step);
}

/* Of a step that all ranks have passed the one that keeps the list knows it, if it was taken back
   before another one was. That rank; -1: it was not. */
static int32_t find_taken_back(const attempt *a)
{
    deadline until = deadline_in_ms(most_ms_for_ranks(a));
    while (!list_is_known(a->relay->list) && !deadline_passed(until) &&
           !atomic_load(&a->relay->cancelled))
        sleep_a_little(a->relay);
    return list_stale_rank(a->relay->list);
}

/* What others have brought is of the step; whether the step still stands is for the trainer to say.
   One that is away says nothing. */
static fanin_status check_standing(const attempt *a, fanin_error *error)
{
    inquiry q = {.of = a, .rank = -1};
    fanin_status status = FANIN_OK;
    if (a->passed)
        q.rank = find_taken_back(a);
    else
        status = ask_ranks(a, look_at_rank, &q, error);
    return status == FANIN_OK && q.rank >= 0 ? refuse_withdrawn(a, q.rank, error)
                                             : status;
}

static bool were_all_tried(const attempt *a)
{
    bool all = true;
    for (size_t i = 0; i < a->n_holders; i++)
        all = all && atomic_load(&a->holders[i]->was_tried);
    return all;
}

/* What others have, or take, is not to be read of the trainer by who has just come, or where some
   hold all: the list is waited for, and what those in it have. A lease that is not used meanwhile
   would hold up the trainer: @p session goes, and is begun anew. */
static void await_others(attempt *a, fanin_session **session)
{
    a->listed_ns = clock_ns();
    deadline until = a->listed_ns + LIST_NS, unused = a->listed_ns + LINGER_NS;
    bool waits = a->relay->n_last == 0 || a->relay->last_whole;
    while (waits && !list_is_known(a->relay->list) && !deadline_passed(until) &&
           !atomic_load(&a->relay->cancelled)) {
        sleep_a_little(a->relay);
        if (deadline_passed(unused))
            fanin_session_abandon(session);
    }
    follow_list(a);
    until = clock_ns() + LINGER_NS;
    while (!were_all_tried(a) && !deadline_passed(until) &&
           !atomic_load(&a->relay->cancelled)) {
        sleep_a_little(a->relay);
        follow_list(a);
    }
}

fanin_status attempt_run(attempt *a, fanin_session *session, fanin_error *error)
{
    fanin_status status = open_attempt(a, error);
    if (status == FANIN_OK) {
        await_others(a, &session);
        status = feed_start_origin(a, session, error); /* whose the session is now */
    } else {
        fanin_session_abandon(&session);
    }
    if (status != FANIN_OK) {
        end_feeds(a, status);
        return status;
    }
    status = follow(a, error);
    remember_list(a);
    end_feeds(a, status);
    status = require_units(a, status, error);
    if (status == FANIN_OK && attempt_relayed(a) > 0)
        status = check_standing(a, error);
    if (status == FANIN_OK && a->options->verify)
        status = verify(a, error);
    return status;
}
