/* SPDX-License-Identifier: Apache-2.0 */
/* Streams, each a queue with a thread. */
#include "fake_cuda_stream.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static CUstream zombies; /* their threads have ended or will soon */

/* ------------------------------------------------------------------- operations */

void fake_put_event(CUevent e)
{
    if (--e->uses == 0)
        free(e);
}

static void free_op(op *o)
{
    if (o->event != NULL)
        fake_put_event(o->event);
    if (o->launch != NULL)
        fake_kernel_free(o->launch);
    free(o->staged);
    free(o);
}

static void reach(CUevent e, uint64_t turn)
{
    if (turn > e->reached)
        e->reached = turn;
}

static bool is_gated(const struct CUstream_st *s)
{
    const op *o = s->first;
    if (o == NULL || s->context->failed != CUDA_SUCCESS)
        return o == NULL;
    return s->held || s->context->held ||
           (o->kind == OP_WAIT && o->event->reached < o->turn &&
            o->event->context->failed == CUDA_SUCCESS);
}

/* Where the bytes are for us; the range cannot go away until it is put back. */
static uint8_t *use(uint64_t address, uint64_t length, fake_range **range)
{
    *range = fake_find(address, length);
    if (*range == NULL && fake_is_device_address(address))
        fake_die("a copy runs when its memory at %#llx has been freed",
                 (unsigned long long)address);
    if (*range == NULL)
        return (uint8_t *)(uintptr_t)address;
    (*range)->busy++;
    return (*range)->alias + (address - (*range)->start);
}

static void run_copy(const op *o)
{
    fake_range *to_range, *from_range = NULL;
    uint8_t *to = use(o->to, o->length, &to_range), *from = o->staged;
    if (o->kind == OP_COPY && from == NULL)
        from = use(o->from, o->length, &from_range);
    pthread_mutex_unlock(&fake.lock);
    if (from != NULL)
        memmove(to, from, o->length);
    else
        memset(to, o->value, o->length);
    pthread_mutex_lock(&fake.lock);
    if (to_range != NULL)
        to_range->busy--;
    if (from_range != NULL)
        from_range->busy--;
    fake.counts.copies++;
}

static void run_callback(CUstream s, const op *o, CUresult status)
{
    pthread_mutex_unlock(&fake.lock);
    fake_set_in_callback(true);
    if (o->kind == OP_HOST)
        o->host(o->cookie);
    else
        o->callback(s->is_default ? NULL : s, status, o->cookie);
    fake_set_in_callback(false);
    pthread_mutex_lock(&fake.lock);
}

/* With the lock, which is given away while it works. */
static void run(CUstream s, const op *o)
{
    switch (o->kind) {
    case OP_COPY:
    case OP_FILL:
        run_copy(o);
        break;
    case OP_KERNEL:
        pthread_mutex_unlock(&fake.lock);
        fake_kernel_run(s->context, o->launch);
        pthread_mutex_lock(&fake.lock);
        break;
    case OP_HOST:
    case OP_CALLBACK:
        run_callback(s, o, CUDA_SUCCESS);
        break;
    case OP_RECORD:
        reach(o->event, o->turn);
        break;
    case OP_WAIT:
        break;
    }
}

/* What becomes of it on a device that has failed: callbacks are told, host functions are not. */
static void drop(CUstream s, const op *o)
{
    if (o->kind == OP_CALLBACK && !fake.ending)
        run_callback(s, o, s->context->failed);
}

static void *stream_main(void *cookie)
{
    CUstream s = cookie;
    pthread_mutex_lock(&fake.lock);
    while (!fake.ending && !(s->dying && s->first == NULL)) {
        if (is_gated(s)) {
            pthread_cond_wait(&fake.changed, &fake.lock);
            continue;
        }
        op *o = s->first;
        if (s->context->failed == CUDA_SUCCESS)
            run(s, o);
        else
            drop(s, o);
        s->first = o->next;
        if (s->first == NULL)
            s->last = &s->first;
        s->finished++;
        free_op(o);
        pthread_cond_broadcast(&fake.changed);
    }
    while (s->first != NULL) {
        op *o = s->first;
        s->first = o->next;
        free_op(o);
    }
    s->ended = true;
    pthread_mutex_unlock(&fake.lock);
    return NULL;
}

CUresult fake_queue(CUstream s, op like)
{
    op *o = malloc(sizeof *o);
    if (o == NULL)
        fake_die("out of memory");
    *o = like;
    o->next = NULL;
    if (o->event != NULL)
        o->event->uses++;
    *s->last = o;
    s->last = &o->next;
    s->queued++;
    pthread_cond_broadcast(&fake.changed);
    return CUDA_SUCCESS;
}

/* --------------------------------------------------------------------- streams */

static CUstream make_stream(CUcontext context)
{
    CUstream s = calloc(1, sizeof *s);
    if (s == NULL)
        fake_die("out of memory");
    s->context = context;
    s->last = &s->first;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&s->thread, NULL, stream_main, s) != 0)
        fake_die("no thread for a stream");
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_setname_np(s->thread, "cuda-stream"); /* as the driver's are named */
    s->next = context->streams;
    context->streams = s;
    return s;
}

static void unlink_stream(CUstream s)
{
    for (CUstream *at = &s->context->streams; *at != NULL; at = &(*at)->next) {
        if (*at == s) {
            *at = s->next;
            return;
        }
    }
}

/* Those whose threads have ended; all: waits for the others too. Gives the lock away. */
static void bury(bool all)
{
    CUstream *at = &zombies;
    while (*at != NULL) {
        CUstream s = *at;
        if (!all && !s->ended) {
            at = &s->next;
            continue;
        }
        *at = s->next;
        pthread_mutex_unlock(&fake.lock);
        pthread_join(s->thread, NULL);
        free(s);
        pthread_mutex_lock(&fake.lock);
        at = &zombies;
    }
}

