/* SPDX-License-Identifier: Apache-2.0 */
/* Commits that wait for streams: who is told, what takes effect, what is withdrawn. */
#include "publish/commit_token.h"
#include "core/wake.h"
#include "error_set.h"
#include "shards/registration.h"
#include "thread.h"

#include <stdlib.h>
#include <string.h>

/** What outlives the server as long as a stream may still get there. */
struct commit_hub {
    pthread_mutex_t lock;   /* held for a few instructions at a time */
    pthread_cond_t changed; /**< of any commit; CLOCK_MONOTONIC */
    int wake;               /**< the server's control thread's, -1: it is gone */
    unsigned references;    /**< the server's and the commits' */
};

/* ---------------------------------------------------------------- lifetime */

static void hub_free(commit_hub *h)
{
    pthread_cond_destroy(&h->changed);
    pthread_mutex_destroy(&h->lock);
    free(h);
}

/* Lock of the hub held, given up. */
static void hub_leave(commit_hub *h, unsigned references)
{
    h->references -= references;
    bool last = h->references == 0;
    pthread_mutex_unlock(&h->lock);
    if (last)
        hub_free(h);
}

/* The same. */
static void release_and_leave(commit *c)
{
    commit_hub *h = c->hub;
    bool last = --c->references == 0;
    if (last)
        free(c);
    hub_leave(h, last);
}

fanin_status commit_create(fanin_server *s, fanin_error *error)
{
    commit_hub *h = calloc(1, sizeof *h);
    if (!h)
        return error_set_memory(error);
    condition_init(&h->changed);
    pthread_mutex_init(&h->lock, NULL);
    h->wake = s->wake;
    h->references = 1;
    s->hub = h;
    return FANIN_OK;
}

commit *commit_retain(commit *c)
{
    pthread_mutex_lock(&c->hub->lock);
    c->references++;
    pthread_mutex_unlock(&c->hub->lock);
    return c;
}

void commit_release(commit *c)
{
    pthread_mutex_lock(&c->hub->lock);
    release_and_leave(c);
}

fanin_status commit_register(fanin_server *s, publication *p, const commit *terms,
                             commit **out, fanin_error *error)
{
    commit *c = malloc(sizeof *c);
    if (!c)
        return error_set_memory(error);
    *c = *terms;
    c->hub = s->hub;
    c->of = p;
    c->closing = p->epoch;
    c->was_open = p->update_open;
    c->was_aborted = p->aborted;
    c->references = 3; /* the caller's, the publication's, the server's list's */
    c->awaited = 1;
    pthread_mutex_lock(&s->hub->lock);
    s->hub->references++;
    pthread_mutex_unlock(&s->hub->lock);
    c->next = s->commits;
    s->commits = c;
    p->pending = c;
    p->update_open = p->aborted = false;
    *out = c;
    return FANIN_OK;
}

bool commit_is_copy(const commit *c)
{
    return c->mode == MODE_SNAPSHOT;
}

/* ----------------------------------------------------------------- waiting */

void commit_expect(commit *c)
{
    pthread_mutex_lock(&c->hub->lock);
    c->awaited++;
    c->references++;
    pthread_mutex_unlock(&c->hub->lock);
}

/* One less is awaited. Wakes whoever may care; gives a reference back. */
static void arrive(commit *c, bool failed)
{
    commit_hub *h = c->hub;
    pthread_mutex_lock(&h->lock);
    c->device_failed = c->device_failed || failed;
    c->awaited--;
    if (c->awaited == 0 && h->wake >= 0)
        wake_up(h->wake);
    pthread_cond_broadcast(&h->changed);
    release_and_leave(c);
}

void commit_unexpect(commit *c)
{
    arrive(c, false);
}

void commit_reached(void *cookie, bool failed)
{
    arrive(cookie, failed);
}

void commit_arm(commit *c)
{
    commit_retain(c);
    arrive(c, false);
}

fanin_status commit_await(commit *c, unsigned left, bool pending, deadline at)
{
    commit_hub *h = c->hub;
    pthread_mutex_lock(&h->lock);
    while (c->awaited > left && !(pending && c->outcome != COMMIT_PENDING) &&
           condition_wait(&h->changed, &h->lock, at))
        ;
    bool over = c->awaited <= left || (pending && c->outcome != COMMIT_PENDING);
    pthread_mutex_unlock(&h->lock);
    return over ? FANIN_OK : FANIN_ERR_TIMEOUT;
}

