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
            "newer "
            "than the kernels, build with its architecture in -Dgpu_architectures"};
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

static CUresult load_kernel(gpu *g, const gpu_slot *slot, const void *image,
                            const char *name, int threads, gpu_kernel *out)
{
    CUmodule module;
    CUfunction function;
    int blocks = 0, processors = 0;
    /* The module stays as long as the context, which stays as long as the process. */
    CUresult result = g->cuModuleLoadData(&module, image);
    if (result == CUDA_SUCCESS)
        result = g->cuModuleGetFunction(&function, module, name);
    if (result == CUDA_SUCCESS)
        result = g->cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function,
                                                                threads, 0);
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

/* Loads it once; the context is current. */
static fanin_status need_kernel(gpu *g, int device, fanin_error *error)
{
    gpu_slot *slot = &g->slots[device];
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&g->lock);
    if (!slot->copy.function)
        result = load_kernel(g, slot, copy_kernel_image(), COPY_KERNEL_NAME,
                             COPY_KERNEL_THREADS, &slot->copy);
    pthread_mutex_unlock(&g->lock);
    return result == CUDA_SUCCESS ? FANIN_OK : load_error(g, device, error, result);
}

/** A kernel that is loaded when it is needed. */
typedef struct kernel_source {
    const char *what, *name;
    const void *(*image)(void);
    int threads;
} kernel_source;

/* Loaded once; what the driver said of it is kept in *refused. */
static fanin_status need_other(gpu *g, int device, const kernel_source *source,
                               gpu_kernel *kernel, CUresult *refused,
                               fanin_error *error)
{
    fanin_status status = gpu_context_enter(g, device, error);
    if (status != FANIN_OK)
        return status;
    gpu_slot *slot = &g->slots[device];
    pthread_mutex_lock(&g->lock);
    if (!kernel->function && *refused == CUDA_SUCCESS)
        *refused = load_kernel(g, slot, source->image(), source->name, source->threads,
                               kernel);
    CUresult result = *refused;
    pthread_mutex_unlock(&g->lock);
    gpu_context_leave(g);
    if (result != CUDA_SUCCESS)
        return gpu_error(g, error, result, "loading the %s kernel on device %d (%s)",
                         source->what, device, slot->info.name);
    return FANIN_OK;
}

fanin_status gpu_prepare_digest(gpu *g, int device, fanin_error *error)
{
    static const kernel_source source = {"digest", DIGEST_KERNEL_NAME,
                                         digest_kernel_image, DIGEST_KERNEL_THREADS};
    gpu_slot *slot = &g->slots[device];
    return need_other(g, device, &source, &slot->digest, &slot->digest_refused, error);
}

fanin_status gpu_prepare_file_digest(gpu *g, int device, fanin_error *error)
{
    static const kernel_source source = {"digest", DIGEST_FILE_KERNEL_NAME,
                                         digest_kernel_image,
                                         DIGEST_FILE_KERNEL_THREADS};
    gpu_slot *slot = &g->slots[device];
    return need_other(g, device, &source, &slot->file_digest,
                      &slot->file_digest_refused, error);
}

static fanin_status need_patch_kernel(gpu *g, int device, int which, fanin_error *error)
{
    static const kernel_source sources[PATCH_KERNELS] = {
        [PATCH_COUNT] = {"patch", PATCH_COUNT_NAME, patch_kernel_image,
                         PATCH_KERNEL_THREADS},
        [PATCH_SCAN] = {"patch", PATCH_SCAN_NAME, patch_kernel_image,
                        PATCH_SCAN_THREADS},
        [PATCH_EMIT] = {"patch", PATCH_EMIT_NAME, patch_kernel_image,
                        PATCH_KERNEL_THREADS},
        [PATCH_APPLY] = {"patch", PATCH_APPLY_NAME, patch_kernel_image,
                         PATCH_KERNEL_THREADS},
    };
    gpu_slot *slot = &g->slots[device];
    return need_other(g, device, &sources[which], &slot->patch[which],
                      &slot->patch_refused[which], error);
}

fanin_status gpu_prepare_patches(gpu *g, int device, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    for (int i = PATCH_COUNT; i <= PATCH_EMIT && status == FANIN_OK; i++)
        status = need_patch_kernel(g, device, i, error);
    return status;
}

fanin_status gpu_prepare(gpu *g, int device, fanin_error *error)
{
    fanin_status status = gpu_context_enter(g, device, error);
    if (status != FANIN_OK)
        return status;
    status = need_kernel(g, device, error);
    gpu_context_leave(g);
    return status;
}

/* The kernel is loaded. More blocks than are resident would wait. */
static fanin_status kernel_launch(gpu_stream *stream, const gpu_kernel *kernel,
                                  const char *name, uint64_t blocks, unsigned threads,
                                  void *parameters, fanin_error *error)
{
    void *arguments[] = {parameters};
    fanin_status status = gpu_context_enter(stream->g, stream->device, error);
    if (status != FANIN_OK)
        return status;
    if (blocks > kernel->resident_blocks)
        blocks = kernel->resident_blocks;
    CUresult result =
        stream->g->cuLaunchKernel(kernel->function, (unsigned)blocks, 1, 1, threads, 1,
                                  1, 0, stream->handle, arguments, NULL);
    gpu_context_leave(stream->g);
    if (result != CUDA_SUCCESS)
        return gpu_error(stream->g, error, result,
                         "starting the %s kernel on device %d", name, stream->device);
    return FANIN_OK;
}

