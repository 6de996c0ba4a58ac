/* SPDX-License-Identifier: Apache-2.0 */
/* Start, devices and contexts. */
#include "fake_cuda_internal.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_DEPTH 16

fake_driver fake = {.lock = PTHREAD_MUTEX_INITIALIZER};

static __thread CUcontext stack[MAX_DEPTH];
static __thread int depth;
static __thread bool in_callback;
static __thread CUstreamCaptureMode capture_mode; /* 0: global */

/* ---------------------------------------------------------------------- basics */

/* It is the driver of who links it, whatever this machine has. */
static void be_the_driver(void)
{
    Dl_info own;
    const char *named = getenv("FANIN_CUDA_LIBRARY");
    if (dladdr(&fake, &own) && (!named || strcmp(named, own.dli_fname) != 0))
        setenv("FANIN_CUDA_LIBRARY", own.dli_fname, 1);
}

__attribute__((constructor)) static void prepare(void)
{
    be_the_driver();
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&fake.changed, &attributes);
    pthread_condattr_destroy(&attributes);
}

void fake_die(const char *format, ...)
{
    char text[512];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    fprintf(stderr, "fake CUDA: %s\n", text);
    abort();
}

struct timespec fake_end(unsigned ms)
{
    struct timespec end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_sec += ms / 1000;
    end.tv_nsec += (long)(ms % 1000) * 1000000;
    if (end.tv_nsec >= 1000000000) {
        end.tv_sec++;
        end.tv_nsec -= 1000000000;
    }
    return end;
}

bool fake_wait(const struct timespec *end)
{
    return pthread_cond_timedwait(&fake.changed, &fake.lock, end) != ETIMEDOUT;
}

void fake_set_in_callback(bool inside)
{
    in_callback = inside;
}

CUcontext fake_current(void)
{
    return depth > 0 ? stack[depth - 1] : NULL;
}

/* What may not be called while any thread captures in mode global. */
static bool is_unsafe_in_capture(const char *function)
{
    static const char *const names[] = {
        "cuMemAlloc_v2",        "cuMemFree_v2",
        "cuMemHostAlloc",       "cuMemFreeHost",
        "cuMemHostRegister_v2", "cuMemHostUnregister",
        "cuStreamCreate",       "cuStreamSynchronize",
        "cuStreamQuery",        "cuModuleLoadData",
        "cuIpcGetMemHandle",    "cuIpcOpenMemHandle_v2",
        "cuIpcCloseMemHandle",  "cuDevicePrimaryCtxRetain"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(function, names[i]) == 0)
            return true;
    return false;
}

/* With the lock. */
static bool breaks_capture(const char *function)
{
    if (!fake.captures || capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED ||
        !is_unsafe_in_capture(function))
        return false;
    fake.invalidated = true;
    return true;
}

static CUresult entry_error(int needs)
{
    if ((needs & FAKE_INIT) != 0 && fake.pid == 0)
        return CUDA_ERROR_NOT_INITIALIZED;
    if ((needs & FAKE_CONTEXT) != FAKE_CONTEXT)
        return CUDA_SUCCESS;
    CUcontext context = fake_current();
    if (context == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    return context->retains == 0 ? CUDA_ERROR_CONTEXT_IS_DESTROYED : context->failed;
}

CUresult fake_enter(const char *function, int needs)
{
    if (fake.pid != 0 && fake.pid != getpid())
        return CUDA_ERROR_NOT_INITIALIZED; /* nor may the lock be touched after a fork */
    if (in_callback)
        return CUDA_ERROR_NOT_PERMITTED;
    pthread_mutex_lock(&fake.lock);
    CUresult result = entry_error(needs);
    CUresult ordered = fake_count_call(function, result == CUDA_SUCCESS);
    if (result == CUDA_SUCCESS)
        result = ordered;
    if (result == CUDA_SUCCESS && breaks_capture(function))
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (result != CUDA_SUCCESS)
        pthread_mutex_unlock(&fake.lock);
    return result;
}

CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    CUresult result = fake_enter(__func__, FAKE_INIT);
    if (result != CUDA_SUCCESS)
        return result;
    CUstreamCaptureMode before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return fake_leave(CUDA_SUCCESS);
}

void fake_cuda_begin_capture(void)
{
    pthread_mutex_lock(&fake.lock);
    fake.captures = true;
    fake.invalidated = false;
    pthread_mutex_unlock(&fake.lock);
}

bool fake_cuda_end_capture(void)
{
    pthread_mutex_lock(&fake.lock);
    bool valid = fake.captures && !fake.invalidated;
    fake.captures = false;
    pthread_mutex_unlock(&fake.lock);
    return valid;
}

CUresult fake_leave(CUresult result)
{
    pthread_mutex_unlock(&fake.lock);
    return result;
}

/* ----------------------------------------------------------------------- start */