commit_outcome commit_get_outcome(commit *c)
{
    pthread_mutex_lock(&c->hub->lock);
    commit_outcome outcome = c->outcome;
    pthread_mutex_unlock(&c->hub->lock);
    return outcome;
}

bool commit_device_failed(commit *c)
{
    pthread_mutex_lock(&c->hub->lock);
    bool failed = c->device_failed;
    pthread_mutex_unlock(&c->hub->lock);
    return failed;
}

/* ------------------------------------------------------------------ effect */

/* Lock held. */
static void add_garbage(fanin_server *s, shard_catalog *catalog)
{
    catalog->next_garbage = s->garbage;
    s->garbage = catalog;
    wake_up(s->wake);
}

void commit_discard(fanin_server *s, shard_catalog *catalog)
{
    if (catalog && shard_catalog_drop(catalog))
        add_garbage(s, catalog);
}

void commit_retire(fanin_server *s, shard_catalog *catalog)
{
    if (!catalog || !shard_catalog_drop(catalog))
        return;
    pthread_mutex_lock(&s->lock);
    add_garbage(s, catalog);
    pthread_mutex_unlock(&s->lock);
}

/* The commit is not the publication's pending one any more. */
static void conclude(publication *p, commit *c, commit_outcome outcome)
{
    commit_hub *h = c->hub;
    p->pending = NULL;
    p->filling = NULL;
    pthread_mutex_lock(&h->lock);
    c->outcome = outcome;
    pthread_cond_broadcast(&h->changed);
    release_and_leave(c);
}

static void reopen(publication *p, const commit *c)
{
    p->update_open = p->update_open || c->was_open;
    p->aborted = p->aborted || c->was_aborted;
}

/* For commit_tidy() to log. */
static void remember(fanin_server *s, commit *c)
{
    c->untold = s->untold;
    s->untold = commit_retain(c);
    wake_up(s->wake);
}

static void publish_copy(fanin_server *s, publication *p, commit *c)
{
    if (p->state == STATE_STABLE)
        p->stable_ns[p->n_stable++ % STABLE_SAMPLES] = clock_ns() - p->entered_at;
    p->previous = p->state == STATE_STABLE ? p->epoch : 0;
    p->epoch = RULE(RULE_ARENA_RAISE) ? c->generation : next_even(s);
    p->arena = c->arena;
    lease_void_strays(s, p);
}

void commit_set_catalog(fanin_server *s, publication *p, shard_catalog *catalog)
{
    if (p->catalog == catalog)
        return;
    commit_discard(s, p->catalog);
    p->catalog = shard_catalog_retain(catalog);
}

static uint64_t time_of_day_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static void take_effect(fanin_server *s, publication *p, commit *c)
{
    commit_set_catalog(s, p, c->catalog);
    if (c->mode == MODE_SNAPSHOT)
        publish_copy(s, p, c);
    else
        p->epoch = next_even(s);
    p->mode = c->mode;
    p->cast = c->cast;
    p->has_step = true;
    p->step = c->step;
    p->committed_at = clock_ns();
    p->committed_unix_ns = time_of_day_ns();
    s->stats.commits++;
    conclude(p, c, COMMIT_EFFECTIVE);
    publication_enter(s, p, STATE_STABLE);
}

static void withdraw(fanin_server *s, publication *p, commit *c, const char *why)
{
    c->why = why;
    reopen(p, c);
    if (c->on_stream) {
        s->stats.commits_withdrawn++;
        remember(s, c);
    }
    conclude(p, c, COMMIT_WITHDRAWN);
}

void commit_fail(commit *c)
{
    publication *p = c->of;
    if (p->pending != c)
        return;
    reopen(p, c);
    conclude(p, c, COMMIT_FAILED);
}

static bool is_due(commit *c)
{
    pthread_mutex_lock(&c->hub->lock);
    bool due = c->awaited == 0;
    pthread_mutex_unlock(&c->hub->lock);
    return due;
}

void commit_settle(fanin_server *s, publication *p)
{
    commit *c = p->pending;
    if (!c || !is_due(c))
        return;
    bool stands = p->present && (p->epoch == c->closing || !RULE(RULE_LATE_EFFECT));
    if (commit_device_failed(c)) {
        remember(s, c);
        commit_fail(c);
    } else if (stands) {
        take_effect(s, p, c);
    } else {
        withdraw(s, p, c, "another update began before its stream had got there");
    }
}

