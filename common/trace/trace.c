/* SPDX-License-Identifier: Apache-2.0 */
#include "trace.h"

#include "clock.h"
#include "error_set.h"
#include "trace_file.h"
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* A pull of a thousand ranks has several spans of each. */
#define SPANS 4096u
#define ROWS 2048u /* a power of 2 */
#define DUE_NS UINT64_C(1000000000)
/* Above every number that a kernel gives a thread. */
#define FIRST_ROW (UINT32_C(1) << 23)

/* A line of the picture: a thread, or a rank that a thread pulls from. */
typedef struct row {
    uint32_t tid; /* 0: free */
    int32_t rank;
    bool told;
    char thread[16];
} row;

typedef struct kept {
    trace_span span;
    uint16_t row;
} kept;

typedef struct recorder {
    trace_file file;
    pid_t pid;
    uint64_t flushed_ns, lost;
    uint32_t used, n_rows;
    kept spans[SPANS];
    row rows[ROWS];
} recorder;

atomic_bool trace_recording;

static _Atomic uint32_t pulls;
/* Held for the copy of a span, and while spans are written, which is between calls. Nothing is taken
   under it; held across every fork. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static recorder *current; /* NULL: none */
static bool asked;        /* the environment was looked at */
static _Thread_local uint32_t own_tid;

static const char *const names[TRACE_NAMES] = {
    [TRACE_PULL] = "pull",       [TRACE_OPEN] = "open",
    [TRACE_ATTEMPT] = "attempt", [TRACE_RESOLVE] = "resolve",
    [TRACE_CONNECT] = "connect", [TRACE_WAIT] = "wait",
    [TRACE_CATALOG] = "catalog", [TRACE_PLAN] = "plan",
    [TRACE_PATHS] = "paths",     [TRACE_MAP] = "map",
    [TRACE_BEGIN] = "begin",     [TRACE_READ] = "read",
    [TRACE_READER] = "reader",   [TRACE_DIGEST] = "digest",
    [TRACE_END] = "end",         [TRACE_WRITE] = "write",
    [TRACE_PUBLISH] = "publish", [TRACE_BEGIN_UPDATE] = "begin_update",
    [TRACE_COMMIT] = "commit",
};

const char *trace_name_text(trace_name name)
{
    return names[name];
}

/* ----------------------------------------------------------------- recording */

uint32_t trace_next_pull(void)
{
    return atomic_fetch_add_explicit(&pulls, 1, memory_order_relaxed) + 1;
}

/* Its number, ROWS: there is no room. */
static uint32_t row_of(recorder *r, uint32_t tid, int32_t rank)
{
    uint32_t at = (tid * 31u + (uint32_t)(rank + 1)) * UINT32_C(2654435761) >> 16;
    for (uint32_t i = 0; i < ROWS; i++, at++) {
        row *one = &r->rows[at % ROWS];
        if (one->tid == tid && one->rank == rank)
            return at % ROWS;
        if (one->tid != 0)
            continue;
        if (r->n_rows == ROWS / 2)
            return ROWS;
        r->n_rows++;
        *one = (row){.tid = tid, .rank = rank};
        (void)pthread_getname_np(pthread_self(), one->thread, sizeof one->thread);
        return at % ROWS;
    }
    return ROWS;
}

void trace_add(const trace_span *span)
{
    if (own_tid == 0) /* older C libraries have no gettid() */
        own_tid = (uint32_t)syscall(SYS_gettid);
    pthread_mutex_lock(&lock);
    recorder *r = current;
    uint32_t at = r ? row_of(r, own_tid, span->rank) : ROWS;
    if (r && at < ROWS && r->used < SPANS)
        r->spans[r->used++] = (kept){*span, (uint16_t)at};
    else if (r)
        r->lost++;
    pthread_mutex_unlock(&lock);
}

/* ------------------------------------------------------------------- writing */

static uint32_t shown_tid(const recorder *r, uint32_t at)
{
    return r->rows[at].rank < 0 ? r->rows[at].tid : FIRST_ROW + at;
}

static void tell_row(recorder *r, uint32_t at)
{
    row *one = &r->rows[at];
    char thread[40], who[96];
    trace_escape(thread, sizeof thread, one->thread);
    if (one->rank < 0)
        snprintf(who, sizeof who, "%s %u", thread, one->tid);
    else if (one->tid == (uint32_t)getpid())
        snprintf(who, sizeof who, "rank %d", (int)one->rank);
    else
        snprintf(who, sizeof who, "rank %d, thread %u", (int)one->rank, one->tid);
    trace_file_add(
        &r->file,
        "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":%u,\"ts\":0,"
        "\"args\":{\"name\":\"%s\"}}",
        (int)getpid(), shown_tid(r, at), who);
    one->told = true;
}

static void put_member(trace_file *f, const char *name, uint64_t value)
{
    trace_file_text(f, name);
    trace_file_number(f, value);
}

