/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu_internal.h"

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
