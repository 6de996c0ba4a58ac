/* SPDX-License-Identifier: Apache-2.0 */
#include "publish/commit_token.h"
#include "core/wake.h"
#include "error_set.h"
#include "thread.h"

#include <stdlib.h>

/** What outlives the server as long as a stream may still get there. */
struct commit_hub {
    pthread_mutex_t lock;   /* held for a few instructions at a time */
    pthread_cond_t changed; /**< of any token; CLOCK_MONOTONIC */
    int wake;               /**< the server's control thread's, -1: nobody's */
    unsigned references;    /**< the server's and the tokens' */
};

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
static void unlock_and_release(commit_token *t)
{
    commit_hub *h = t->hub;
    bool last = --t->references == 0;
    if (last)
        free(t);
    unlock_and_leave(h, last);
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

void commit_hub_leave(commit_hub *h)
{
    pthread_mutex_lock(&h->lock);
    h->wake = -1;
    unlock_and_leave(h, true);
}

void commit_token_init(commit_token *t, commit_hub *h, unsigned references)
{
    *t = (commit_token){.hub = h, .references = references + 1, .awaited = 1};
    pthread_mutex_lock(&h->lock);
    h->references++;
    pthread_mutex_unlock(&h->lock);
}

void commit_token_retain(commit_token *t)
{
    pthread_mutex_lock(&t->hub->lock);
    t->references++;
    pthread_mutex_unlock(&t->hub->lock);
}

void commit_token_release(commit_token *t)
{
    pthread_mutex_lock(&t->hub->lock);
    unlock_and_release(t);
}

void commit_token_expect(commit_token *t)
{
    pthread_mutex_lock(&t->hub->lock);
    t->awaited++;
    t->references++;
    pthread_mutex_unlock(&t->hub->lock);
}

void commit_token_arrive(void *token, bool failed)
{
    commit_token *t = token;
    commit_hub *h = t->hub;
    pthread_mutex_lock(&h->lock);
    t->device_failed = t->device_failed || failed;
    t->awaited--;
    if (t->awaited == 0 && h->wake >= 0)
        wake_up(h->wake);
    pthread_cond_broadcast(&h->changed);
    unlock_and_release(t);
}

void commit_token_conclude(commit_token *t)
{
    pthread_mutex_lock(&t->hub->lock);
    t->concluded = true;
    pthread_cond_broadcast(&t->hub->changed);
    unlock_and_release(t);
}

fanin_status commit_token_await(commit_token *t, unsigned left, bool or_concluded,
                                deadline at)
{
    bool over = false, late = false;
    pthread_mutex_lock(&t->hub->lock);
    while (!over && !late) {
        over = t->awaited <= left || (or_concluded && t->concluded);
        late = !over && !condition_wait(&t->hub->changed, &t->hub->lock, at);
    }
    pthread_mutex_unlock(&t->hub->lock);
    return over ? FANIN_OK : FANIN_ERR_TIMEOUT;
}

bool commit_token_is_due(commit_token *t, bool *failed_out)
{
    pthread_mutex_lock(&t->hub->lock);
    bool due = t->awaited == 0;
    if (failed_out)
        *failed_out = t->device_failed;
    pthread_mutex_unlock(&t->hub->lock);
    return due;
}
