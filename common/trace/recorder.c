/* SPDX-License-Identifier: Apache-2.0 */
#include "recorder.h"

#include "error_set.h"
#include "library_table.h"
#include "thread.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* A pull of a thousand ranks has several spans of each. */
#define SPANS 4096u
/* The first of those that wait is written within so long. */
#define DUE_MS 1000

typedef struct kept {
    trace_thread thread;
    trace_span span;
} kept;

struct recorder {
    pthread_mutex_t *lock;
    uint32_t number;
    pid_t pid;
    char *where;
    bool is_folder;
    trace_file file; /* the thread's, and so: */
    trace_rows rows;
    /* Of the lock: */
    pthread_cond_t go, done; /* the thread's turn, and that of who waits for it */
    uint32_t users;          /* whoever is last frees it */
    bool made, ending, left; /* the thread's word, the owner's, the thread's */
    bool idle;               /* the thread waits for a first span */
    fanin_error error;       /* of the making */
    int failed;              /* errno of the writing */
    uint64_t asked, written; /* how often it was asked for, and that is done */
    uint64_t lost;
    uint32_t threads;
    /* A ring: what the thread writes stays in it, and is not touched, until it is written. */
    uint32_t first, used;
    kept spans[SPANS];
};

/* -------------------------------------------------------------------- the thread */

static void recorder_drop(recorder *r)
{
    if (--r->users > 0)
        return;
    trace_rows_free(&r->rows);
    pthread_cond_destroy(&r->go);
    pthread_cond_destroy(&r->done);
    free(r->where);
    free(r);
}

/* As many as there are now; returns with the lock, with which it is called. */
static void write_batch(recorder *r)
{
    const uint32_t first = r->first, count = r->used;
    uint64_t lost = r->lost;
    r->lost = 0;
    pthread_mutex_unlock(r->lock);
    for (uint32_t i = 0; i < count; i++) {
        const kept *k = &r->spans[(first + i) % SPANS];
        lost += !trace_text_span(&r->file, &r->rows, r->pid, &k->thread, &k->span);
    }
    if (lost > 0)
        trace_text_lost(&r->file, r->pid, clock_ns(), lost);
    trace_file_flush(&r->file);
    pthread_mutex_lock(r->lock);
    r->used -= count;
    /* What is used over and over stays in the cache. */
    r->first = r->used > 0 ? (first + count) % SPANS : 0;
    r->failed = r->file.failed;
    if (r->failed)
        atomic_store(&trace_recording, false);
}

static void wait_until_due(recorder *r)
{
    deadline due = 0;
    while (!r->ending && r->asked == r->written && r->used <= SPANS / 2) {
        r->idle = r->used == 0;
        if (r->idle)
            pthread_cond_wait(&r->go, r->lock);
        else if (due == 0)
            due = deadline_in_ms(DUE_MS);
        else if (!condition_wait(&r->go, r->lock, due))
            break;
    }
    r->idle = false;
}

/* With the lock, as long as the file can be written. */
static void write_on(recorder *r)
{
    while (!r->failed) {
        wait_until_due(r);
        const uint64_t asked = r->asked;
        const bool ending = r->ending;
        if (r->used > 0 || r->lost > 0)
            write_batch(r);
        r->written = asked;
        pthread_cond_broadcast(&r->done);
        if (ending)
            break;
    }
}

static void *recorder_work(void *cookie)
{
    recorder *r = cookie;
    fanin_error error = FANIN_ERROR_INIT;
    pthread_setname_np(pthread_self(), "fanin-trace");
    fanin_status status = r->is_folder ? trace_file_make_in(&r->file, r->where, &error)
                                       : trace_file_make(&r->file, r->where, &error);
    pthread_mutex_lock(r->lock);
    r->made = true;
    r->error = error;
    pthread_cond_broadcast(&r->done);
    int failed = 0;
    if (status == FANIN_OK) {
        write_on(r);
        int fd = r->file.fd;
        /* A child closes what is there; the number is others' from now on. */
        r->file.fd = -1;
        pthread_mutex_unlock(r->lock);
        failed = close(fd) != 0 ? errno : 0;
        pthread_mutex_lock(r->lock);
    }
    r->failed = r->failed ? r->failed : failed;
    r->left = true;
    pthread_cond_broadcast(&r->done);
    pthread_mutex_t *lock = r->lock;
    recorder_drop(r);
    pthread_mutex_unlock(lock);
    return NULL;
}

/* -------------------------------------------------------------------- its owner */

fanin_status recorder_new(const char *where, bool is_folder, pthread_mutex_t *lock,
                          recorder **out, fanin_error *error)
{
    static _Atomic uint32_t recorders;
    const error_place place = {.phase = "trace", .remedy = THREAD_REMEDY};
    pthread_t thread;
    recorder *r = calloc(1, sizeof *r);
    if (!r || !(r->where = strdup(where))) {
        free(r);
        return error_set_memory(error);
    }
    r->lock = lock;
    r->number = atomic_fetch_add(&recorders, 1) + 1;
    r->pid = getpid();
    r->is_folder = is_folder;
    r->users = 2;
    condition_init(&r->go);
    condition_init(&r->done);
    pin_own_library(); /* the thread may still wait for a file system when the library is unloaded
                          */
    if (!worker_thread_start(&thread, recorder_work, r)) {
        r->users = 1;
        recorder_drop(r);
        return error_set(error, FANIN_ERR_LIMIT, &place,
                         "cannot start the thread that writes the trace");
    }
    pthread_detach(thread);
    *out = r;
    return FANIN_OK;
}

fanin_status recorder_made(recorder *r, deadline at, fanin_error *error)
{
    const error_place place = {.phase = "trace",
                               .remedy = "give a file of a file system that answers"};
    while (!r->made && condition_wait(&r->done, r->lock, at))
        ;
    return r->made ? error_copy(error, &r->error)
                   : error_set_errno(error, FANIN_ERR_IO, ETIMEDOUT, &place,
                                     "cannot make the trace %.200s", r->where);
}

trace_thread recorder_introduce(recorder *r)
{
    /* Older C libraries have no gettid(). */
    trace_thread t = {.number = ++r->threads, .tid = (uint32_t)syscall(SYS_gettid)};
    (void)pthread_getname_np(pthread_self(), t.name, sizeof t.name);
    return t;
}

void recorder_add(recorder *r, const trace_thread *thread, const trace_span *span)
{
    if (r->used == SPANS) {
        r->lost++;
        return;
    }
    kept *k = &r->spans[(r->first + r->used++) % SPANS];
    k->thread = *thread;
    k->span = *span;
    if (r->idle || r->used == SPANS / 2 + 1)
        pthread_cond_signal(&r->go);
    r->idle = false;
}

void recorder_write(recorder *r, deadline at)
{
    const uint64_t asked = ++r->asked;
    r->users++;
    pthread_cond_signal(&r->go);
    while (r->written < asked && !r->left && !deadline_passed(at) &&
           condition_wait(&r->done, r->lock, at))
        ;
    recorder_drop(r);
}

int recorder_end(recorder *r, deadline at)
{
    r->ending = true;
    pthread_cond_signal(&r->go);
    while (!r->left && condition_wait(&r->done, r->lock, at))
        ;
    int failed = r->left ? r->failed : ETIMEDOUT;
    recorder_drop(r);
    return failed;
}

void recorder_leave(recorder *r)
{
    if (r->file.fd >= 0)
        close(r->file.fd);
}

uint32_t recorder_number(const recorder *r)
{
    return r->number;
}
