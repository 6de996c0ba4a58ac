/* SPDX-License-Identifier: Apache-2.0 */
/* A commit between its call and its end: the streams that are awaited, who waits for it, and how
   it takes effect or is withdrawn. */
#include "clock.h"
#include "core/rules.h"
#include "wake.h"
#include "error_set.h"
#include "publish/commit.h"
#include "publish/lease.h"
#include "publish/patches.h"
#include "publish/publication.h"
#include "shards/arena.h"
#include "thread.h"

#include <inttypes.h>
#include <stdlib.h>

/** What outlives the server as long as a stream may still get there. */
struct commit_hub {
    pthread_mutex_t lock;   /* held for a few instructions at a time */
    pthread_cond_t changed; /**< of any commit; CLOCK_MONOTONIC */
    int wake;               /**< the server's control thread's, -1: nobody's */
    unsigned references;    /**< the server's and the commits' */
};

/* --------------------------------------------------------------- references */

/* Lock of the hub held, given up. */
static void unlock_and_leave(commit_hub *h, bool leave)
{
    h->references -= leave;
    bool last = h->references == 0;
    pthread_mutex_unlock(&h->lock);
    if (!last)
        return;
    pthread_cond_destroy(&h->changed);
    pthread_mutex_destroy(&h->lock);
    free(h);
}

/* The same. */
static void unlock_and_release(commit *c)
{
    commit_hub *h = c->hub;
    bool last = --c->references == 0;
    if (last)
        free(c);
    unlock_and_leave(h, last);
}

static void retain(commit *c)
{
    pthread_mutex_lock(&c->hub->lock);
    c->references++;
    pthread_mutex_unlock(&c->hub->lock);
}

void commit_release(commit *c)
{
    pthread_mutex_lock(&c->hub->lock);
    unlock_and_release(c);
}

fanin_status commit_hub_make(int wake, commit_hub **out, fanin_error *error)
{
    commit_hub *h = calloc(1, sizeof *h);
    if (!h)
        return error_set_memory(error);
    condition_init(&h->changed);
    pthread_mutex_init(&h->lock, NULL);
    h->wake = wake;
    h->references = 1;
    *out = h;
    return FANIN_OK;
}

fanin_status commit_make(fanin_server *s, publication *p, const commit_terms *terms,
                         commit **out, fanin_error *error)
{
    commit *c = malloc(sizeof *c);
    if (!c)
        return error_set_memory(error);
    *c = (commit){
        .hub = s->hub,
        .references = 4, /* the caller's, its call's, p->pending, s->commits */
        .awaited = 1,
        .of = p,
        .terms = *terms,
        .closing = p->epoch,
        .was_open = p->update_open,
        .was_aborted = p->aborted,
        .next = s->commits,
    };
    pthread_mutex_lock(&s->hub->lock);
    s->hub->references++;
    pthread_mutex_unlock(&s->hub->lock);
    s->commits = p->pending = *out = c;
    p->update_open = p->aborted = false;
    return FANIN_OK;
}

/* ------------------------------------------------------------------ streams */

void commit_expect(commit *c)
{
    pthread_mutex_lock(&c->hub->lock);
    c->awaited++;
    c->references++;
    pthread_mutex_unlock(&c->hub->lock);
}

void commit_arrive(void *cookie, bool failed)
{
    commit *c = cookie;
    commit_hub *h = c->hub;
    pthread_mutex_lock(&h->lock);
    c->device_failed = c->device_failed || failed;
    c->awaited--;
    if (c->awaited == 0 && h->wake >= 0)
        wake_up(h->wake);
    pthread_cond_broadcast(&h->changed);
    unlock_and_release(c);
}

fanin_status commit_await(commit *c, unsigned left, bool or_concluded, deadline at)
{
    bool over = false, late = false;
    pthread_mutex_lock(&c->hub->lock);
    while (!over && !late) {
        over = c->awaited <= left || (or_concluded && c->concluded);
        late = !over && !condition_wait(&c->hub->changed, &c->hub->lock, at);
    }
    pthread_mutex_unlock(&c->hub->lock);
    return over ? FANIN_OK : FANIN_ERR_TIMEOUT;
}

/* Nothing is awaited. */
static bool is_due(commit *c)
{
    pthread_mutex_lock(&c->hub->lock);
    bool due = c->awaited == 0;
    pthread_mutex_unlock(&c->hub->lock);
    return due;
}

