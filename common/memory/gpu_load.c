/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu_internal.h"
#include "load_lock.h"

#include <ctype.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SONAME "libcuda.so.1"
/** The functions in GPU_FUNCTIONS and the attributes that are asked for are in all later ones. */
#define OLDEST_VERSION 11040

/* The one driver of the process. Published when complete, never changed nor freed. */
static load_lock loading = LOAD_LOCK_INIT;
static _Atomic(gpu *) loaded;

bool gpu_built(void)
{
    return true;
}

static fanin_status gpu_load_refuse(fanin_error *error, const char *remedy,
                                    const char *text)
{
    const error_place place = {.phase = "load", .remedy = remedy};
    return error_set(error, FANIN_ERR_UNSUPPORTED, &place, "%s", text);
}

/* ------------------------------------------------------------- the library */

static const char *library_name(void)
{
    const char *named = getenv("FANIN_CUDA_LIBRARY");
    return named ? named : SONAME;
}

static fanin_status open_library(void **out, fanin_error *error)
{
    const char *name = library_name();
    if (!name[0])
        return gpu_load_refuse(error, "unset FANIN_CUDA_LIBRARY to use CUDA",
                               "CUDA is switched off: FANIN_CUDA_LIBRARY is empty");
    *out = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (*out)
        return FANIN_OK;
    char text[512];
    snprintf(text, sizeof text, "no CUDA driver: %.480s", dlerror());
    return gpu_load_refuse(
        error,
        "install NVIDIA's driver; in a container, start it with the GPUs "
        "(docker run --gpus all)",
        text);
}

static bool gpu_load_read_functions(void *handle, gpu *g, char reason[256])
{
#define NAME_OF(name) #name
#define EXPORTED(name) NAME_OF(name)
    static const library_function functions[] = {
#define X(name) {EXPORTED(name), offsetof(gpu, name)},
        GPU_FUNCTIONS(X)
#undef X
    };
#undef EXPORTED
#undef NAME_OF
    const char *missing = library_table_read(handle, functions,
                                             sizeof functions / sizeof functions[0], g);
    if (missing)
        snprintf(reason, 256, "it has no function %s", missing);
    return !missing;
}

/* -------------------------------------------------------------- the devices */

static int attribute(const gpu *g, CUdevice device, CUdevice_attribute which)
{
    int value = 0;
    return g->cuDeviceGetAttribute(&value, which, device) == CUDA_SUCCESS ? value : 0;
}

