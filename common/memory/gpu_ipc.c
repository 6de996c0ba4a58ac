/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu_internal.h"

#include <inttypes.h>
#include <string.h>

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
