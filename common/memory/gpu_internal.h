/* SPDX-License-Identifier: Apache-2.0 */
/** @file What the files behind gpu.h share. The only header that includes CUDA's. */
#ifndef GPU_INTERNAL_H
#define GPU_INTERNAL_H

#include "copy_kernel.h"
#include "digest_kernel.h"
#include "error_set.h"
#include "gpu.h"
#include "thread.h"
#include <cuda.h>
#include <stdatomic.h>
#include <sys/types.h>

/** All functions of the driver that are called. cuda.h makes many of these names macros for the
    names with a version ("cuMemAlloc_v2") that the library exports; members of struct gpu and
    dlsym()'s names follow. */
#define GPU_FUNCTIONS(X)                                                               \
    X(cuInit)                                                                          \
    X(cuDriverGetVersion)                                                              \
    X(cuGetErrorName)                                                                  \
    X(cuGetErrorString)                                                                \
    X(cuDeviceGet)                                                                     \
    X(cuDeviceGetCount)                                                                \
    X(cuDeviceGetName)                                                                 \
    X(cuDeviceGetUuid)                                                                 \
    X(cuDeviceGetPCIBusId)                                                             \
    X(cuDeviceGetAttribute)                                                            \
    X(cuDeviceTotalMem)                                                                \
    X(cuDeviceCanAccessPeer)                                                           \
    X(cuDevicePrimaryCtxGetState)                                                      \
    X(cuDevicePrimaryCtxRetain)                                                        \
    X(cuCtxPushCurrent)                                                                \
    X(cuCtxPopCurrent)                                                                 \
    X(cuCtxEnablePeerAccess)                                                           \
    X(cuPointerGetAttributes)                                                          \
    X(cuMemAlloc)                                                                      \
    X(cuMemFree)                                                                       \
    X(cuMemHostAlloc)                                                                  \
    X(cuMemFreeHost)                                                                   \
    X(cuMemHostRegister)                                                               \
    X(cuMemHostUnregister)                                                             \
    X(cuMemcpyAsync)                                                                   \
    X(cuMemsetD8Async)                                                                 \
    X(cuIpcGetMemHandle)                                                               \
    X(cuIpcOpenMemHandle)                                                              \
    X(cuIpcCloseMemHandle)                                                             \
    X(cuStreamCreate)                                                                  \
    X(cuStreamDestroy)                                                                 \
    X(cuStreamQuery)                                                                   \
    X(cuStreamSynchronize)                                                             \
    X(cuStreamWaitEvent)                                                               \
    X(cuStreamAddCallback)                                                             \
    X(cuStreamGetCtx)                                                                  \
    X(cuStreamIsCapturing)                                                             \
    X(cuThreadExchangeStreamCaptureMode)                                               \
    X(cuEventCreate)                                                                   \
    X(cuEventDestroy)                                                                  \
    X(cuEventRecord)                                                                   \
    X(cuModuleLoadData)                                                                \
    X(cuModuleGetFunction)                                                             \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessor)                                     \
    X(cuLaunchKernel)                                                                  \
    X(cuFlushGPUDirectRDMAWrites)

/** A kernel on a device. */
typedef struct gpu_kernel {
    CUfunction function;      /**< NULL: not loaded */
    unsigned resident_blocks; /**< of it, on the whole device */
    CUresult refused;         /**< why there is none */
} gpu_kernel;

/** What is known of a device, and what belongs to it for the rest of the process. */
typedef struct gpu_slot {
    CUdevice handle;
    gpu_device info;
    bool needs_flush; /**< gpu_flush_remote_writes() */
    _Atomic(CUcontext)
        context; /**< the primary one, retained; NULL: not needed so far */
    /* under the lock, until they are set */
    gpu_kernel kernels[GPU_KERNELS];
    CUstream uploads;
} gpu_slot;

struct gpu {
    pthread_mutex_t lock; /**< over making what slots hold */
    pid_t pid;            /**< CUDA does not survive a fork */
    int version;          /**< 13000: 13.0 */
    char version_text[16];
    int n;
    gpu_slot slots[GPU_MAX_DEVICES];
#define X(name) __typeof__(&name) name; /* NOLINT(bugprone-macro-parentheses) */
    GPU_FUNCTIONS(X)
#undef X
};

struct gpu_stream {
    gpu *g;
    int device;
    CUstream handle;
};

/** Fills @p error with the text, ": " and the driver's name and sentence of @p result, and
    returns FANIN_ERR_TRANSPORT. */
fanin_status gpu_error(const gpu *g, fanin_error *error, CUresult result,
                       const char *format, ...) __attribute__((format(printf, 4, 5)));

/** What gpu_context_leave() does, but for taking the context away: for who has taken it away
    already. */
void gpu_restore_capture(const gpu *g);

/** The slot, NULL with FANIN_ERR_ARGUMENT in @p error: there is no such device. */
gpu_slot *gpu_slot_of(gpu *g, int device, fanin_error *error);

/** @p parameters->count and parts must not be 0. */
fanin_status gpu_kernel_launch(gpu_stream *stream, copy_parameters *parameters,
                               fanin_error *error);

#endif
