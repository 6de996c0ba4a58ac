/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu_internal.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* -------------------------------------------------------------------- gpu context */

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

/* A device whose primary context exists already, if there is one; for what needs some context. */
static int gpu_some_device(gpu *g)
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

bool gpu_let_access(gpu *g, int device, int peer)
{
    CUcontext context;
    if (device == peer || !gpu_can_access(g, device, peer))
        return device == peer;
    if (retain(g, &g->slots[peer], &context) != CUDA_SUCCESS ||
        gpu_context_enter(g, device, NULL) != FANIN_OK)
        return false;
    CUresult result = g->cuCtxEnablePeerAccess(context, 0);
    gpu_context_leave(g);
    return result == CUDA_SUCCESS || result == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
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

/* ---------------------------------------------------------------------- gpu range */

const char *gpu_origin_name(gpu_origin origin)
{
    switch (origin) {
    case GPU_ORIGIN_MALLOC:
        return "cudaMalloc";
    case GPU_ORIGIN_VIRTUAL:
        return "virtual-memory API";
    case GPU_ORIGIN_POOL:
        return "stream-ordered pool";
    case GPU_ORIGIN_MANAGED:
        return "managed memory";
    case GPU_ORIGIN_HOST:
        break;
    }
    return "host memory";
}

/* What the driver says of a pointer. Its flags may have 1 or 4 bytes: these fields are zeroed, wide
   enough, and only compared with 0. */
typedef struct attributes {
    CUmemorytype type;
    int device;
    uint64_t managed, legacy_ipc;
    unsigned long long id;
    CUdeviceptr start;
    size_t size;
    CUmemoryPool pool;
} attributes;

/* The plural function: it knows no error for a pointer that is not CUDA's, and makes no context. */
static CUresult gpu_range_ask(const gpu *g, const void *pointer, attributes *out)
{
    CUpointer_attribute which[] = {
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        CU_POINTER_ATTRIBUTE_IS_MANAGED,
        CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
        CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
        CU_POINTER_ATTRIBUTE_BUFFER_ID,
        CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        CU_POINTER_ATTRIBUTE_RANGE_SIZE,
    };
    void *where[] = {
        &out->type, &out->device, &out->managed, &out->legacy_ipc,
        &out->pool, &out->id,     &out->start,   &out->size,
    };
    *out = (attributes){.device = -1};
    return g->cuPointerGetAttributes((unsigned)(sizeof which / sizeof which[0]), which,
                                     where, (CUdeviceptr)pointer);
}

static gpu_origin origin_of(const attributes *a)
{
    if (a->managed)
        return GPU_ORIGIN_MANAGED;
    if (a->pool)
        return GPU_ORIGIN_POOL;
    return a->legacy_ipc ? GPU_ORIGIN_MALLOC : GPU_ORIGIN_VIRTUAL;
}

fanin_status gpu_range_of(gpu *g, const void *pointer, gpu_range *out,
                          fanin_error *error)
{
    attributes a;
    CUresult result = gpu_range_ask(g, pointer, &a);
    if (result != CUDA_SUCCESS)
        return gpu_error(g, error, result, "what memory %p is in", pointer);
    *out = (gpu_range){
        .memory = {.kind = FANIN_MEMORY_HOST, .device = -1},
        .origin = GPU_ORIGIN_HOST,
    };
    /* Managed memory may be anywhere; kernels of its device reach it in any case. */
    if ((a.type != CU_MEMORYTYPE_DEVICE && !a.managed) || a.device < 0)
        return FANIN_OK;
    if (a.size == 0 || a.device >= g->n || (uint64_t)pointer < a.start ||
        (uint64_t)pointer - a.start >= a.size)
        return error_set(
            error, FANIN_ERR_TRANSPORT, NULL,
            "%p is memory of device %d, but the driver knows no allocation "
            "there (has it been freed?)",
            pointer, a.device);
    out->memory = (fanin_memory){.kind = FANIN_MEMORY_CUDA, .device = a.device};
    out->origin = origin_of(&a);
    out->base = a.start;
    out->length = a.size;
    out->id = a.id;
    return FANIN_OK;
}

/* ------------------------------------------------------------------------ gpu ipc */

_Static_assert(sizeof(CUipcMemHandle) == GPU_HANDLE_SIZE, "size of a handle");

static const char *export_remedy(gpu_origin origin)
{
    switch (origin) {
    case GPU_ORIGIN_VIRTUAL:
        return "allocate with cudaMalloc; with PyTorch, take expandable_segments:True "
               "out of PYTORCH_CUDA_ALLOC_CONF";
    case GPU_ORIGIN_POOL:
        return "allocate with cudaMalloc; with PyTorch, take backend:cudaMallocAsync "
               "out of PYTORCH_CUDA_ALLOC_CONF";
    default:
        return "allocate with cudaMalloc";
    }
}

fanin_status gpu_export(gpu *g, const gpu_range *range, uint8_t handle[GPU_HANDLE_SIZE],
                        fanin_error *error)
{
    CUipcMemHandle raw;
    if (range->origin != GPU_ORIGIN_MALLOC) {
        const error_place place = {.remedy = export_remedy(range->origin)};
        return error_set(
            error, FANIN_ERR_UNSUPPORTED, &place,
            "memory of this kind (%s) cannot be shared with other processes",
            gpu_origin_name(range->origin));
    }
    fanin_status status = gpu_context_enter(g, range->memory.device, error);
    if (status != FANIN_OK)
        return status;
    CUresult result = g->cuIpcGetMemHandle(&raw, (CUdeviceptr)range->base);
    gpu_context_leave(g);
    if (result != CUDA_SUCCESS)
        return gpu_error(g, error, result,
                         "exporting the allocation of %" PRIu64 " bytes at 0x%" PRIx64
                         " on device %d",
                         range->length, range->base, range->memory.device);
    memcpy(handle, &raw, GPU_HANDLE_SIZE);
    return FANIN_OK;
}

fanin_status gpu_map(gpu *g, int device, const uint8_t handle[GPU_HANDLE_SIZE],
                     void **base_out, fanin_error *error)
{
    CUipcMemHandle raw;
    CUdeviceptr base = 0;
    memcpy(&raw, handle, GPU_HANDLE_SIZE);
    fanin_status status = gpu_context_enter(g, device, error);
    if (status != FANIN_OK)
        return status;
    /* Without this flag, memory of another device could be mapped but not be read. */
    CUresult result =
        g->cuIpcOpenMemHandle(&base, raw, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    gpu_context_leave(g);
    if (result == CUDA_ERROR_PEER_ACCESS_UNSUPPORTED ||
        result == CUDA_ERROR_NOT_SUPPORTED) {
        const error_place place = {
            .remedy =
                "choose GPUs that nvidia-smi topo -p2p r shows as OK, or use path "
                "stream"};
        return error_set(
            error, FANIN_ERR_UNSUPPORTED, &place,
            "device %d (%s) cannot read the memory of the GPU that holds the "
            "allocation",
            device, g->slots[device].info.name);
    }
    if (result != CUDA_SUCCESS)
        return gpu_error(g, error, result,
                         "mapping an allocation of another process for device %d",
                         device);
    *base_out = (void *)base; /* NOLINT(performance-no-int-to-ptr) */
    return FANIN_OK;
}

void gpu_unmap(gpu *g, int device, void *base)
{
    if (!base || gpu_context_enter(g, device, NULL) != FANIN_OK)
        return;
    (void)g->cuIpcCloseMemHandle((CUdeviceptr)base);
    gpu_context_leave(g);
}

/* --------------------------------------------------------------------- gpu memory */

fanin_status gpu_alloc(gpu *g, int device, size_t bytes, void **out, fanin_error *error)
{
    CUdeviceptr memory = 0;
    fanin_status status = gpu_context_enter(g, device, error);
    if (status != FANIN_OK)
        return status;
    CUresult result = g->cuMemAlloc(&memory, bytes ? bytes : 1);
    gpu_context_leave(g);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        const error_place place = {
            .remedy = "leave more of the device's memory to this process"};
        return error_set(error, FANIN_ERR_MEMORY, &place,
                         "device %d (%s) has no %zu bytes left", device,
                         g->slots[device].info.name, bytes);
    }
    if (result != CUDA_SUCCESS)
        return gpu_error(g, error, result, "allocating %zu bytes on device %d", bytes,
                         device);
    *out = (void *)memory; /* NOLINT(performance-no-int-to-ptr) */
    return FANIN_OK;
}

void gpu_free(gpu *g, int device, void *memory)
{
    if (!memory || gpu_context_enter(g, device, NULL) != FANIN_OK)
        return;
    (void)g->cuMemFree((CUdeviceptr)memory);
    gpu_context_leave(g);
}

fanin_status gpu_host_alloc(gpu *g, size_t bytes, void **out, fanin_error *error)
{
    void *memory = NULL;
    fanin_status status = gpu_context_enter(g, gpu_some_device(g), error);
    if (status != FANIN_OK)
        return status;
    CUresult result =
        g->cuMemHostAlloc(&memory, bytes ? bytes : 1,
                          CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
    gpu_context_leave(g);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        return error_set(error, FANIN_ERR_MEMORY, NULL,
                         "no %zu bytes of pinned host memory", bytes);
    if (result != CUDA_SUCCESS)
        return gpu_error(g, error, result, "allocating %zu bytes of pinned host memory",
                         bytes);
    *out = memory;
    return FANIN_OK;
}

void gpu_host_free(gpu *g, void *memory)
{
    if (!memory || gpu_context_enter(g, gpu_some_device(g), NULL) != FANIN_OK)
        return;
    (void)g->cuMemFreeHost(memory);
    gpu_context_leave(g);
}

static fanin_status pin_error(const gpu *g, fanin_error *error, CUresult result,
                              size_t length)
{
    const error_place limit = {
        .remedy =
            "raise the limits on locked memory (ulimit -l, LimitMEMLOCK=) and on the "
            "memory of the container"};
    switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY:
    case CUDA_ERROR_OPERATING_SYSTEM:
        return error_set(error, FANIN_ERR_LIMIT, &limit,
                         "the system does not let CUDA pin %zu bytes of host memory",
                         length);
    case CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED:
        return error_set(
            error, FANIN_ERR_EXISTS, NULL,
            "%zu bytes of host memory are pinned already, at least in part", length);
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_NOT_PERMITTED:
        return error_set(
            error, FANIN_ERR_UNSUPPORTED, NULL,
            "CUDA cannot pin host memory that is there already on this system");
    default:
        return gpu_error(g, error, result, "pinning %zu bytes of host memory", length);
    }
}

fanin_status gpu_pin(gpu *g, void *base, size_t length, fanin_error *error)
{
    int device = gpu_some_device(g), same_address = 0;
    fanin_status status = gpu_context_enter(g, device, error);
    if (status != FANIN_OK)
        return status;
    CUresult result = g->cuDeviceGetAttribute(
        &same_address, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
        g->slots[device].handle);
    if (result == CUDA_SUCCESS && !same_address)
        result = CUDA_ERROR_NOT_SUPPORTED;
    if (result == CUDA_SUCCESS)
        result = g->cuMemHostRegister(
            base, length, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    gpu_context_leave(g);
    return result == CUDA_SUCCESS ? FANIN_OK : pin_error(g, error, result, length);
}

void gpu_unpin(gpu *g, void *base)
{
    if (!base || gpu_context_enter(g, gpu_some_device(g), NULL) != FANIN_OK)
        return;
    (void)g->cuMemHostUnregister(base);
    gpu_context_leave(g);
}
