/* SPDX-License-Identifier: Apache-2.0 */
#include "publish/commit.h"
#include "error_set.h"
#include "publish/drain.h"
#include "publish/garbage.h"

#include <inttypes.h>

/* ----------------------------------------------------------------- waiting */

/* Waits for a commit that was found under the lock, then gives its reference back. */
static fanin_status await(commit *c, bool or_concluded, deadline at, uint64_t *step)
{
    *step = c->step;
    fanin_status status = commit_token_await(&c->token, 0, or_concluded, at);
    commit_token_release(&c->token);
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
        publication_settle(s, p);
        commit *before = p->pending;
        if (!before)
            return FANIN_OK;
        commit_token_retain(&before->token);
        pthread_mutex_unlock(&s->lock);
        pthread_mutex_unlock(&p->writer);
        status = await(before, true, at, &step);
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
    while (c && (c->of != p || c->mode != MODE_SNAPSHOT ||
                 commit_token_is_due(&c->token, NULL)))
        c = c->next;
    if (c)
        commit_token_retain(&c->token);
    return c;
}

fanin_status commit_wait_for_copies(fanin_server *s, publication *p, fanin_error *error)
{
    deadline at = deadline_in_ms(COMMIT_WAIT_MS);
    fanin_status status = FANIN_OK;
    uint64_t step = 0;
    while (status == FANIN_OK) {
        pthread_mutex_lock(&s->lock);
        publication_settle(s, p);
        commit *c = find_copy(s, p);
        pthread_mutex_unlock(&s->lock);
        if (!c)
            return FANIN_OK;
        status = await(c, false, at, &step);
    }
    error_place place = {.phase = "publish",
                         .remedy = "wait until the commit's stream is done"};
    return error_set(error, status, &place,
                     "step %" PRIu64 " of %s is still being copied on its stream", step,
                     p->name);
}

/* -------------------------------------------------------------------- tidy */

static void tell(const fanin_server *s, const commit *c)
{
    bool failed = c->outcome == COMMIT_FAILED;
    log_write(&s->log, failed ? FANIN_LOG_ERROR : FANIN_LOG_WARNING,
              failed ? "commit-failed" : "commit-withdrawn",
              "step %" PRIu64 " of %s was not published: %s", c->step, c->of->name,
              failed ? "the device of its stream has failed" : c->why);
}

/* Lock held. Takes what no stream is awaited for off the list. */
static commit *reap(fanin_server *s)
{
    commit *done = NULL;
    for (commit **link = &s->commits; *link;) {
        commit *c = *link;
        if (!commit_token_is_due(&c->token, NULL)) {
            link = &c->next;
            continue;
        }
        publication_settle(s, c->of);
        *link = c->next;
        catalog_discard(s, c->catalog);
        c->catalog = NULL;
        c->next = done;
        done = c;
    }
    return done;
}

void commit_tidy(fanin_server *s)
{
    pthread_mutex_lock(&s->lock);
    commit *done = reap(s), *untold = s->untold, *next;
    s->untold = NULL;
    pthread_mutex_unlock(&s->lock);
    for (; untold; untold = next) {
        next = untold->untold;
        tell(s, untold);
        commit_token_release(&untold->token);
    }
    for (; done; done = next) {
        next = done->next;
        commit_token_release(&done->token);
    }
    garbage_collect(s);
    drain_tell(s);
}

/* ----------------------------------------------------------------- the end */

void commit_stop(fanin_server *s)
{
    pthread_mutex_lock(&s->lock);
    for (size_t i = 0; i < s->n_publications; i++)
        publication_withdraw(s, s->publications[i], "the server was destroyed");
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
                      "step %" PRIu64 " of %s is still being copied on its stream "
                      "after %d s: the copy is left alone, and its memory not freed",
                      c->step, c->of->name, COMMIT_WAIT_MS / 1000);
        else
            shard_catalog_release(c->catalog);
        c->catalog = NULL;
        commit_token_release(&c->token);
    }
    commit_hub_leave(s->hub);
    s->hub = NULL;
}
