/* SPDX-License-Identifier: Apache-2.0 */
#include "trace.h"
#include "trace_file.h"
#include "clock.h"
#include "error_set.h"
#include "load_lock.h"
#include "text.h"
#include "thread.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* ----------------------------------------------------------------------- recorder */

/* What waits to be written of a trace, and the thread that does: file systems may answer late or
   never, and nobody else waits for them. All but recorder_new() is called with the lock that it was
   given, and waits without it. */

/* A pull of a thousand ranks has several spans of each. */
#define SPANS 4096u
/* The first of those that wait is written within so long. */
#define DUE_MS 1000

typedef struct kept {
    trace_thread thread;
    trace_span span;
} kept;

typedef struct recorder {
    pthread_mutex_t *lock;
    uint32_t number; /* of the process's recorders, from 1 */
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
} recorder;

/* -------------------------------------------------------------------- the thread */

static void recorder_drop(recorder *r)
{
    if (--r->users > 0)
        return;
    free(r->rows.all);
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

/* Makes @p where, or a file of the process in the folder @p where, in the thread, which tells by
    recorder_made(). @p lock: lives as long as the process. FANIN_ERR_MEMORY, FANIN_ERR_LIMIT: no
    thread. */
static fanin_status recorder_new(const char *where, bool is_folder,
                                 pthread_mutex_t *lock, recorder **out,
                                 fanin_error *error)
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

/* Waits until the file is there. Else it is recorder_end()'s turn: FANIN_ERR_IO, also if nothing is
   known until @p at; FANIN_ERR_AUTH. */
static fanin_status recorder_made(recorder *r, deadline at, fanin_error *error)
{
    const error_place place = {.phase = "trace",
                               .remedy = "give a file of a file system that answers"};
    while (!r->made && condition_wait(&r->done, r->lock, at))
        ;
    return r->made ? error_copy(error, &r->error)
                   : error_set_errno(error, FANIN_ERR_IO, ETIMEDOUT, &place,
                                     "cannot make the trace %.200s", r->where);
}

/* Makes the calling thread known. */
static trace_thread recorder_introduce(recorder *r)
{
    /* Older C libraries have no gettid(). */
    trace_thread t = {.number = ++r->threads, .tid = (uint32_t)syscall(SYS_gettid)};
    (void)pthread_getname_np(pthread_self(), t.name, sizeof t.name);
    return t;
}

/* Never allocates or writes. */
static void recorder_add(recorder *r, const trace_thread *thread,
                         const trace_span *span)
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

/* Has what there is written now and not within a second; waits for it until @p at. */
static void recorder_write(recorder *r, deadline at)
{
    const uint64_t asked = ++r->asked;
    r->users++;
    pthread_cond_signal(&r->go);
    while (r->written < asked && !r->left && !deadline_passed(at) &&
           condition_wait(&r->done, r->lock, at))
        ;
    recorder_drop(r);
}

/* Has the rest written, waits for that until @p at, and drops the recorder: the thread frees it if
    it comes later. 0, or an errno of why not all was written; ETIMEDOUT: nothing is known yet. */
static int recorder_end(recorder *r, deadline at)
{
    r->ending = true;
    pthread_cond_signal(&r->go);
    while (!r->left && condition_wait(&r->done, r->lock, at))
        ;
    int failed = r->left ? r->failed : ETIMEDOUT;
    recorder_drop(r);
    return failed;
}

/* --------------------------------------------------------------------- trace span */

/* What a span is, and whether anybody wants one. */

atomic_bool trace_recording;

static const char *const names[TRACE_NAMES] = {
    [TRACE_PULL] = "pull",       [TRACE_OPEN] = "open",
    [TRACE_ATTEMPT] = "attempt", [TRACE_RESOLVE] = "resolve",
    [TRACE_CONNECT] = "connect", [TRACE_WAIT] = "wait",
    [TRACE_CATALOG] = "catalog", [TRACE_PLAN] = "plan",
    [TRACE_PATHS] = "paths",     [TRACE_MAP] = "map",
    [TRACE_BEGIN] = "begin",     [TRACE_READ] = "read",
    [TRACE_READER] = "reader",   [TRACE_DIGEST] = "digest",
    [TRACE_END] = "end",         [TRACE_APPLY] = "apply",
    [TRACE_BRING] = "bring",     [TRACE_WRITE] = "write",
    [TRACE_PUBLISH] = "publish", [TRACE_BEGIN_UPDATE] = "begin_update",
    [TRACE_COMMIT] = "commit",
};

const char *trace_name_text(trace_name name)
{
    return names[name];
}

trace_span trace_span_of(trace_name name, uint64_t began, fanin_status outcome,
                         const char *about)
{
    trace_span span = {.began_ns = began,
                       .ended_ns = clock_ns(),
                       .name = name,
                       .rank = -1,
                       .outcome = outcome};
    if (about)
        utf8_copy(span.about, sizeof span.about, about);
    return span;
}

/* Two that share one share a row. */
int32_t trace_unknown_rank(const char *address)
{
    uint32_t hash = 2166136261;
    for (; *address; address++)
        hash = (hash ^ (unsigned char)*address) * 16777619;
    return -2 - (int32_t)(hash & 0xffffff);
}

/* -------------------------------------------------------------------------- trace */

/* How long starting and stopping a trace wait for its file. */
#define PATIENCE_MS 5000
/* And the end of a client or server, behind which the process may be gone without a word. */
#define FLUSH_MS 1000

static _Atomic uint32_t pulls;
/* Held for the copy of a span, and across every fork; never while anything is written. Nothing is
   taken under it. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static recorder *current; /* NULL: none */
static bool starting;     /* somebody makes one */
static bool asked;        /* the environment was looked at */

/* The calling thread, as the recorder of that number knows it. */
static _Thread_local struct {
    uint32_t recorder;
    trace_thread thread;
} own;

/* ----------------------------------------------------------------- recording */

uint32_t trace_next_pull(void)
{
    return atomic_fetch_add_explicit(&pulls, 1, memory_order_relaxed) + 1;
}

void trace_add(const trace_span *span)
{
    pthread_mutex_lock(&lock);
    if (current && own.recorder != current->number) {
        own.recorder = current->number;
        own.thread = recorder_introduce(current);
    }
    if (current)
        recorder_add(current, &own.thread, span);
    pthread_mutex_unlock(&lock);
}

static void write_now(deadline at)
{
    pthread_mutex_lock(&lock);
    if (current)
        recorder_write(current, at);
    pthread_mutex_unlock(&lock);
}

void trace_settle(fanin_status outcome)
{
    if (trace_on() && outcome != FANIN_OK)
        write_now(0);
}

void trace_flush(void)
{
    if (trace_on())
        write_now(deadline_in_ms(FLUSH_MS));
}

/* -------------------------------------------------------------- start, stop */

static void trace_before_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void trace_in_parent(void)
{
    pthread_mutex_unlock(&lock);
}

/* The file is the parent's, and so is what is to be written. The memory is not freed: that is no
   call for a child of several threads. */
static void trace_in_child(void)
{
    if (current && current->file.fd >= 0)
        close(current->file.fd);
    current = NULL;
    starting = asked = false;
    atomic_store(&trace_recording, false);
    pthread_mutex_unlock(&lock);
}

static void trace_install(void)
{
    (void)pthread_atfork(trace_before_fork, trace_in_parent, trace_in_child);
}

/* With the lock, which others have while it waits. */
static fanin_status trace_start(const char *where, bool is_folder, fanin_error *error)
{
    recorder *r = NULL;
    const deadline at = deadline_in_ms(PATIENCE_MS);
    fanin_status status = recorder_new(where, is_folder, &lock, &r, error);
    if (status != FANIN_OK)
        return status;
    starting = true;
    status = recorder_made(r, at, error);
    starting = false;
    if (status == FANIN_OK) {
        current = r;
        atomic_store(&trace_recording, true);
    } else {
        (void)recorder_end(r, 0);
    }
    return status;
}

fanin_status fanin_trace_start(const char *file, fanin_error *error)
{
    error_place place = {.phase = "trace",
                         .remedy = "stop it first, or unset FANIN_TRACE"};
    if (!file || !file[0])
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "no file is given");
    pthread_once(&once, trace_install);
    pthread_mutex_lock(&lock);
    fanin_status status = current || starting
                              ? error_set(error, FANIN_ERR_STATE, &place,
                                          "this process has a trace already")
                              : trace_start(file, false, error);
    pthread_mutex_unlock(&lock);
    return status;
}