fanin_status gpu_kernel_launch(gpu_stream *stream, copy_parameters *parameters,
                               fanin_error *error)
{
    fanin_status status = need_kernel(stream->g, stream->device, error);
    if (status != FANIN_OK)
        return status;
    uint64_t shares =
        copy_turns(parameters->count, parameters->ways) * parameters->parts;
    uint64_t blocks = (shares + COPY_KERNEL_WARPS - 1) / COPY_KERNEL_WARPS;
    return kernel_launch(stream, &stream->g->slots[stream->device].copy, "copy", blocks,
                         COPY_KERNEL_THREADS, parameters, error);
}

fanin_status gpu_entries_run(gpu_stream *stream, const copy_entry *pinned, uint64_t n,
                             uint64_t from_add, uint64_t to_add, fanin_error *error)
{
    gpu *g = stream->g;
    if (n == 0)
        return FANIN_OK;
    fanin_status status = gpu_context_enter(g, stream->device, error);
    if (status != FANIN_OK)
        return status;
    status = need_kernel(g, stream->device, error);
    if (status == FANIN_OK) {
        uint64_t warps =
            (uint64_t)g->slots[stream->device].copy.resident_blocks * COPY_KERNEL_WARPS;
        copy_parameters parameters = {
            .entries = pinned,
            .count = n,
            .from_add = from_add,
            .to_add = to_add,
            .parts = copy_units_parts(pinned, n, warps),
            .ways = 1,
        };
        status = gpu_kernel_launch(stream, &parameters, error);
    }
    gpu_context_leave(g);
    return status;
}

fanin_status gpu_digest_run(gpu_stream *stream, const digest_list *list,
                            fanin_error *error)
{
    gpu *g = stream->g;
    if (list->n_pieces == 0)
        return FANIN_OK;
    fanin_status status = gpu_prepare_digest(g, stream->device, error);
    if (status != FANIN_OK)
        return status;
    const gpu_kernel *kernel = &g->slots[stream->device].digest;
    uint64_t warps = (uint64_t)kernel->resident_blocks * DIGEST_KERNEL_WARPS,
             shares = 1;
    while (shares < DIGEST_KERNEL_ROW && list->n_rows * shares < warps)
        shares *= 2;
    digest_parameters parameters = {.rows = list->rows,
                                    .entries = list->entries,
                                    .out = list->digests,
                                    .count = list->n_rows,
                                    .share = (uint32_t)(DIGEST_KERNEL_ROW / shares)};
    uint64_t blocks =
        (list->n_rows * shares + DIGEST_KERNEL_WARPS - 1) / DIGEST_KERNEL_WARPS;
    return kernel_launch(stream, kernel, "digest", blocks, DIGEST_KERNEL_THREADS,
                         &parameters, error);
}

fanin_status gpu_file_digest_run(gpu_stream *stream, const void *bytes, uint64_t n,
                                 uint64_t *out, fanin_error *error)
{
    gpu *g = stream->g;
    if (n == 0)
        return FANIN_OK;
    fanin_status status = gpu_prepare_file_digest(g, stream->device, error);
    if (status != FANIN_OK)
        return status;
    digest_file_parameters parameters = {.bytes = bytes, .out = out, .count = n};
    return kernel_launch(stream, &g->slots[stream->device].file_digest, "digest", n,
                         DIGEST_FILE_KERNEL_THREADS, &parameters, error);
}

/* The scan's one warp goes through all segments, the others share them. */
fanin_status gpu_patch_run(gpu_stream *stream, const patch_parameters *p,
                           fanin_error *error)
{
    gpu *g = stream->g;
    patch_parameters parameters = *p;
    const gpu_kernel *kernels = g->slots[stream->device].patch;
    fanin_status status = gpu_prepare_patches(g, stream->device, error);
    if (status != FANIN_OK)
        return status;
    uint64_t shares = patch_kernel_segments(p->bytes) * PATCH_SHARES,
             blocks = (shares + PATCH_KERNEL_WARPS - 1) / PATCH_KERNEL_WARPS;
    for (int i = PATCH_COUNT; i <= PATCH_EMIT && status == FANIN_OK; i++)
        status =
            kernel_launch(stream, &kernels[i], "patch", i == PATCH_SCAN ? 1 : blocks,
                          i == PATCH_SCAN ? PATCH_SCAN_THREADS : PATCH_KERNEL_THREADS,
                          &parameters, error);
    return status;
}

fanin_status gpu_prepare_apply(gpu *g, int device, fanin_error *error)
{
    return need_patch_kernel(g, device, PATCH_APPLY, error);
}

fanin_status gpu_patch_apply(gpu_stream *stream, const patch_apply_parameters *p,
                             fanin_error *error)
{
    gpu *g = stream->g;
    patch_apply_parameters parameters = *p;
    if (p->count == 0)
        return FANIN_OK;
    fanin_status status = gpu_prepare_apply(g, stream->device, error);
    if (status != FANIN_OK)
        return status;
    return kernel_launch(stream, &g->slots[stream->device].patch[PATCH_APPLY], "patch",
                         (p->count + PATCH_KERNEL_WARPS - 1) / PATCH_KERNEL_WARPS,
                         PATCH_KERNEL_THREADS, &parameters, error);
}
