/* SPDX-License-Identifier: Apache-2.0 */
/* A publication's states and epochs:

       unpublished --commit--> stable --begin_update--> draining --> writing --commit--> stable
                                                                        `--abort--> unpublished
       stable --pause--> draining --> paused --resume--> stable
       unpublished --pause--> paused --resume--> unpublished

   A publication is readable while it is stable or draining; its epoch is odd otherwise. */
#include "publish/publication.h"
#include "core/rules.h"
#include "core/wake.h"
#include "error_set.h"
#include "publish/garbage.h"
#include "publish/drain.h"

#include <time.h>

/* ------------------------------------------------------------------ states */

const char *state_name(publication_state state)
{
    static const char *const names[] = {"unpublished", "stable", "draining", "writing",
                                        "paused"};
    return names[state];
}

/* Sets the state, remembers the change and wakes the control thread. */
static void enter(fanin_server *s, publication *p, publication_state state)
{
    p->state = state;
    p->entered_at = clock_ns();
    p->history[p->changes % HISTORY] = (state_change){p->step, state};
    p->changes++;
    if (s->listeners == 0 || s->is_woken)
        return;
    s->is_woken = true;
    wake_up(s->wake);
}

static void count_stable(publication *p)
{
    if (p->state == STATE_STABLE)
        p->stable_ns[p->n_stable++ % STABLE_SAMPLES] = clock_ns() - p->entered_at;
}

uint64_t publication_stable_ns(const publication *p)
{
    unsigned n = p->n_stable < STABLE_SAMPLES ? p->n_stable : STABLE_SAMPLES;
    uint64_t sum = 0;
    for (unsigned i = 0; i < n; i++)
        sum += p->stable_ns[i] / n;
    return sum;
}

bool publication_has_copies(const publication *p)
{
    return (p->mode == MODE_SNAPSHOT && p->state == STATE_STABLE) ||
           (p->pending && p->pending->mode == MODE_SNAPSHOT);
}

bool publication_is_away(const publication *p)
{
    return p->paused && p->state != STATE_STABLE;
}

fanin_status publication_refuse_paused(const publication *p, const char *phase,
                                       fanin_error *error)
{
    error_place place = {.phase = phase, .remedy = "resume it first"};
    return error_set(error, FANIN_ERR_STATE, &place, "%s is paused: resume it first",
                     p->name);
}

/* ------------------------------------------------------------------- reads */

bool publication_read_enter(fanin_server *s, publication *p, uint64_t epoch)
{
    if (!publication_stands(p, epoch) && RULE(RULE_SEND_CHECK))
        return false;
    reading *slot = NULL;
    for (size_t i = 0; i < READING_EPOCHS; i++) {
        reading *r = &p->reading[i];
        if (r->count > 0 && r->epoch == epoch) {
            r->count++;
            return true;
        }
        if (r->count == 0)
            slot = r;
    }
    if (!slot) {
        /* What cannot be announced is not read, so the end must not be good either. */
        lease_void_epoch(s, p, epoch);
        return false;
    }
    *slot = (reading){epoch, 1};
    return true;
}

void publication_read_leave(fanin_server *s, publication *p, uint64_t epoch)
{
    for (size_t i = 0; i < READING_EPOCHS; i++)
        if (p->reading[i].count > 0 && p->reading[i].epoch == epoch) {
            p->reading[i].count--;
            break;
        }
    if (!publication_stands(p, epoch))
        pthread_cond_broadcast(&s->freed);
}

static bool reads_what_has_gone(const publication *p)
{
    for (size_t i = 0; i < READING_EPOCHS; i++)
        if (p->reading[i].count > 0 && !publication_stands(p, p->reading[i].epoch))
            return true;
    return false;
}

/* A send never blocks, so this is as short as one copy of at most 1 MiB; copies out of device
   memory give up on their own. */
void publication_wait_for_reads(fanin_server *s, publication *p)
{
    while (RULE(RULE_SEND_WAIT) && reads_what_has_gone(p))
        pthread_cond_wait(&s->freed, &s->lock);
}

void publication_wait_for_drain(fanin_server *s, publication *p)
{
    while (p->state == STATE_DRAINING)
        pthread_cond_wait(&s->freed, &s->lock);
}

/* ------------------------------------------------------------------ effect */

void publication_take_effect(fanin_server *s, publication *p, shard_catalog *catalog,
                             uint64_t epoch)
{
    if (p->catalog != catalog) {
        catalog_discard(s, p->catalog);
        p->catalog = shard_catalog_retain(catalog);
    }
    p->epoch = epoch;
    enter(s, p, STATE_STABLE);
}

/* The commit is not the publication's pending one any more. */
static void conclude(commit *c, commit_outcome outcome)
{
    c->outcome = outcome;
    c->of->pending = NULL;
    c->of->filling = NULL;
    commit_token_conclude(&c->token);
}

