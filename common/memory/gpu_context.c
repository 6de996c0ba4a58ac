/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu_internal.h"

#include <stdarg.h>
#include <stdio.h>

fanin_status gpu_error(const gpu *g, fanin_error *error, CUresult result,
                       const char *format, ...)
{
    char what[256];
    const char *name = NULL, *sentence = NULL;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    g->cuGetErrorName(result, &name);
    g->cuGetErrorString(result, &sentence);
    const error_place place = {
        .remedy = "restart the process if it goes on: a CUDA device that has "
                  "failed stays so for its process"};
    return error_set(error, FANIN_ERR_TRANSPORT, &place, "%s: %s (%s)", what,
                     name ? name : "unknown error", sentence ? sentence : "no text");
}

gpu_slot *gpu_slot_of(gpu *g, int device, fanin_error *error)
{
    if (device >= 0 && device < g->n)
        return &g->slots[device];
    error_set(error, FANIN_ERR_ARGUMENT, NULL,
              "there is no CUDA device %d: this process sees %d, counted from 0",
              device, g->n);
    return NULL;
}

int gpu_some_device(gpu *g)
{
    for (int i = 0; i < g->n; i++)
        if (atomic_load(&g->slots[i].context))
            return i;
    for (int i = 0; i < g->n; i++) {
        unsigned flags;
        int active = 0;
        if (g->cuDevicePrimaryCtxGetState(g->slots[i].handle, &flags, &active) ==
                CUDA_SUCCESS &&
            active)
            return i;
    }
    return 0;
}

static _Thread_local struct {
    unsigned depth;
    CUstreamCaptureMode before;
} relaxed;

/* From here to gpu_restore_capture(), calls of this thread do not invalidate what another thread
   captures into a CUDA graph, as calls that allocate, wait or ask otherwise do (CUDA Driver API,
   cuStreamBeginCapture, mode global, PyTorch's default). Pairs nest. */
static void relax_capture(const gpu *g)
{
    if (relaxed.depth++ > 0)
        return;
    relaxed.before = CU_STREAM_CAPTURE_MODE_RELAXED;
    (void)g->cuThreadExchangeStreamCaptureMode(&relaxed.before);
}

void gpu_restore_capture(const gpu *g)
{
    if (--relaxed.depth > 0)
        return;
    (void)g->cuThreadExchangeStreamCaptureMode(&relaxed.before);
}

/* Kept until the process ends: giving it back could destroy it under somebody's pointers. */
static CUresult retain(gpu *g, gpu_slot *slot, CUcontext *out)
{
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&g->lock);
    CUcontext context = atomic_load(&slot->context);
    if (!context) {
        const sigset_t signals = signals_block();
        result = g->cuDevicePrimaryCtxRetain(&context, slot->handle);
        signals_restore(&signals);
        if (result == CUDA_SUCCESS)
            atomic_store(&slot->context, context);
    }
    pthread_mutex_unlock(&g->lock);
    *out = context;
    return result;
}

fanin_status gpu_context_enter(gpu *g, int device, fanin_error *error)
{
    gpu_slot *slot = gpu_slot_of(g, device, error);
    if (!slot)
        return FANIN_ERR_ARGUMENT;
    CUcontext context = atomic_load(&slot->context);
    relax_capture(g);
    CUresult result = context ? CUDA_SUCCESS : retain(g, slot, &context);
    bool short_of_memory = result == CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS)
        result = g->cuCtxPushCurrent(context);
    if (result == CUDA_SUCCESS)
        return FANIN_OK;
    gpu_restore_capture(g);
    if (short_of_memory)
        return error_set(error, FANIN_ERR_MEMORY, NULL,
                         "device %d (%s) has no memory left for a CUDA context", device,
                         slot->info.name);
    return gpu_error(g, error, result, "device %d (%s) cannot be used", device,
                     slot->info.name);
}

void gpu_context_leave(gpu *g)
{
    CUcontext context;
    (void)g->cuCtxPopCurrent(&context);
    gpu_restore_capture(g);
}

fanin_status gpu_flush_remote_writes(gpu *g, int device, fanin_error *error)
{
    const gpu_slot *slot = gpu_slot_of(g, device, error);
    if (!slot)
        return FANIN_ERR_ARGUMENT;
    if (!slot->needs_flush)
        return FANIN_OK;
    fanin_status status = gpu_context_enter(g, device, error);
    if (status != FANIN_OK)
        return status;
    CUresult result = g->cuFlushGPUDirectRDMAWrites(
        CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
        CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER);
    if (result != CUDA_SUCCESS)
        status =
            gpu_error(g, error, result, "flushing remote writes to device %d", device);
    gpu_context_leave(g);
    return status;
}