bool commit_has_failed(commit *c)
{
    pthread_mutex_lock(&c->hub->lock);
    bool failed = c->device_failed;
    pthread_mutex_unlock(&c->hub->lock);
    return failed;
}

/* ---------------------------------------------------------------------- end */

/* It is not the publication's pending one any more. */
static void conclude(commit *c, commit_outcome outcome)
{
    c->outcome = outcome;
    c->of->pending = NULL;
    c->of->filling = NULL;
    pthread_mutex_lock(&c->hub->lock);
    c->concluded = true;
    pthread_cond_broadcast(&c->hub->changed);
    unlock_and_release(c);
}

/* Readers of the copy that was published until now may finish. */
static void take_effect(fanin_server *s, commit *c)
{
    publication *p = c->of;
    bool copy = c->terms.mode == MODE_SNAPSHOT;
    uint64_t epoch = copy && RULE(RULE_ARENA_RAISE) ? c->generation : next_even(s);
    if (copy) {
        p->previous = p->state == STATE_STABLE ? p->epoch : 0;
        p->arena = c->arena;
    }
    p->mode = c->terms.mode;
    p->cast = c->terms.cast;
    p->has_step = true;
    p->step = c->terms.step;
    p->committed_at = clock_ns();
    p->committed_unix_ns = clock_unix_ns();
    p->bytes_left = 0;
    s->stats.commits++;
    patches_take_effect(s, c);
    publication_reset_proofs(p, c->terms.fills);
    publication_take_effect(s, p, c->catalog, epoch);
    if (copy)
        lease_void_outdated(s, p);
    conclude(c, COMMIT_EFFECTIVE);
}

/* The update that it would have ended is open again. */
static void reopen(const commit *c)
{
    c->of->update_open = c->of->update_open || c->was_open;
    c->of->aborted = c->of->aborted || c->was_aborted;
}

/* For commit_tidy() to log, in this order. */
static void remember(fanin_server *s, commit *c)
{
    commit **last = &s->untold;
    while (*last)
        last = &(*last)->untold;
    retain(c);
    *last = c;
    wake_up(s->wake);
}

static void give_up(fanin_server *s, commit *c, const char *why)
{
    c->why = why;
    reopen(c);
    if (c->terms.on_stream) {
        s->stats.commits_withdrawn++;
        remember(s, c);
    }
    conclude(c, COMMIT_WITHDRAWN);
}

void commit_fail(commit *c)
{
    if (c->of->pending != c)
        return;
    reopen(c);
    conclude(c, COMMIT_FAILED);
}

void commit_settle(fanin_server *s, publication *p)
{
    commit *c = p->pending;
    if (!c || !is_due(c))
        return;
    bool stands = p->present && (p->epoch == c->closing || !RULE(RULE_LATE_EFFECT));
    if (commit_has_failed(c)) {
        remember(s, c);
        commit_fail(c);
    } else if (stands) {
        take_effect(s, c);
    } else {
        give_up(s, c, "another update began before its stream was done");
    }
}

void commit_withdraw(fanin_server *s, publication *p, const char *why)
{
    commit_settle(s, p);
    if (p->pending)
        give_up(s, p->pending, why);
}

/* ------------------------------------------------------------------ waiting */

/* Waits for a commit that was found under the lock, then gives its reference back. */
static fanin_status await_found(commit *c, bool or_concluded, deadline at,
                                uint64_t *step)
{
    *step = c->terms.step;
    fanin_status status = commit_await(c, 0, or_concluded, at);
    commit_release(c);
    return status;
}

fanin_status commit_enter(fanin_server *s, publication *p, fanin_error *error)
{
    deadline at = deadline_in_ms(COMMIT_WAIT_MS);
    fanin_status status = FANIN_OK;
    uint64_t step = 0;
    while (status == FANIN_OK) {
        pthread_mutex_lock(&p->writer);
        pthread_mutex_lock(&s->lock);
        commit_settle(s, p);
        commit *before = p->pending;
        if (!before)
            return FANIN_OK;
        retain(before);
        pthread_mutex_unlock(&s->lock);
        pthread_mutex_unlock(&p->writer);
        status = await_found(before, true, at, &step);
    }
    error_place place = {.phase = "commit",
                         .remedy = "find out what its stream waits for"};
    return error_set(error, status, &place,
                     "step %" PRIu64 " of %s, committed before, has not taken effect "
                     "for %d s",
                     step, p->name, COMMIT_WAIT_MS / 1000);
}

