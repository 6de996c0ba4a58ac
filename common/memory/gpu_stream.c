/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu_internal.h"

#include <sched.h>
#include <stdlib.h>
#include <time.h>

/* ---------------------------------------------------------------------- gpu order */

/* Order between streams, and being told when a stream gets somewhere. */

static bool is_default_stream(const fanin_stream *callers)
{
    return (CUstream)callers->handle == CU_STREAM_LEGACY ||
           (CUstream)callers->handle == CU_STREAM_PER_THREAD;
}

/* Makes the context of the caller's stream current: as a rule its device's primary one, but it
   may be one that the caller made. gpu_context_leave() ends it. */
static fanin_status enter_callers(gpu *g, const fanin_stream *callers,
                                  fanin_error *error)
{
    CUcontext context = NULL;
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    fanin_status status = gpu_context_enter(g, callers->device, error);
    if (status != FANIN_OK)
        return status;
    if (!is_default_stream(callers) &&
        g->cuStreamGetCtx(callers->handle, &context) == CUDA_SUCCESS &&
        context != atomic_load(&g->slots[callers->device].context)) {
        CUcontext primary;
        (void)g->cuCtxPopCurrent(&primary);
        CUresult result = g->cuCtxPushCurrent(context);
        if (result != CUDA_SUCCESS) {
            gpu_restore_capture(g);
            return gpu_error(g, error, result, "the caller's stream cannot be used");
        }
    }
    /* A capturing stream would make our work a part of the graph that is being made. */
    CUresult result = g->cuStreamIsCapturing(callers->handle, &capture);
    if (result == CUDA_SUCCESS && capture == CU_STREAM_CAPTURE_STATUS_NONE)
        return FANIN_OK;
    gpu_context_leave(g);
    if (result == CUDA_SUCCESS)
        return error_set(error, FANIN_ERR_STATE, NULL,
                         "the caller's stream is being captured into a CUDA graph");
    return gpu_error(g, error, result,
                     "the caller's stream on device %d cannot be used",
                     callers->device);
}

bool gpu_is_busy(gpu *g, const fanin_stream *callers)
{
    if (!callers->handle || enter_callers(g, callers, NULL) != FANIN_OK)
        return false;
    CUresult result = g->cuStreamQuery(callers->handle);
    gpu_context_leave(g);
    return result == CUDA_ERROR_NOT_READY;
}

/* An event behind what is on @p stream, whose context is current. The driver keeps it alive while
   something waits for it, so it may be destroyed at once after that. */
static CUresult gpu_order_mark(gpu *g, CUstream stream, CUevent *out)
{
    CUresult result = g->cuEventCreate(out, CU_EVENT_DISABLE_TIMING);
    if (result != CUDA_SUCCESS)
        return result;
    result = g->cuEventRecord(*out, stream);
    if (result != CUDA_SUCCESS)
        (void)g->cuEventDestroy(*out);
    return result;
}

/* Of @p stream and the caller's, one goes on after what is on the other now. */
static fanin_status order(gpu_stream *stream, const fanin_stream *callers,
                          bool callers_first, fanin_error *error)
{
    gpu *g = stream->g;
    CUevent event;
    if (!callers->handle)
        return FANIN_OK;
    fanin_status status = enter_callers(g, callers, error);
    if (status != FANIN_OK)
        return status;
    /* Within the caller's context, for its default streams are what is current. */
    if (!callers_first)
        status = gpu_context_enter(g, stream->device, error);
    if (status == FANIN_OK) {
        CUresult result =
            gpu_order_mark(g, callers_first ? callers->handle : stream->handle, &event);
        if (!callers_first)
            gpu_context_leave(g);
        if (result == CUDA_SUCCESS) {
            result = g->cuStreamWaitEvent(
                callers_first ? stream->handle : callers->handle, event, 0);
            (void)g->cuEventDestroy(event);
        }
        if (result != CUDA_SUCCESS)
            status = gpu_error(g, error, result, "putting streams in order");
    }
    gpu_context_leave(g);
    return status;
}

fanin_status gpu_stream_after(gpu_stream *stream, const fanin_stream *callers,
                              fanin_error *error)
{
    return order(stream, callers, true, error);
}

fanin_status gpu_stream_before(gpu_stream *stream, const fanin_stream *callers,
                               fanin_error *error)
{
    return order(stream, callers, false, error);
}

/* --------------------------------------------------------------- notification */

typedef struct notice {
    gpu_reached_fn fn;
    void *cookie;
} notice;

static void CUDA_CB gpu_order_on_reached(CUstream stream, CUresult result,
                                         void *argument)
{
    (void)stream;
    const notice n = *(notice *)argument;
    free(argument);
    n.fn(n.cookie, result != CUDA_SUCCESS);
}

/* With cuStreamAddCallback(), the older of two functions: it calls back when the device has failed
   as well, and says so; cuLaunchHostFunc() then drops its function without a word, and whoever
   waits for it would wait forever. The context must be current. */
static fanin_status gpu_order_notify(gpu *g, CUstream stream, gpu_reached_fn fn,
                                     void *cookie, fanin_error *error)
{
    notice *n = malloc(sizeof *n);
    if (!n)
        return error_set_memory(error);
    *n = (notice){fn, cookie};
    const sigset_t signals = signals_block();
    CUresult result = g->cuStreamAddCallback(stream, gpu_order_on_reached, n, 0);
    signals_restore(&signals);
    if (result == CUDA_SUCCESS)
        return FANIN_OK;
    free(n);
    return gpu_error(g, error, result, "asking a stream to call back");
}