/* A process that ends leaves no thread and no memory for the checkers of such things to find. */
__attribute__((destructor)) static void end(void)
{
    if (fake.pid == 0 || fake.pid != getpid())
        return;
    pthread_mutex_lock(&fake.lock);
    fake.ending = true;
    pthread_cond_broadcast(&fake.changed);
    for (int i = 0; i < fake.n_devices; i++) {
        while (fake.contexts[i].streams != NULL) {
            CUstream s = fake.contexts[i].streams;
            fake.contexts[i].streams = s->next;
            s->next = zombies;
            zombies = s;
        }
    }
    bury(true);
    pthread_mutex_unlock(&fake.lock);
}

CUstream fake_stream_of(CUcontext context, CUstream handle)
{
    uintptr_t number = (uintptr_t)handle;
    if (number <= 2) { /* 0 and 1: legacy, 2: per thread */
        CUstream *s = &context->defaults[number == 2];
        if (*s == NULL) {
            *s = make_stream(context);
            (*s)->is_default = true;
        }
        return *s;
    }
    for (CUstream s = context->streams; s != NULL; s = s->next)
        if (s == handle && !s->dying)
            return s;
    return NULL;
}

CUstream fake_find_stream(CUstream handle)
{
    CUcontext current = fake_current();
    if ((uintptr_t)handle <= 2)
        return current == NULL ? NULL : fake_stream_of(current, handle);
    CUstream s = NULL;
    for (int i = 0; i < fake.n_devices && s == NULL; i++)
        s = fake_stream_of(&fake.contexts[i], handle);
    return s;
}

bool fake_context_has_streams(const struct CUctx_st *context)
{
    for (CUstream s = context->streams; s != NULL; s = s->next)
        if (!s->is_default)
            return true;
    return false;
}

CUresult CUDAAPI cuStreamCreate(CUstream *out, unsigned int flags)
{
    CUresult result = fake_enter(__func__, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    if ((flags & ~(unsigned)CU_STREAM_NON_BLOCKING) != 0)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    bury(false);
    *out = make_stream(fake_current());
    fake.counts.streams++;
    return fake_leave(CUDA_SUCCESS);
}

/* What is queued is done nevertheless. */
CUresult CUDAAPI cuStreamDestroy(CUstream handle)
{
    CUresult result = fake_enter(__func__, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    CUstream s = fake_find_stream(handle);
    if (s == NULL || s->is_default)
        return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    unlink_stream(s);
    bool idle = s->first == NULL;
    s->dying = true;
    if (!idle) {
        s->next = zombies;
        zombies = s;
    }
    fake.counts.streams--;
    pthread_cond_broadcast(&fake.changed);
    fake_leave(CUDA_SUCCESS);
    if (idle) {
        pthread_join(s->thread, NULL);
        free(s);
    }
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamGetCtx(CUstream handle, CUcontext *out)
{
    CUresult result = fake_enter(__func__, FAKE_INIT);
    if (result != CUDA_SUCCESS)
        return result;
    CUstream s = fake_find_stream(handle);
    if (s == NULL)
        return fake_leave(fake_current() == NULL ? CUDA_ERROR_INVALID_CONTEXT
                                                 : CUDA_ERROR_INVALID_HANDLE);
    *out = s->context;
    return fake_leave(CUDA_SUCCESS);
}

CUresult fake_enter_stream(const char *function, CUstream handle, CUstream *out)
{
    CUresult result = fake_enter(function, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    *out = fake_find_stream(handle);
    if (*out == NULL)
        return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    result = (*out)->context->failed;
    return result == CUDA_SUCCESS ? result : fake_leave(result);
}

/* Nothing is ever captured into a graph. */
CUresult CUDAAPI cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *out)
{
    CUstream s;
    CUresult result = fake_enter_stream(__func__, handle, &s);
    if (result != CUDA_SUCCESS)
        return result;
    *out = CU_STREAM_CAPTURE_STATUS_NONE;
    return fake_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuStreamQuery(CUstream handle)
{
    CUstream s;
    CUresult result = fake_enter_stream(__func__, handle, &s);
    if (result != CUDA_SUCCESS)
        return result;
    return fake_leave(s->finished == s->queued ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

CUresult fake_wait_for(CUstream s, uint64_t turn)
{
    CUcontext context = s->context;
    struct timespec limit = fake_end(30000);
    while (s->finished < turn && context->failed == CUDA_SUCCESS)
        if (!fake_wait(&limit))
            fake_die("waited 30 s for a stream of device %d: its work is held",
                     context->device);
    return context->failed;
}

CUresult CUDAAPI cuStreamSynchronize(CUstream handle)
{
    CUstream s;
    CUresult result = fake_enter_stream(__func__, handle, &s);
    if (result != CUDA_SUCCESS)
        return result;
    return fake_leave(fake_wait_for(s, s->queued));
}

bool fake_is_idle(const struct CUctx_st *context)
{
    for (CUstream s = context->streams; s != NULL; s = s->next)
        if (s->finished < s->queued)
            return false;
    for (CUstream s = zombies; s != NULL; s = s->next)
        if (s->context == context && s->finished < s->queued)
            return false;
    return true;
}

CUresult fake_drain(CUcontext context)
{
    struct timespec limit = fake_end(30000);
    while (!fake_is_idle(context) && context->failed == CUDA_SUCCESS)
        if (!fake_wait(&limit))
            fake_die("waited 30 s for device %d: its work is held", context->device);
    return context->failed;
}

void fake_release_zombies(const struct CUctx_st *context)
{
    for (CUstream s = zombies; s != NULL; s = s->next)
        if (s->context == context)
            s->held = false;
}