void commit_withdraw(fanin_server *s, publication *p, const char *why)
{
    commit_settle(s, p);
    if (p->pending)
        withdraw(s, p, p->pending, why);
}

/* -------------------------------------------------------------------- tidy */

static void tell(const fanin_server *s, commit *c)
{
    if (commit_get_outcome(c) == COMMIT_FAILED)
        log_write(&s->log, FANIN_LOG_ERROR, "commit-failed",
                  "step %llu of %s was not published: the device of its stream has "
                  "failed",
                  (unsigned long long)c->step, c->of->name);
    else
        log_write(&s->log, FANIN_LOG_WARNING, "commit-withdrawn",
                  "step %llu of %s was not published: %s", (unsigned long long)c->step,
                  c->of->name, c->why);
}

static void tell_all(const fanin_server *s, commit *untold)
{
    /* The last one was remembered first. */
    commit *ordered = NULL;
    while (untold) {
        commit *next = untold->untold;
        untold->untold = ordered;
        ordered = untold;
        untold = next;
    }
    while (ordered) {
        commit *next = ordered->untold;
        tell(s, ordered);
        commit_release(ordered);
        ordered = next;
    }
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
        commit_discard(s, c->catalog);
        c->catalog = NULL;
        c->next = done;
        done = c;
    }
    return done;
}

static void release_all(commit *done)
{
    while (done) {
        commit *next = done->next;
        commit_release(done);
        done = next;
    }
}

/* Arenas that go may be mapped by others, as the trainer's memory may. */
static void free_all(fanin_server *s, shard_catalog *garbage)
{
    bool arenas = false;
    while (garbage) {
        shard_catalog *next = garbage->next_garbage;
        arenas = arenas || garbage->plan;
        shard_catalog_free(garbage);
        garbage = next;
    }
    if (arenas)
        mappers_tell(&s->registrar, &s->log, s->name, "freed");
}

void commit_tidy(fanin_server *s)
{
    pthread_mutex_lock(&s->lock);
    commit *done = reap(s), *untold = s->untold;
    shard_catalog *garbage = s->garbage;
    s->untold = NULL;
    s->garbage = NULL;
    pthread_mutex_unlock(&s->lock);
    tell_all(s, untold);
    release_all(done);
    free_all(s, garbage);
}

/* Lock held. A commit that copies shards of the publication, with a reference; NULL: none. */
static commit *find_copy(const fanin_server *s, const publication *p)
{
    for (commit *c = s->commits; c; c = c->next)
        if (c->of == p && commit_is_copy(c) && !is_due(c))
            return commit_retain(c);
    return NULL;
}

fanin_status commit_wait_for_copies(fanin_server *s, publication *p, fanin_error *error)
{
    deadline at = deadline_in_ms(COMMIT_WAIT_MS);
    for (;;) {
        pthread_mutex_lock(&s->lock);
        commit_settle(s, p);
        commit *c = find_copy(s, p);
        pthread_mutex_unlock(&s->lock);
        if (!c)
            return FANIN_OK;
        uint64_t step = c->step;
        fanin_status status = commit_await(c, 0, false, at);
        commit_release(c);
        if (status == FANIN_OK)
            continue;
        error_place place = {.phase = "publish",
                             .remedy = "let the commit's stream get there first"};
        return error_set(error, status, &place,
                         "step %llu of %s is still being copied on its stream",
                         (unsigned long long)step, p->name);
    }
}

/* ----------------------------------------------------------------- the end */

void commit_stop(fanin_server *s)
{
    if (!s->hub)
        return;
    pthread_mutex_lock(&s->hub->lock);
    s->hub->wake = -1;
    pthread_mutex_unlock(&s->hub->lock);
    pthread_mutex_lock(&s->lock);
    for (size_t i = 0; i < s->n_publications; i++)
        commit_withdraw(s, s->publications[i], "the server was destroyed");
    pthread_mutex_unlock(&s->lock);
    commit_tidy(s);
}

void commit_destroy(fanin_server *s)
{
    if (!s->hub)
        return;
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
                      "step %llu of %s is still being copied on its stream after %d s: "
                      "the copy is left alone, and its memory not freed",
                      (unsigned long long)c->step, c->of->name, COMMIT_WAIT_MS / 1000);
        else
            shard_catalog_release(c->catalog);
        c->catalog = NULL;
        commit_release(c);
    }
    pthread_mutex_lock(&s->hub->lock);
    hub_leave(s->hub, 1);
    s->hub = NULL;
}
