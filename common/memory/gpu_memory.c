/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu_internal.h"

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
