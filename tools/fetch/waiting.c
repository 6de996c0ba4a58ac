/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/waiting.h"
#include "fetch/missing.h"
#include "fetch/progress.h"
#include "fetch/rank_states.h"
#include "fetch/terminal.h"

#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { TELL_EVERY_MS = 2000, ASK_MS = 1000 };

struct waiting {
    const session *session;
    session own; /**< the same target with another client */
    uint64_t step;
    pthread_t thread;
    int ended; /**< an eventfd: the thread is to end */
    atomic_bool hushed;
};

typedef struct behind {
    const waiting *waiting;
    fanin_rank_state *ranks; /**< room for all */
    size_t count;
} behind;

static bool waiting_on_publication(void *cookie, const fanin_publication_info *info)
{
    behind *b = cookie;
    const waiting *w = b->waiting;
    bool there = info->state == FANIN_PUBLICATION_STABLE && info->step >= w->step;
    if (!there && strcmp(info->name, w->session->publication) == 0 &&
        b->count < w->session->target.count) {
        b->ranks[b->count++] = (fanin_rank_state){.struct_size = sizeof b->ranks[0],
                                                  .rank = info->rank,
                                                  .state = info->state,
                                                  .step = info->step,
                                                  .state_age_ms = info->state_age_ms};
    }
    return true;
}

static void tell_missing(const waiting *w)
{
    missing m;
    missing_gather(&w->own, &m);
    for (uint32_t i = 0; i < m.count; i++) {
        terminal_tell("nixl-fetch: waiting for %s: %s", missing_name(&m.ranks[i]).s,
                      m.ranks[i].message);
    }
    missing_free(&m);
}

static void waiting_tell(const waiting *w)
{
    behind b = {.waiting = w,
                .ranks = calloc(w->session->target.count + 1, sizeof b.ranks[0])};
    char text[1024];
    if (b.ranks != NULL &&
        fanin_client_list(w->own.client, ASK_MS, waiting_on_publication, &b, NULL) ==
            FANIN_OK &&
        !atomic_load(&w->hushed)) {
        rank_states_text(b.ranks, b.count, text, sizeof text);
        if (b.count > 0) {
            terminal_tell("nixl-fetch: waiting for step %" PRIu64 " of %s: %s", w->step,
                          w->session->publication, text);
        }
        tell_missing(w);
    }
    free(b.ranks);
}

/* False: the pull is over. */
static bool pause_ms(waiting *w, int ms)
{
    struct pollfd ended = {w->ended, POLLIN, 0};
    return poll(&ended, 1, ms) <= 0 && !atomic_load(&w->hushed);
}

static void *waiting_run(void *cookie)
{
    waiting *w = cookie;
    fanin_error error = FANIN_ERROR_INIT;
    bool connected = false;
    while (pause_ms(w, TELL_EVERY_MS)) {
        w->own.end_ns = progress_in_ms(ASK_MS);
        connected = connected || session_try(&w->own, &error) == FANIN_OK;
        if (connected) {
            waiting_tell(w);
        }
    }
    return NULL;
}

static bool waiting_start_thread(waiting *w)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&w->thread, NULL, waiting_run, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed == 0;
}

static void destroy(waiting *w)
{
    fanin_client_destroy(&w->own.client);
    if (w->ended >= 0) {
        close(w->ended);
    }
    free(w);
}

waiting *waiting_start(const session *s, uint64_t step)
{
    waiting *w = calloc(1, sizeof *w);
    fanin_client_config config = s->config; /* but for what it has no use of */
    config.no_ucx = true;
    config.path = FANIN_PATH_AUTO;
    config.log = NULL;
    config.log_cookie = NULL;
    if (w == NULL) {
        return NULL;
    }
    w->session = s;
    w->own.target = s->target; /* the session's; it outlives the thread */
    w->step = step > 0 ? step : 1;
    w->ended = eventfd(0, EFD_CLOEXEC);
    if (w->ended < 0 ||
        fanin_client_create(&config, &w->own.client, NULL) != FANIN_OK ||
        !waiting_start_thread(w)) {
        destroy(w);
        return NULL;
    }
    return w;
}

void waiting_hush(waiting *w)
{
    if (w != NULL) {
        atomic_store(&w->hushed, true);
    }
}

void waiting_end(waiting **w_inout)
{
    waiting *w = *w_inout;
    if (w == NULL) {
        return;
    }
    (void)eventfd_write(w->ended, 1);
    waiting_hush(w);
    fanin_client_cancel(w->own.client);
    pthread_join(w->thread, NULL);
    destroy(w);
    *w_inout = NULL;
}
