/* SPDX-License-Identifier: Apache-2.0 */
/* Readers that pull beside a rank that works: a thread and a client each. */
#include "bench/bench.h"
#include "fetch/failure.h"
#include "fetch/interrupt.h"
#include "fetch/output.h"
#include "fetch/progress.h"

#include <stdlib.h>
#include <time.h>

typedef struct reader {
    bench_readers *all;
    uint32_t number; /**< 0 pulls as the benchmark itself does, by its client */
    session session;
    arena arena;
    pthread_t thread;
    bool running;
} reader;

struct bench_readers {
    bench *bench;
    reader *items;
    uint32_t count;
    pthread_mutex_t lock;
    pthread_cond_t changed, idle;
    /* Under the lock. */
    uint32_t active, busy; /**< that may pull; that do */
    uint32_t phase, pulls; /**< counted from 1; that ended well in it */
    uint64_t start_ns;     /**< of the phase */
    bool stop;
    fanin_status status; /**< of the first that failed */
    fanin_error error;
};

static fanin_status pull(reader *r, fanin_error *error)
{
    bench *b = r->all->bench;
    fanin_result_info info;
    if (r->number == 0) {
        return bench_pull(b, false, &info, error);
    }
    fanin_pull_options options;
    bench_pull_options(b, &options);
    return fanin_client_pull_into(r->session.client, &options, r->arena.into, NULL,
                                  error);
}

/* Lock held. Until something changes, or @p end_ns. */
static void wait_change(bench_readers *all, uint64_t end_ns)
{
    const struct timespec end = {(time_t)(end_ns / 1000000000),
                                 (long)(end_ns % 1000000000)};
    pthread_cond_timedwait(&all->changed, &all->lock, &end);
}

/* Lock held, but not while it pulls. */
static void pull_once(reader *r)
{
    bench_readers *all = r->all;
    fanin_error error = FANIN_ERROR_INIT;
    all->busy++;
    pthread_mutex_unlock(&all->lock);
    fanin_status status = pull(r, &error);
    pthread_mutex_lock(&all->lock);
    all->busy--;
    all->pulls += status == FANIN_OK;
    if (status != FANIN_OK && all->status == FANIN_OK) {
        all->status = status;
        all->error = error;
    }
    if (status != FANIN_OK) {
        all->active = 0;
    }
    if (all->busy == 0) {
        pthread_cond_signal(&all->idle);
    }
}

static void *read_on(void *cookie)
{
    reader *r = cookie;
    bench_readers *all = r->all;
    const uint64_t pause_ns = (uint64_t)all->bench->pause * 1000000;
    uint32_t phase = 0;
    uint64_t next_ns = 0;
    pthread_mutex_lock(&all->lock);
    while (!all->stop) {
        if (r->number >= all->active) {
            pthread_cond_wait(&all->changed, &all->lock);
            continue;
        }
        if (phase != all->phase) { /* they do not all begin at once */
            phase = all->phase;
            next_ns = all->start_ns + pause_ns * r->number / all->active;
        }
        if (progress_now_ns() < next_ns) {
            wait_change(all, next_ns);
            continue;
        }
        pull_once(r);
        next_ns = progress_now_ns() + pause_ns;
    }
    pthread_mutex_unlock(&all->lock);
    return NULL;
}

/* Connected, with what a first pull costs behind it. */
static int open_reader(bench *b, reader *r)
{
    fanin_error error = FANIN_ERROR_INIT;
    if (r->number > 0) {
        r->arena.device = DEVICE_HOST;
        int code = session_open(&r->session, b->self, &b->line, b->target, b->line.run);
        code =
            code != 0 ? code : session_connect(&r->session, b->line.common.timeout_ms);
        if (code != 0) {
            return code;
        }
        if (bench_make_arena(b, &r->session, 0, &r->arena, &error) != FANIN_OK) {
            return failure_report("cannot pull", &error);
        }
    }
    return pull(r, &error) != FANIN_OK ? failure_report("cannot pull", &error) : 0;
}

static int start_threads(bench_readers *all)
{
    for (uint32_t i = 0; i < all->count; i++) {
        reader *r = &all->items[i];
        r->running = pthread_create(&r->thread, NULL, read_on, r) == 0;
        if (!r->running) {
            return failure_local("cannot pull", FANIN_ERR_LIMIT, "raise ulimit -u",
                                 "no thread for reader %u", i);
        }
    }
    return 0;
}

int bench_readers_open(bench *b, uint32_t count, bench_readers **out)
{
    bench_readers *all = output_require(calloc(1, sizeof *all));
    pthread_condattr_t monotonic;
    *out = all;
    all->bench = b;
    all->items = output_require(calloc((size_t)count + 1, sizeof all->items[0]));
    pthread_mutex_init(&all->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&all->changed, &monotonic);
    pthread_cond_init(&all->idle, &monotonic);
    pthread_condattr_destroy(&monotonic);
    for (uint32_t i = 0; i < count; i++) {
        reader *r = &all->items[all->count++];
        *r = (reader){.all = all, .number = i, .arena.device = DEVICE_HOST};
        int code = open_reader(b, r);
        if (code != 0) {
            return code;
        }
    }
    interrupt_install(b->session.client);
    return start_threads(all);
}

void bench_readers_begin(bench_readers *all, uint32_t active)
{
    pthread_mutex_lock(&all->lock);
    all->active = active;
    all->phase++;
    all->pulls = 0;
    all->start_ns = progress_now_ns();
    pthread_cond_broadcast(&all->changed);
    pthread_mutex_unlock(&all->lock);
}

int bench_readers_end(bench_readers *all, uint32_t *pulls_out)
{
    pthread_mutex_lock(&all->lock);
    all->active = 0;
    while (all->busy > 0) {
        pthread_cond_wait(&all->idle, &all->lock);
    }
    *pulls_out = all->pulls;
    fanin_status status = all->status;
    pthread_mutex_unlock(&all->lock);
    return status != FANIN_OK ? failure_report("cannot pull", &all->error) : 0;
}

void bench_readers_cancel(bench_readers *all)
{
    for (uint32_t i = 0; i < all->count; i++) {
        fanin_client *client =
            i == 0 ? all->bench->session.client : all->items[i].session.client;
        if (client != NULL) {
            fanin_client_cancel(client);
        }
    }
}

void bench_readers_free(bench_readers **all_inout)
{
    bench_readers *all = *all_inout;
    if (all == NULL) {
        return;
    }
    pthread_mutex_lock(&all->lock);
    all->stop = true;
    all->active = 0;
    if (all->busy > 0) {
        bench_readers_cancel(all);
    }
    pthread_cond_broadcast(&all->changed);
    pthread_mutex_unlock(&all->lock);
    for (uint32_t i = 0; i < all->count; i++) {
        reader *r = &all->items[i];
        if (r->running) {
            pthread_join(r->thread, NULL);
        }
        if (i > 0) {
            session_close(&r->session);
            arena_free(&r->arena);
        }
    }
    pthread_cond_destroy(&all->idle);
    pthread_cond_destroy(&all->changed);
    pthread_mutex_destroy(&all->lock);
    free(all->items);
    free(all);
    *all_inout = NULL;
}
