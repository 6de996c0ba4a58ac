/* SPDX-License-Identifier: Apache-2.0 */
#include "copy_list.h"
#include "gpu_internal.h"

/** Made from copy_kernel.cu, digest_kernel.cu and patch_kernel.cu. */
const void *copy_kernel_image(void);
const void *digest_kernel_image(void);
const void *patch_kernel_image(void);

static fanin_status load_error(const gpu *g, int device, fanin_error *error,
                               CUresult result)
{
    const gpu_device *info = &g->slots[device].info;
    const error_place place = {
        .remedy =
            "update NVIDIA's driver to 580 (CUDA 13.0) or newer; where the GPU is "
            "newer than the kernels, build with its architecture in "
            "-Dgpu_architectures"};
    switch (result) {
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_INVALID_IMAGE:
    case CUDA_ERROR_INVALID_PTX:
    case CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
    case CUDA_ERROR_JIT_COMPILER_NOT_FOUND:
    case CUDA_ERROR_INVALID_SOURCE:
        gpu_error(g, error, result, "the copy kernel");
        return error_set(
            error, FANIN_ERR_UNSUPPORTED, &place,
            "the driver (CUDA %s) cannot run the copy kernel on device %d (%s, "
            "compute capability %d.%d)",
            g->version_text, device, info->name, info->major, info->minor);
    default:
        return gpu_error(g, error, result, "loading the copy kernel on device %d (%s)",
                         device, info->name);
    }
}

/** A kernel that is loaded when it is needed. */
typedef struct kernel_source {
    const char *what, *name;
    const void *(*image)(void);
    unsigned threads; /**< of a block */
} kernel_source;

static const kernel_source sources[GPU_KERNELS] = {
    [GPU_COPY] = {"copy", COPY_KERNEL_NAME, copy_kernel_image, COPY_KERNEL_THREADS},
    [GPU_DIGEST] = {"digest", DIGEST_KERNEL_NAME, digest_kernel_image,
                    DIGEST_KERNEL_THREADS},
    [GPU_FILE_DIGEST] = {"digest", DIGEST_FILE_KERNEL_NAME, digest_kernel_image,
                         DIGEST_FILE_KERNEL_THREADS},
    [GPU_PATCH_COUNT] = {"patch", PATCH_COUNT_NAME, patch_kernel_image,
                         PATCH_KERNEL_THREADS},
    [GPU_PATCH_SCAN] = {"patch", PATCH_SCAN_NAME, patch_kernel_image,
                        PATCH_SCAN_THREADS},
    [GPU_PATCH_EMIT] = {"patch", PATCH_EMIT_NAME, patch_kernel_image,
                        PATCH_KERNEL_THREADS},
    [GPU_PATCH_APPLY] = {"patch", PATCH_APPLY_NAME, patch_kernel_image,
                         PATCH_KERNEL_THREADS},
};

static CUresult load_kernel(gpu *g, const gpu_slot *slot, const kernel_source *source,
                            gpu_kernel *out)
{
    CUmodule module;
    CUfunction function;
    int blocks = 0, processors = 0;
    /* The module stays as long as the context, which stays as long as the process. */
    CUresult result = g->cuModuleLoadData(&module, source->image());
    if (result == CUDA_SUCCESS)
        result = g->cuModuleGetFunction(&function, module, source->name);
    if (result == CUDA_SUCCESS)
        result = g->cuOccupancyMaxActiveBlocksPerMultiprocessor(
            &blocks, function, (int)source->threads, 0);
    if (result == CUDA_SUCCESS)
        result = g->cuDeviceGetAttribute(
            &processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, slot->handle);
    if (result != CUDA_SUCCESS)
        return result;
    out->resident_blocks =
        blocks > 0 && processors > 0 ? (unsigned)(blocks * processors) : 1;
    out->function = function;
    return CUDA_SUCCESS;
}

/* A refusal of the copy kernel is not kept: nothing else does its work. */
fanin_status gpu_prepare(gpu *g, int device, gpu_kernel_id id, fanin_error *error)
{
    fanin_status status = gpu_context_enter(g, device, error);
    if (status != FANIN_OK)
        return status;
    gpu_slot *slot = &g->slots[device];
    gpu_kernel *kernel = &slot->kernels[id];
    pthread_mutex_lock(&g->lock);
    if (!kernel->function && (kernel->refused == CUDA_SUCCESS || id == GPU_COPY))
        kernel->refused = load_kernel(g, slot, &sources[id], kernel);
    CUresult result = kernel->refused;
    pthread_mutex_unlock(&g->lock);
    gpu_context_leave(g);
    if (result == CUDA_SUCCESS)
        return FANIN_OK;
    if (id == GPU_COPY)
        return load_error(g, device, error, result);
    return gpu_error(g, error, result, "loading the %s kernel on device %d (%s)",
                     sources[id].what, device, slot->info.name);
}

fanin_status gpu_prepare_patches(gpu *g, int device, fanin_error *error)
{
    fanin_status status = gpu_prepare(g, device, GPU_PATCH_COUNT, error);
    if (status == FANIN_OK)
        status = gpu_prepare(g, device, GPU_PATCH_SCAN, error);
    return status == FANIN_OK ? gpu_prepare(g, device, GPU_PATCH_EMIT, error) : status;
}

/* Of the stream's device. */
static uint64_t resident_blocks(const gpu_stream *stream, gpu_kernel_id id)
{
    return stream->g->slots[stream->device].kernels[id].resident_blocks;
}