/* Lock held. A commit that copies shards of the publication, with a reference; NULL: none. */
static commit *find_copy(const fanin_server *s, const publication *p)
{
    commit *c = s->commits;
    while (c && (c->of != p || c->terms.mode != MODE_SNAPSHOT || is_due(c)))
        c = c->next;
    if (c)
        retain(c);
    return c;
}

fanin_status commit_wait_for_copies(fanin_server *s, publication *p, fanin_error *error)
{
    deadline at = deadline_in_ms(COMMIT_WAIT_MS);
    fanin_status status = FANIN_OK;
    uint64_t step = 0;
    while (status == FANIN_OK) {
        pthread_mutex_lock(&s->lock);
        commit_settle(s, p);
        commit *c = find_copy(s, p);
        pthread_mutex_unlock(&s->lock);
        if (!c)
            return FANIN_OK;
        status = await_found(c, false, at, &step);
    }
    error_place place = {.phase = "publish",
                         .remedy = "wait until the commit's stream is done"};
    return error_set(error, status, &place,
                     "step %" PRIu64 " of %s is still being copied on its stream", step,
                     p->name);
}

/* -------------------------------------------------------------------- tidy */

static void tell_commit(const fanin_server *s, const commit *c)
{
    bool failed = c->outcome == COMMIT_FAILED;
    log_write(&s->log, failed ? FANIN_LOG_ERROR : FANIN_LOG_WARNING,
              failed ? "commit-failed" : "commit-withdrawn",
              "step %" PRIu64 " of %s was not published: %s", c->terms.step,
              c->of->name, failed ? "the device of its stream has failed" : c->why);
}

/* Lock held. Takes what no stream is awaited for off the list. */
static commit *reap(fanin_server *s)
{
    commit *done = NULL;
    for (commit **link = &s->commits; *link;) {
        commit *c = *link;
        if (!is_due(c)) {
            link = &c->next;
            continue;
        }
        commit_settle(s, c->of);
        *link = c->next;
        catalog_discard(s, c->catalog);
        c->catalog = NULL;
        patches_discard(s, c->patch);
        c->patch = NULL;
        c->next = done;
        done = c;
    }
    return done;
}

static void tidy(fanin_server *s)
{
    pthread_mutex_lock(&s->lock);
    commit *done = reap(s), *untold = s->untold, *next;
    s->untold = NULL;
    pthread_mutex_unlock(&s->lock);
    for (; untold; untold = next) {
        next = untold->untold;
        tell_commit(s, untold);
        commit_release(untold);
    }
    for (; done; done = next) {
        next = done->next;
        commit_release(done);
    }
    drain_tell(s);
}

void commit_tidy(fanin_server *s)
{
    tidy(s);
    garbage_collect(s);
}

void commit_tidy_and_leave(fanin_server *s)
{
    tidy(s);
    garbage_leave(s);
}

/* ----------------------------------------------------------------- the end */

void commit_stop(fanin_server *s)
{
    pthread_mutex_lock(&s->lock);
    for (size_t i = 0; i < s->n_publications; i++)
        commit_withdraw(s, s->publications[i], "the server was destroyed");
    pthread_mutex_unlock(&s->lock);
    commit_tidy(s);
}

void commit_destroy(fanin_server *s)
{
    garbage_join(s);
    if (!s->hub)
        return;
    pthread_mutex_lock(&s->lock);
    for (size_t i = 0; i < s->n_publications; i++)
        patches_drop(s, s->publications[i]);
    pthread_mutex_unlock(&s->lock);
    commit_tidy(s);
    /* Streams are still to come for these; what they copy is to be over. */
    deadline at = deadline_in_ms(COMMIT_WAIT_MS);
    while (s->commits) {
        commit *c = s->commits;
        fanin_status fate = FANIN_OK;
        s->commits = c->next;
        if (c->catalog && c->catalog->plan)
            fate = arena_wait(c->catalog->plan, at);
        if (fate == FANIN_ERR_TIMEOUT)
            log_write(&s->log, FANIN_LOG_ERROR, "commit-stuck",
                      "step %" PRIu64 " of %s is still being copied on its stream "
                      "after %d s: the copy is left alone, and its memory not freed",
                      c->terms.step, c->of->name, COMMIT_WAIT_MS / 1000);
        else
            shard_catalog_release(c->catalog);
        c->catalog = NULL;
        commit_release(c);
    }
    pthread_mutex_lock(&s->hub->lock);
    s->hub->wake = -1; /* nobody is woken any more; the hub goes with its last commit */
    unlock_and_leave(s->hub, true);
    s->hub = NULL;
}