static CUresult examine_device(gpu *g, int index)
{
    gpu_slot *slot = &g->slots[index];
    gpu_device *info = &slot->info;
    CUuuid uuid;
    size_t memory = 0;
    CUresult result = g->cuDeviceGet(&slot->handle, index);
    if (result == CUDA_SUCCESS)
        result = g->cuDeviceGetName(info->name, (int)sizeof info->name, slot->handle);
    if (result == CUDA_SUCCESS)
        result = g->cuDeviceGetUuid(&uuid, slot->handle);
    if (result == CUDA_SUCCESS)
        result = g->cuDeviceGetPCIBusId(info->pci, (int)sizeof info->pci, slot->handle);
    if (result == CUDA_SUCCESS)
        result = g->cuDeviceTotalMem(&memory, slot->handle);
    if (result != CUDA_SUCCESS)
        return result;
    info->name[sizeof info->name - 1] = '\0';
    memcpy(info->uuid, uuid.bytes, GPU_UUID_SIZE);
    for (char *c = info->pci; *c; c++)
        *c = (char)tolower((unsigned char)*c);
    info->memory = memory;
    info->major =
        attribute(g, slot->handle, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    info->minor =
        attribute(g, slot->handle, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    int order =
        attribute(g, slot->handle, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING);
    int flush = attribute(g, slot->handle,
                          CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS);
    slot->needs_flush = order < CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER &&
                        (flush & CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST);
    return CUDA_SUCCESS;
}

/* What to do about the ways in which a driver that is there does not start. */
static const char *init_remedy(CUresult result)
{
    switch (result) {
    case CUDA_ERROR_NO_DEVICE:
        return "look at nvidia-smi and at CUDA_VISIBLE_DEVICES; in a container, start "
               "it with the GPUs";
    case CUDA_ERROR_STUB_LIBRARY:
        return "this is the toolkit's stub for linking: let the loader find the "
               "driver's libcuda.so.1 first";
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
        return "the driver's library and its kernel module differ in version: reboot, "
               "or mount the host's library into the container";
    case CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE:
        return "take CUDA's compatibility package out of the library path: this GPU "
               "does not allow it";
    case CUDA_ERROR_SYSTEM_NOT_READY:
        return "start nvidia-fabricmanager";
    default:
        return "look at nvidia-smi and the kernel's messages";
    }
}

static fanin_status refuse_result(const gpu *g, CUresult result, fanin_error *error,
                                  const char *what)
{
    fanin_error why = FANIN_ERROR_INIT;
    gpu_error(g, &why, result, "%s", what);
    return gpu_load_refuse(error, init_remedy(result), why.message);
}

static fanin_status gpu_load_examine(gpu *g, fanin_error *error)
{
    int count = 0;
    /* NOLINTNEXTLINE(clang-analyzer-core.CallAndMessage): dlsym() has set it */
    CUresult result = g->cuInit(0);
    if (result == CUDA_ERROR_NO_DEVICE)
        return gpu_load_refuse(error, init_remedy(result),
                               "the CUDA driver finds no GPU on this machine");
    if (result != CUDA_SUCCESS)
        return refuse_result(g, result, error, "the CUDA driver does not start");
    result = g->cuDeviceGetCount(&count);
    for (int i = 0; result == CUDA_SUCCESS && i < count && i < GPU_MAX_DEVICES; i++) {
        result = examine_device(g, i);
        g->n = i + 1;
    }
    if (result != CUDA_SUCCESS)
        return refuse_result(g, result, error, "the CUDA driver denies its devices");
    if (g->n == 0)
        return gpu_load_refuse(error, init_remedy(CUDA_ERROR_NO_DEVICE),
                               "the CUDA driver finds no GPU on this machine");
    return FANIN_OK;
}

/* ----------------------------------------------------------------- loading */

static fanin_status check_version(gpu *g, fanin_error *error)
{
    char text[256];
    if (g->cuDriverGetVersion(&g->version) != CUDA_SUCCESS)
        g->version = 0;
    snprintf(g->version_text, sizeof g->version_text, "%d.%d", g->version / 1000,
             g->version % 1000 / 10);
    if (g->version >= OLDEST_VERSION)
        return FANIN_OK;
    snprintf(text, sizeof text,
             "the CUDA driver is too old: it supports CUDA %s, and %d.%d is needed",
             g->version_text, OLDEST_VERSION / 1000, OLDEST_VERSION % 1000 / 10);
    return gpu_load_refuse(error, "update NVIDIA's driver", text);
}

/* Takes the reference of @p handle over. */
static fanin_status gpu_load_load(void *handle, gpu **out, fanin_error *error)
{
    char reason[256], text[512];
    fanin_status status = FANIN_OK;
    gpu *g = calloc(1, sizeof *g);
    if (!g) {
        status = error_set_memory(error);
    } else if (!gpu_load_read_functions(handle, g, reason)) {
        snprintf(text, sizeof text, "the CUDA driver %.200s cannot be used: %s",
                 library_name(), reason);
        status = gpu_load_refuse(error, "update NVIDIA's driver", text);
    } else {
        status = check_version(g, error);
    }
    if (status == FANIN_OK)
        status = gpu_load_examine(g, error);
    if (status != FANIN_OK) {
        /* The library stays: threads of a driver that has started may be in it. */
        free(g);
        return status;
    }
    pthread_mutex_init(&g->lock, NULL);
    g->pid = getpid();
    *out = g;
    return FANIN_OK;
}

fanin_status gpu_load(const logger *log, gpu **out, fanin_error *error)
{
    void *handle = NULL;
    fanin_status status = FANIN_OK;
    if (!load_lock_take(&loading))
        return load_lock_lost("CUDA", error);
    gpu *g = atomic_load(&loaded);
    if (g) {
        if (g->pid != getpid())
            status = error_set(error, FANIN_ERR_FORKED, NULL,
                               "CUDA was initialized before this process was forked, "
                               "and cannot be used in the child");
    } else {
        const sigset_t signals = signals_block();
        status = open_library(&handle, error);
        if (status == FANIN_OK)
            status = gpu_load_load(handle, &g, error);
        signals_restore(&signals);
        if (status == FANIN_OK) {
            log_write(log, FANIN_LOG_INFO, "cuda-loaded",
                      "CUDA %s, devices: %d, the first: %s", g->version_text, g->n,
                      g->slots[0].info.name);
            atomic_store(&loaded, g);
        }
    }
    if (status == FANIN_OK)
        *out = g;
    load_lock_give(&loading);
    return status;
}

/* Before cuInit() in this process, all functions but a few refuse. */
static bool is_initialized(void *handle)
{
    int count;
    CUresult(CUDAAPI * get_count)(int *);
    void *symbol = dlsym(handle, "cuDeviceGetCount");
    if (!symbol)
        return false;
    memcpy(&get_count, &symbol, sizeof get_count);
    return get_count(&count) == CUDA_SUCCESS && count > 0;
}

gpu *gpu_present(void)
{
    gpu *g = atomic_load(&loaded);
    if (g)
        return g->pid == getpid() ? g : NULL;
    const char *name = library_name();
    void *handle = name[0] ? dlopen(name, RTLD_NOW | RTLD_NOLOAD) : NULL;
    if (!handle)
        return NULL;
    if (is_initialized(handle) && gpu_load(NULL, &g, NULL) != FANIN_OK)
        g = NULL;
    dlclose(handle);
    return g;
}

/* ---------------------------------------------------------------- questions */

const char *gpu_driver_version(const gpu *g)
{
    return g->version_text;
}

int gpu_count(const gpu *g)
{
    return g->n;
}

fanin_status gpu_device_get(const gpu *g, int device, gpu_device *out,
                            fanin_error *error)
{
    const gpu_slot *slot = gpu_slot_of((gpu *)g, device, error);
    if (!slot)
        return FANIN_ERR_ARGUMENT;
    *out = slot->info;
    return FANIN_OK;
}

int gpu_device_of_uuid(const gpu *g, const uint8_t uuid[GPU_UUID_SIZE])
{
    for (int i = 0; i < g->n; i++)
        if (memcmp(g->slots[i].info.uuid, uuid, GPU_UUID_SIZE) == 0)
            return i;
    return -1;
}

bool gpu_can_access(const gpu *g, int device, int peer)
{
    int can = 0;
    if (device < 0 || device >= g->n || peer < 0 || peer >= g->n)
        return false;
    return device == peer ||
           (g->cuDeviceCanAccessPeer(&can, g->slots[device].handle,
                                     g->slots[peer].handle) == CUDA_SUCCESS &&
            can);
}