fanin_status gpu_stream_notify(gpu_stream *stream, gpu_reached_fn fn, void *cookie,
                               fanin_error *error)
{
    fanin_status status = gpu_context_enter(stream->g, stream->device, error);
    if (status != FANIN_OK)
        return status;
    status = gpu_order_notify(stream->g, stream->handle, fn, cookie, error);
    gpu_context_leave(stream->g);
    return status;
}

fanin_status gpu_notify(gpu *g, const fanin_stream *callers, gpu_reached_fn fn,
                        void *cookie, fanin_error *error)
{
    fanin_status status = enter_callers(g, callers, error);
    if (status != FANIN_OK)
        return status;
    status = gpu_order_notify(g, callers->handle, fn, cookie, error);
    gpu_context_leave(g);
    return status;
}

/* --------------------------------------------------------------------- gpu stream */

/** How long a wait keeps its core: pulls of small worlds end within. */
#define SPIN_NS UINT64_C(1000000)
/** After that it sleeps this fraction of the time it has waited, so that what is added to any wait
    stays a small fraction of it. */
#define PAUSE_FRACTION 64
#define PAUSE_MAX_NS UINT64_C(1000000)

fanin_status gpu_stream_create(gpu *g, int device, gpu_stream **out, fanin_error *error)
{
    gpu_stream *stream = calloc(1, sizeof *stream);
    if (!stream)
        return error_set_memory(error);
    fanin_status status = gpu_context_enter(g, device, error);
    if (status != FANIN_OK) {
        free(stream);
        return status;
    }
    stream->g = g;
    stream->device = device;
    /* Not in step with the legacy default stream, on which other code of the process may work. */
    CUresult result = g->cuStreamCreate(&stream->handle, CU_STREAM_NON_BLOCKING);
    gpu_context_leave(g);
    if (result != CUDA_SUCCESS) {
        free(stream);
        return gpu_error(g, error, result, "making a stream on device %d", device);
    }
    *out = stream;
    return FANIN_OK;
}

void gpu_stream_destroy(gpu_stream **stream)
{
    gpu_stream *s = *stream;
    *stream = NULL;
    if (!s)
        return;
    if (gpu_context_enter(s->g, s->device, NULL) == FANIN_OK) {
        (void)s->g->cuStreamSynchronize(s->handle);
        (void)s->g->cuStreamDestroy(s->handle);
        gpu_context_leave(s->g);
    }
    free(s);
}

void *gpu_stream_handle(const gpu_stream *stream)
{
    return stream->handle;
}

/* @p from NULL: zeroes. */
static fanin_status queue_bytes(gpu_stream *stream, void *to, const void *from,
                                size_t bytes, fanin_error *error)
{
    gpu *g = stream->g;
    if (bytes == 0)
        return FANIN_OK;
    fanin_status status = gpu_context_enter(g, stream->device, error);
    if (status != FANIN_OK)
        return status;
    CUresult result =
        from ? g->cuMemcpyAsync((CUdeviceptr)to, (CUdeviceptr)from, bytes,
                                stream->handle)
             : g->cuMemsetD8Async((CUdeviceptr)to, 0, bytes, stream->handle);
    gpu_context_leave(g);
    if (result != CUDA_SUCCESS)
        return gpu_error(g, error, result, "%s %zu bytes on device %d",
                         from ? "copying" : "zeroing", bytes, stream->device);
    return FANIN_OK;
}

fanin_status gpu_copy(gpu_stream *stream, void *to, const void *from, size_t bytes,
                      fanin_error *error)
{
    return queue_bytes(stream, to, from, bytes, error);
}

fanin_status gpu_zero(gpu_stream *stream, void *memory, size_t bytes,
                      fanin_error *error)
{
    return queue_bytes(stream, memory, NULL, bytes, error);
}

/* Blocking calls of the driver know no deadline, and callbacks cost more than a question. */
static CUresult poll_stream(const gpu_stream *stream, deadline at)
{
    uint64_t begin = clock_ns();
    for (;;) {
        CUresult result = stream->g->cuStreamQuery(stream->handle);
        if (result != CUDA_ERROR_NOT_READY || deadline_passed(at))
            return result;
        uint64_t waited = clock_ns() - begin;
        if (waited < SPIN_NS) {
            sched_yield();
            continue;
        }
        uint64_t pause = waited / PAUSE_FRACTION, left = deadline_left_ns(at);
        if (pause > PAUSE_MAX_NS)
            pause = PAUSE_MAX_NS;
        if (pause > left)
            pause = left;
        const struct timespec time = {.tv_nsec = (long)pause};
        nanosleep(&time, NULL);
    }
}

fanin_status gpu_stream_wait(gpu_stream *stream, deadline at, fanin_error *error)
{
    gpu *g = stream->g;
    fanin_status status = gpu_context_enter(g, stream->device, error);
    if (status != FANIN_OK)
        return status;
    CUresult result = poll_stream(stream, at);
    gpu_context_leave(g);
    if (result == CUDA_SUCCESS)
        return FANIN_OK;
    if (result == CUDA_ERROR_NOT_READY)
        return error_set(error, FANIN_ERR_TIMEOUT, NULL,
                         "device %d has not finished its work in time", stream->device);
    return gpu_error(g, error, result, "work on device %d failed", stream->device);
}
