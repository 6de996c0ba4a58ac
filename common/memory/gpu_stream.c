/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu_internal.h"

#include <sched.h>
#include <stdlib.h>
#include <time.h>

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

fanin_status gpu_copy(gpu_stream *stream, void *to, const void *from, size_t bytes,
                      fanin_error *error)
{
    gpu *g = stream->g;
    if (bytes == 0)
        return FANIN_OK;
    fanin_status status = gpu_context_enter(g, stream->device, error);
    if (status != FANIN_OK)
        return status;
    CUresult result =
        g->cuMemcpyAsync((CUdeviceptr)to, (CUdeviceptr)from, bytes, stream->handle);
    gpu_context_leave(g);
    if (result != CUDA_SUCCESS)
        return gpu_error(g, error, result, "copying %zu bytes on device %d", bytes,
                         stream->device);
    return FANIN_OK;
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