static long number_of(const char *variable, long fallback)
{
    const char *text = getenv(variable);
    return text == NULL || *text == '\0' ? fallback : atol(text);
}

/* Devices that are visible, in the order of the list; what follows a wrong number is not. */
static void find_devices(long n)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    for (int i = 0; visible == NULL && i < n && i < FAKE_MAX_DEVICES; i++)
        fake.contexts[fake.n_devices++].physical = i;
    while (visible != NULL && *visible != '\0' && fake.n_devices < FAKE_MAX_DEVICES) {
        char *end;
        long number = strtol(visible, &end, 10);
        if (end == visible || number < 0 || number >= n)
            break;
        fake.contexts[fake.n_devices++].physical = (int)number;
        visible = *end == ',' ? end + 1 : end;
    }
    for (int i = 0; i < fake.n_devices; i++)
        fake.contexts[i].device = i;
}

static fake_cuda_kind kind_named(const char *name)
{
    static const char *const names[] = {"malloc", "virtual", "pool", "managed"};
    for (int i = 0; name != NULL && i < 4; i++)
        if (strcmp(name, names[i]) == 0)
            return (fake_cuda_kind)i;
    return FAKE_CUDA_MALLOC;
}

CUresult CUDAAPI cuInit(unsigned int flags)
{
    static bool ordered;
    if (fake.pid == 0) {
        pthread_mutex_lock(&fake.lock);
        if (!ordered)
            fake_order_failures(getenv("FAKE_CUDA_FAIL"));
        ordered = true;
        pthread_mutex_unlock(&fake.lock);
    }
    CUresult result = fake_enter(__func__, 0);
    if (result != CUDA_SUCCESS)
        return result;
    if (flags != 0)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    if (fake.pid != 0)
        return fake_leave(CUDA_SUCCESS);
    fake.n_devices = 0;
    find_devices(number_of("FAKE_CUDA_DEVICES", 2));
    if (fake.n_devices == 0)
        return fake_leave(CUDA_ERROR_NO_DEVICE);
    fake.no_peer = number_of("FAKE_CUDA_NO_PEER", 0) != 0;
    fake.own_ipc = number_of("FAKE_CUDA_OWN_IPC", 0) != 0;
    fake.memory = (uint64_t)number_of("FAKE_CUDA_MEMORY", 16L << 30);
    fake.kind = kind_named(getenv("FAKE_CUDA_KIND"));
    fake_memory_init();
    fake.pid = getpid();
    return fake_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDriverGetVersion(int *version)
{
    CUresult result = fake_enter(__func__, 0); /* works before cuInit(), too */
    if (result != CUDA_SUCCESS)
        return result;
    *version = (int)number_of("FAKE_CUDA_VERSION", 13000);
    return fake_leave(CUDA_SUCCESS);
}

/* --------------------------------------------------------------------- devices */

CUcontext fake_context_of(int device)
{
    return fake.pid != 0 && device >= 0 && device < fake.n_devices
               ? &fake.contexts[device]
               : NULL;
}

bool fake_can_access(CUcontext from, int device)
{
    return from->device == device || !fake.no_peer;
}

CUresult CUDAAPI cuDeviceGetCount(int *count)
{
    CUresult result = fake_enter(__func__, FAKE_INIT);
    if (result != CUDA_SUCCESS)
        return result;
    *count = fake.n_devices;
    return fake_leave(CUDA_SUCCESS);
}

/* What most functions about one device start with. The lock is held after success. */
static CUresult enter_device(const char *function, CUdevice device, CUcontext *out)
{
    CUresult result = fake_enter(function, FAKE_INIT);
    if (result != CUDA_SUCCESS)
        return result;
    *out = fake_context_of(device);
    return *out != NULL ? CUDA_SUCCESS : fake_leave(CUDA_ERROR_INVALID_DEVICE);
}

CUresult CUDAAPI cuDeviceGet(CUdevice *out, int ordinal)
{
    CUcontext context;
    CUresult result = enter_device(__func__, ordinal, &context);
    if (result != CUDA_SUCCESS)
        return result;
    *out = ordinal;
    return fake_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDeviceGetName(char *name, int length, CUdevice device)
{
    CUcontext context;
    CUresult result = enter_device(__func__, device, &context);
    if (result != CUDA_SUCCESS)
        return result;
    snprintf(name, (size_t)length, "Fake GPU");
    return fake_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    CUcontext context;
    CUresult result = enter_device(__func__, device, &context);
    if (result != CUDA_SUCCESS)
        return result;
    memcpy(uuid->bytes, "fake-gpu-number", 15);
    uuid->bytes[15] = (char)context->physical;
    return fake_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDeviceGetPCIBusId(char *id, int length, CUdevice device)
{
    CUcontext context;
    CUresult result = enter_device(__func__, device, &context);
    if (result != CUDA_SUCCESS)
        return result;
    snprintf(id, (size_t)length, "%04X:%02X:%02X.0", 0, 0x1b + context->physical, 0);
    return fake_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDeviceTotalMem(size_t *bytes, CUdevice device)
{
    CUcontext context;
    CUresult result = enter_device(__func__, device, &context);
    if (result != CUDA_SUCCESS)
        return result;
    *bytes = fake.memory;
    return fake_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute attribute,
                                      CUdevice device)
{
    CUcontext context;
    CUresult result = enter_device(__func__, device, &context);
    if (result != CUDA_SUCCESS)
        return result;
    static const struct {
        CUdevice_attribute attribute;
        int value;
    } known[] = {
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 4},
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
        {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
        {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
        {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
        {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
        {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
        {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS,
         CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST},
        {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING,
         CU_GPU_DIRECT_RDMA_WRITES_ORDERING_NONE},
    };
    if (attribute <= 0 || attribute >= CU_DEVICE_ATTRIBUTE_MAX)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    *value = 0;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].attribute == attribute)
            *value = known[i].value;
    return fake_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
    CUcontext context;
    CUresult result = enter_device(__func__, device, &context);
    if (result != CUDA_SUCCESS)
        return result;
    if (fake_context_of(peer) == NULL)
        return fake_leave(CUDA_ERROR_INVALID_DEVICE);
    *can =
        device != peer && fake_can_access(context, peer); /* 0 for itself, as in CUDA */
    return fake_leave(CUDA_SUCCESS);
}

/* -------------------------------------------------------------------- contexts */

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device)
{
    CUcontext context;
    CUresult result = enter_device(__func__, device, &context);
    if (result != CUDA_SUCCESS)
        return result;
    context->retains++;
    fake.counts.retains++;
    *out = context;
    return fake_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice device)
{
    CUcontext context;
    CUresult result = enter_device(__func__, device, &context);
    if (result != CUDA_SUCCESS)
        return result;
    if (context->retains == 0)
        return fake_leave(CUDA_ERROR_INVALID_CONTEXT);
    if (context->retains == 1 &&
        (fake_context_has_memory(context) || fake_context_has_streams(context)))
        fake_die("the context of device %d is released with memory or streams alive",
                 device);
    context->retains--;
    fake.counts.retains--;
    return fake_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags,
                                            int *active)
{
    CUcontext context;
    CUresult result = enter_device(__func__, device, &context);
    if (result != CUDA_SUCCESS)
        return result;
    *flags = 0;
    *active = context->retains > 0;
    return fake_leave(CUDA_SUCCESS);
}

static bool is_context(CUcontext context)
{
    for (int i = 0; i < fake.n_devices; i++)
        if (context == &fake.contexts[i])
            return context->retains > 0;
    return false;
}

CUresult CUDAAPI cuCtxPushCurrent(CUcontext context)
{
    CUresult result = fake_enter(__func__, FAKE_INIT);
    if (result != CUDA_SUCCESS)
        return result;
    if (!is_context(context))
        return fake_leave(CUDA_ERROR_INVALID_CONTEXT);
    if (depth == MAX_DEPTH)
        fake_die("%d contexts pushed by one thread", MAX_DEPTH);
    stack[depth++] = context;
    return fake_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuCtxPopCurrent(CUcontext *out)
{
    CUresult result = fake_enter(__func__, FAKE_INIT);
    if (result != CUDA_SUCCESS)
        return result;
    if (depth == 0)
        return fake_leave(CUDA_ERROR_INVALID_CONTEXT);
    depth--;
    if (out != NULL)
        *out = stack[depth];
    return fake_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext *out)
{
    CUresult result = fake_enter(__func__, FAKE_INIT);
    if (result != CUDA_SUCCESS)
        return result;
    *out = fake_current();
    return fake_leave(CUDA_SUCCESS);
}

/* Replaces the top of the stack, as CUDA does. */
CUresult CUDAAPI cuCtxSetCurrent(CUcontext context)
{
    CUresult result = fake_enter(__func__, FAKE_INIT);
    if (result != CUDA_SUCCESS)
        return result;
    if (context != NULL && !is_context(context))
        return fake_leave(CUDA_ERROR_INVALID_CONTEXT);
    depth -= depth > 0;
    if (context != NULL)
        stack[depth++] = context;
    return fake_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags)
{
    CUresult result = fake_enter(__func__, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    CUcontext context = fake_current();
    if (flags != 0)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    if (!is_context(peer) || peer == context)
        return fake_leave(CUDA_ERROR_INVALID_CONTEXT);
    if (!fake_can_access(context, peer->device))
        return fake_leave(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    if (context->peers[peer->device])
        return fake_leave(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    context->peers[peer->device] = true;
    return fake_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget target,
                                            CUflushGPUDirectRDMAWritesScope scope)
{
    CUresult result = fake_enter(__func__, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    bool known = target == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX &&
                 (scope == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER ||
                  scope == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES);
    return fake_leave(known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}
