/* SPDX-License-Identifier: Apache-2.0 */
#include "trace.h"

#include "error_set.h"
#include "recorder.h"
#include <stdlib.h>

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
    if (current && own.recorder != recorder_number(current)) {
        own.recorder = recorder_number(current);
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

/* The file is the parent's, and so is what is to be written. */
static void trace_in_child(void)
{
    if (current)
        recorder_leave(current);
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
    recorder *r;
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