fanin_status fanin_trace_stop(fanin_error *error)
{
    const error_place place = {.phase = "trace",
                               .remedy = "the part that was written before is whole"};
    pthread_mutex_lock(&lock);
    recorder *r = current;
    current = NULL;
    atomic_store(&trace_recording, false);
    int failed = r ? recorder_end(r, deadline_in_ms(PATIENCE_MS)) : 0;
    pthread_mutex_unlock(&lock);
    return failed ? error_set_errno(error, FANIN_ERR_IO, failed, &place,
                                    "not all of the trace could be written")
                  : FANIN_OK;
}

void trace_of_environment(const logger *log)
{
    fanin_error error = FANIN_ERROR_INIT;
    const char *folder = getenv("FANIN_TRACE");
    if (!folder || !folder[0])
        return;
    pthread_once(&once, trace_install);
    pthread_mutex_lock(&lock);
    fanin_status status = FANIN_OK;
    bool first = !asked && !current && !starting;
    asked = true;
    if (first)
        status = trace_start(folder, true, &error);
    pthread_mutex_unlock(&lock);
    if (status != FANIN_OK)
        log_write(log, FANIN_LOG_WARNING, "trace", "there is no trace: %s",
                  error.message);
}

/* At exit, and when the library is unloaded. */
__attribute__((destructor)) static void finish(void)
{
    (void)fanin_trace_stop(NULL);
}