/* What the viewer shows beside the span: only what there is. */
static void put_arguments(trace_file *f, const trace_span *s)
{
    char about[2 * TRACE_ABOUT];
    trace_file_text(f, "\"args\":{\"outcome\":\"");
    trace_file_text(f, fanin_status_name(s->outcome));
    trace_file_text(f, "\"");
    if (s->place.pull > 0) {
        put_member(f, ",\"pull\":", s->place.pull);
        put_member(f, ",\"attempt\":", s->place.attempt);
    }
    if (s->rank >= 0)
        put_member(f, ",\"rank\":", (uint64_t)s->rank);
    if (s->step > 0)
        put_member(f, ",\"step\":", s->step);
    if (s->bytes > 0)
        put_member(f, ",\"bytes\":", s->bytes);
    if (s->scatter_ns > 0)
        put_member(f, ",\"scatter_ns\":", s->scatter_ns);
    if (s->about[0]) {
        trace_escape(about, sizeof about, s->about);
        trace_file_text(f, ",\"about\":\"");
        trace_file_text(f, about);
        trace_file_text(f, "\"");
    }
    trace_file_text(f, "}}");
}

static const char *color_of(const trace_span *s)
{
    if (s->outcome == FANIN_ERR_STALE)
        return ",\"cname\":\"bad\",";
    return s->outcome == FANIN_OK ? "," : ",\"cname\":\"terrible\",";
}

static void write_span(recorder *r, const kept *k)
{
    const trace_span *s = &k->span;
    trace_file *f = &r->file;
    if (!r->rows[k->row].told)
        tell_row(r, k->row);
    trace_file_begin(f);
    trace_file_text(f, "{\"ph\":\"X\",\"name\":\"");
    trace_file_text(f, names[s->name]);
    trace_file_text(f, s->name >= TRACE_BEGIN_UPDATE ? "\",\"cat\":\"trainer\""
                                                     : "\",\"cat\":\"pull\"");
    put_member(f, ",\"pid\":", (uint64_t)r->pid);
    put_member(f, ",\"tid\":", shown_tid(r, k->row));
    trace_file_text(f, ",\"ts\":");
    trace_file_micros(f, s->began_ns);
    trace_file_text(f, ",\"dur\":");
    trace_file_micros(f, s->ended_ns > s->began_ns ? s->ended_ns - s->began_ns : 0);
    trace_file_text(f, color_of(s));
    put_arguments(f, s);
}

/* Lock held. */
static void flush(recorder *r, uint64_t now)
{
    for (uint32_t i = 0; i < r->used; i++)
        write_span(r, &r->spans[i]);
    if (r->lost > 0)
        trace_file_add(
            &r->file,
            "{\"ph\":\"i\",\"s\":\"p\",\"name\":\"lost\",\"pid\":%d,\"tid\":%d,"
            "\"ts\":%" PRIu64 ".%03u,\"args\":{\"spans\":%" PRIu64 "}}",
            (int)getpid(), (int)getpid(), now / 1000, (unsigned)(now % 1000), r->lost);
    trace_file_flush(&r->file);
    r->used = 0;
    r->lost = 0;
    r->flushed_ns = now;
    if (r->file.failed)
        atomic_store(&trace_recording, false);
}

void trace_settle(bool now)
{
    if (!trace_on())
        return;
    uint64_t clock = clock_ns();
    pthread_mutex_lock(&lock);
    recorder *r = current;
    if (r && (now || r->used > SPANS / 2 || clock - r->flushed_ns > DUE_NS))
        flush(r, clock);
    pthread_mutex_unlock(&lock);
}

/* -------------------------------------------------------------- start, stop */

static void before_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void in_parent(void)
{
    pthread_mutex_unlock(&lock);
}

/* The file is the parent's, and so is what is to be written. The memory is not freed: that is no call
   for a child of several threads. */
static void in_child(void)
{
    if (current)
        close(current->file.fd);
    current = NULL;
    asked = false;
    own_tid = 0;
    atomic_store(&trace_recording, false);
    pthread_mutex_unlock(&lock);
}

static void install(void)
{
    (void)pthread_atfork(before_fork, in_parent, in_child);
}

/* Exactly one of both is given. Lock held. */
static fanin_status start(const char *file, const char *folder, fanin_error *error)
{
    recorder *r = calloc(1, sizeof *r);
    if (!r)
        return error_set_memory(error);
    fanin_status status = file ? trace_file_make(&r->file, file, error)
                               : trace_file_make_in(&r->file, folder, error);
    if (status != FANIN_OK) {
        free(r);
        return status;
    }
    r->pid = getpid();
    r->flushed_ns = clock_ns();
    current = r;
    atomic_store(&trace_recording, true);
    return FANIN_OK;
}

fanin_status fanin_trace_start(const char *file, fanin_error *error)
{
    error_place place = {.phase = "trace",
                         .remedy = "stop it first, or unset FANIN_TRACE"};
    if (!file || !file[0])
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "no file is given");
    pthread_once(&once, install);
    pthread_mutex_lock(&lock);
    fanin_status status = current ? error_set(error, FANIN_ERR_STATE, &place,
                                              "this process has a trace already")
                                  : start(file, NULL, error);
    pthread_mutex_unlock(&lock);
    return status;
}

fanin_status fanin_trace_stop(fanin_error *error)
{
    const error_place place = {.phase = "trace",
                               .remedy = "what was written before is whole"};
    pthread_mutex_lock(&lock);
    recorder *r = current;
    int failed = 0;
    if (r) {
        flush(r, clock_ns());
        failed = r->file.failed;
        if (close(r->file.fd) != 0 && !failed)
            failed = errno;
    }
    current = NULL;
    atomic_store(&trace_recording, false);
    pthread_mutex_unlock(&lock);
    free(r);
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
    pthread_once(&once, install);
    pthread_mutex_lock(&lock);
    fanin_status status = FANIN_OK;
    if (!asked && !current)
        status = start(NULL, folder, &error);
    asked = true;
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
