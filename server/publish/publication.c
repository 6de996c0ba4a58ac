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
#include "publish/commit.h"
#include "publish/lease.h"
#include "publish/garbage.h"

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
    if (p->state == STATE_STABLE)
        p->stable_ns[p->n_stable++ % STABLE_SAMPLES] = clock_ns() - p->entered_at;
    p->state = state;
    p->entered_at = clock_ns();
    p->history[p->changes % HISTORY] = (state_change){p->step, state};
    p->changes++;
    if (s->listeners == 0 || s->is_woken)
        return;
    s->is_woken = true;
    wake_up(s->wake);
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
           (p->pending && p->pending->terms.mode == MODE_SNAPSHOT);
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
    if (!drain_finish(s, p, &d, 0, NULL) && !d.cut)
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