/* The kernel is loaded. More blocks than are resident would wait. */
static fanin_status kernel_launch(gpu_stream *stream, gpu_kernel_id id, uint64_t blocks,
                                  void *parameters, fanin_error *error)
{
    void *arguments[] = {parameters};
    gpu *g = stream->g;
    fanin_status status = gpu_context_enter(g, stream->device, error);
    if (status != FANIN_OK)
        return status;
    if (blocks > resident_blocks(stream, id))
        blocks = resident_blocks(stream, id);
    CUresult result = g->cuLaunchKernel(g->slots[stream->device].kernels[id].function,
                                        (unsigned)blocks, 1, 1, sources[id].threads, 1,
                                        1, 0, stream->handle, arguments, NULL);
    gpu_context_leave(g);
    if (result != CUDA_SUCCESS)
        return gpu_error(g, error, result, "starting the %s kernel on device %d",
                         sources[id].what, stream->device);
    return FANIN_OK;
}

static uint64_t quotient_up(uint64_t a, uint64_t b)
{
    return (a + b - 1) / b;
}

fanin_status gpu_kernel_launch(gpu_stream *stream, copy_parameters *parameters,
                               fanin_error *error)
{
    fanin_status status = gpu_prepare(stream->g, stream->device, GPU_COPY, error);
    if (status != FANIN_OK)
        return status;
    uint64_t shares =
        copy_turns(parameters->count, parameters->ways) * parameters->parts;
    return kernel_launch(stream, GPU_COPY, quotient_up(shares, COPY_KERNEL_WARPS),
                         parameters, error);
}

fanin_status gpu_entries_run(gpu_stream *stream, const copy_entry *pinned, uint64_t n,
                             uint64_t from_add, uint64_t to_add, fanin_error *error)
{
    if (n == 0)
        return FANIN_OK;
    fanin_status status = gpu_prepare(stream->g, stream->device, GPU_COPY, error);
    if (status != FANIN_OK)
        return status;
    uint64_t warps = resident_blocks(stream, GPU_COPY) * COPY_KERNEL_WARPS;
    copy_parameters parameters = {
        .entries = pinned,
        .count = n,
        .from_add = from_add,
        .to_add = to_add,
        .parts = copy_units_parts(pinned, n, warps),
        .ways = 1,
    };
    return gpu_kernel_launch(stream, &parameters, error);
}

fanin_status gpu_digest_run(gpu_stream *stream, const digest_list *list,
                            fanin_error *error)
{
    if (list->n_pieces == 0)
        return FANIN_OK;
    fanin_status status = gpu_prepare(stream->g, stream->device, GPU_DIGEST, error);
    if (status != FANIN_OK)
        return status;
    uint64_t warps = resident_blocks(stream, GPU_DIGEST) * DIGEST_KERNEL_WARPS,
             shares = 1;
    while (shares < DIGEST_KERNEL_ROW && list->n_rows * shares < warps)
        shares *= 2;
    digest_parameters parameters = {.rows = list->rows,
                                    .entries = list->entries,
                                    .out = list->digests,
                                    .count = list->n_rows,
                                    .share = (uint32_t)(DIGEST_KERNEL_ROW / shares)};
    return kernel_launch(stream, GPU_DIGEST,
                         quotient_up(list->n_rows * shares, DIGEST_KERNEL_WARPS),
                         &parameters, error);
}

fanin_status gpu_file_digest_run(gpu_stream *stream, const void *bytes, uint64_t n,
                                 uint64_t *out, fanin_error *error)
{
    digest_file_parameters parameters = {.bytes = bytes, .out = out, .count = n};
    fanin_status status =
        n == 0 ? FANIN_OK
               : gpu_prepare(stream->g, stream->device, GPU_FILE_DIGEST, error);
    return status != FANIN_OK || n == 0
               ? status
               : kernel_launch(stream, GPU_FILE_DIGEST, n, &parameters, error);
}

/* The scan's one warp goes through all segments, the others share them. */
fanin_status gpu_patch_run(gpu_stream *stream, const patch_parameters *p,
                           fanin_error *error)
{
    patch_parameters parameters = *p;
    fanin_status status = gpu_prepare_patches(stream->g, stream->device, error);
    uint64_t shares = patch_kernel_segments(p->bytes) * PATCH_SHARES,
             blocks = quotient_up(shares, PATCH_KERNEL_WARPS);
    if (status == FANIN_OK)
        status = kernel_launch(stream, GPU_PATCH_COUNT, blocks, &parameters, error);
    if (status == FANIN_OK)
        status = kernel_launch(stream, GPU_PATCH_SCAN, 1, &parameters, error);
    return status == FANIN_OK
               ? kernel_launch(stream, GPU_PATCH_EMIT, blocks, &parameters, error)
               : status;
}

fanin_status gpu_patch_apply(gpu_stream *stream, const patch_apply_parameters *p,
                             fanin_error *error)
{
    patch_apply_parameters parameters = *p;
    if (p->count == 0)
        return FANIN_OK;
    fanin_status status =
        gpu_prepare(stream->g, stream->device, GPU_PATCH_APPLY, error);
    return status == FANIN_OK ? kernel_launch(stream, GPU_PATCH_APPLY,
                                              quotient_up(p->count, PATCH_KERNEL_WARPS),
                                              &parameters, error)
                              : status;
}