static uint64_t time_of_day_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* Readers of the copy that was published until now may finish. */
static void commit_effect(fanin_server *s, publication *p, commit *c)
{
    bool copy = c->mode == MODE_SNAPSHOT;
    uint64_t epoch = copy && RULE(RULE_ARENA_RAISE) ? c->generation : next_even(s);
    if (copy) {
        count_stable(p);
        p->previous = p->state == STATE_STABLE ? p->epoch : 0;
        p->arena = c->arena;
    }
    p->mode = c->mode;
    p->cast = c->cast;
    p->has_step = true;
    p->step = c->step;
    p->committed_at = clock_ns();
    p->committed_unix_ns = time_of_day_ns();
    s->stats.commits++;
    publication_take_effect(s, p, c->catalog, epoch);
    if (copy)
        lease_void_outdated(s, p);
    conclude(c, COMMIT_EFFECTIVE);
}

/* -------------------------------------------------------------- withdrawal */

static void reopen(publication *p, const commit *c)
{
    p->update_open = p->update_open || c->was_open;
    p->aborted = p->aborted || c->was_aborted;
}

/* For commit_tidy() to log, in this order. */
static void remember(fanin_server *s, commit *c)
{
    commit **last = &s->untold;
    while (*last)
        last = &(*last)->untold;
    commit_token_retain(&c->token);
    *last = c;
    wake_up(s->wake);
}

static void withdraw(fanin_server *s, commit *c, const char *why)
{
    c->why = why;
    reopen(c->of, c);
    if (c->on_stream) {
        s->stats.commits_withdrawn++;
        remember(s, c);
    }
    conclude(c, COMMIT_WITHDRAWN);
}

void publication_fail(commit *c)
{
    if (c->of->pending != c)
        return;
    reopen(c->of, c);
    conclude(c, COMMIT_FAILED);
}

void publication_settle(fanin_server *s, publication *p)
{
    commit *c = p->pending;
    bool failed;
    if (!c || !commit_token_is_due(&c->token, &failed))
        return;
    bool stands = p->present && (p->epoch == c->closing || !RULE(RULE_LATE_EFFECT));
    if (failed) {
        remember(s, c);
        publication_fail(c);
    } else if (stands) {
        commit_effect(s, p, c);
    } else {
        withdraw(s, c, "another update began before its stream was done");
    }
}

void publication_withdraw(fanin_server *s, publication *p, const char *why)
{
    publication_settle(s, p);
    if (p->pending)
        withdraw(s, p->pending, why);
}

/* ----------------------------------------------------------------- advance */

/* Waits until no lease is left that is to be waited for. */
static void drain_readers(fanin_server *s, publication *p)
{
    drain d;
    enter(s, p, STATE_DRAINING);
    if (!RULE(RULE_DRAIN))
        return;
    drain_begin(p, &d,
                RULE(RULE_DRAIN_DEADLINE) ? deadline_in_ms(s->lease_ms) : UINT64_MAX);
    for (lease *l = p->oldest; l; l = l->newer)
        drain_add(s, &d, l);
    while (drain_wait(s, &d))
        ;
    if (!drain_end(s, p, &d) && !d.cut)
        s->stats.drains_expired++;
}

static void count_wait(fanin_server *s, uint64_t waited)
{
    size_t bucket = 0;
    for (uint64_t bound = DRAIN_BUCKET_NS;
         bucket < FANIN_DRAIN_BUCKETS - 1 && waited > bound; bucket++)
        bound = drain_bound_after(bound);
    s->stats.drain_waits[bucket]++;
    s->stats.drain_wait_ns_total += waited;
    if (waited > s->stats.drain_wait_ns_max)
        s->stats.drain_wait_ns_max = waited;
}

void publication_advance(fanin_server *s, publication *p, publication_state to)
{
    uint64_t began = clock_ns();
    bool gently = to != STATE_UNPUBLISHED;
    count_stable(p);
    if (gently && p->state == STATE_STABLE)
        drain_readers(s, p);
    p->epoch = next_odd(s);
    p->previous = 0;
    lease_void_outdated(s, p);
    p->update_open = to == STATE_WRITING;
    if (!gently || p->state != to)
        enter(s, p, to);
    pthread_cond_broadcast(&s->freed); /* for those that wait for the draining to end */
    publication_wait_for_reads(s, p);
    s->stats.updates += to == STATE_WRITING;
    if (gently)
        count_wait(s, clock_ns() - began);
}

void publication_advance_arena(fanin_server *s, publication *p, commit *c,
                               bool published)
{
    c->generation = next_even(s);
    if (!RULE(RULE_ARENA_RAISE))
        return;
    p->previous = 0;
    if (published)
        p->epoch = c->closing = c->generation;
    lease_void_outdated(s, p);
    publication_wait_for_reads(s, p);
}
