/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer/device_driver.h"
#include "fetch/failure.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The driver's binary interface, as far as it is used here: handles are pointers, addresses of
   devices 64 bits wide, results 0 if good. */
typedef int result;
typedef uint64_t address;
enum {
    RESULT_OUT_OF_MEMORY = 2,
    RESULT_PEER_ENABLED = 704,
    STREAM_NON_BLOCKING = 1,
    REGISTER_PORTABLE = 1,
};

static struct driver {
    void *library;
    result (*init)(unsigned);
    result (*error_name)(result, const char **);
    result (*error_string)(result, const char **);
    result (*count)(int *);
    result (*get)(int *, int);
    result (*retain)(void **, int);
    result (*set_current)(void *);
    result (*can_access)(int *, int, int);
    result (*enable_peer)(void *, unsigned);
    result (*alloc)(address *, size_t);
    result (*free)(address);
    result (*host_alloc)(void **, size_t, unsigned);
    result (*host_free)(void *);
    result (*host_register)(void *, size_t, unsigned);
    result (*host_unregister)(void *);
    result (*stream_create)(void **, unsigned);
    result (*stream_destroy)(void *);
    result (*stream_wait)(void *);
    result (*copy)(address, address, size_t, void *);
} driver;

static const struct {
    const char *name;
    size_t offset;
} functions[] = {
    {"cuInit", offsetof(struct driver, init)},
    {"cuGetErrorName", offsetof(struct driver, error_name)},
    {"cuGetErrorString", offsetof(struct driver, error_string)},
    {"cuDeviceGetCount", offsetof(struct driver, count)},
    {"cuDeviceGet", offsetof(struct driver, get)},
    {"cuDevicePrimaryCtxRetain", offsetof(struct driver, retain)},
    {"cuCtxSetCurrent", offsetof(struct driver, set_current)},
    {"cuDeviceCanAccessPeer", offsetof(struct driver, can_access)},
    {"cuCtxEnablePeerAccess", offsetof(struct driver, enable_peer)},
    {"cuMemAlloc_v2", offsetof(struct driver, alloc)},
    {"cuMemFree_v2", offsetof(struct driver, free)},
    {"cuMemHostAlloc", offsetof(struct driver, host_alloc)},
    {"cuMemFreeHost", offsetof(struct driver, host_free)},
    {"cuMemHostRegister_v2", offsetof(struct driver, host_register)},
    {"cuMemHostUnregister", offsetof(struct driver, host_unregister)},
    {"cuStreamCreate", offsetof(struct driver, stream_create)},
    {"cuStreamDestroy_v2", offsetof(struct driver, stream_destroy)},
    {"cuStreamSynchronize", offsetof(struct driver, stream_wait)},
    {"cuMemcpyAsync", offsetof(struct driver, copy)},
};

typedef struct opened {
    void *context;
    int handle; /**< CUdevice */
} opened;

static opened devices[DEVICE_MAX];

static fanin_status unsupported(fanin_error *error, const char *what)
{
    return failure_set(error, FANIN_ERR_TRANSPORT,
                       "run where an NVIDIA driver and a GPU are, or with host memory: "
                       "without --device, --dest device",
                       "no CUDA: %s", what);
}

/* What a driver's result means; @p what: "cuMemAlloc of 20 MB on device 0". */
static fanin_status driver_told(result r, int device, const char *what,
                                fanin_error *error)
{
    const char *name = NULL;
    const char *text = NULL;
    if (r == 0) {
        return FANIN_OK;
    }
    driver.error_name(r, &name);
    driver.error_string(r, &text);
    return failure_set(
        error, r == RESULT_OUT_OF_MEMORY ? FANIN_ERR_MEMORY : FANIN_ERR_TRANSPORT,
        r == RESULT_OUT_OF_MEMORY ? "free memory of the device, or take another"
                                  : "see the driver's log (dmesg, nvidia-smi)",
        "%s on device %d: %s (%s)", what, device, text != NULL ? text : "unknown error",
        name != NULL ? name : "?");
}

static fanin_status driver_load(fanin_error *error)
{
    static char problem[300];
    const char *file = getenv("FANIN_CUDA_LIBRARY");
    if (driver.library != NULL) {
        return FANIN_OK;
    }
    if (problem[0] != '\0') {
        return unsupported(error, problem);
    }
    if (file != NULL && file[0] == '\0') {
        return unsupported(error, "FANIN_CUDA_LIBRARY is empty");
    }
    void *library = dlopen(file != NULL ? file : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        snprintf(problem, sizeof problem, "%s", dlerror());
        return unsupported(error, problem);
    }
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        void *function = dlsym(library, functions[i].name);
        if (function == NULL) {
            snprintf(problem, sizeof problem, "the driver has no %s",
                     functions[i].name);
            return unsupported(error, problem);
        }
        memcpy((char *)&driver + functions[i].offset, &function, sizeof function);
    }
    result r = driver.init(0);
    if (r != 0) {
        const char *text = NULL;
        driver.error_string(r, &text);
        snprintf(problem, sizeof problem, "cuInit: %s", text != NULL ? text : "?");
        return unsupported(error, problem);
    }
    driver.library = library;
    return FANIN_OK;
}

int device_count(void)
{
    fanin_error error = FANIN_ERROR_INIT;
    int count = 0;
    return driver_load(&error) == FANIN_OK && driver.count(&count) == 0 ? count : 0;
}

fanin_status device_open(int device, fanin_error *error)
{
    int count = 0;
    fanin_status status = driver_load(error);
    if (status != FANIN_OK) {
        return status;
    }
    status = driver_told(driver.count(&count), device, "cuDeviceGetCount", error);
    if (status != FANIN_OK) {
        return status;
    }
    if (device < 0 || device >= count || device >= DEVICE_MAX) {
        return failure_set(
            error, FANIN_ERR_ARGUMENT, "see nvidia-smi and CUDA_VISIBLE_DEVICES",
            "there is no device %d: this process sees %d", device, count);
    }
    opened *d = &devices[device];
    if (d->context != NULL) {
        return driver_told(driver.set_current(d->context), device, "cuCtxSetCurrent",
                           error);
    }
    void *context = NULL;
    result r = driver.get(&d->handle, device);
    r = r != 0 ? r : driver.retain(&context, d->handle);
    r = r != 0 ? r : driver.set_current(context);
    if (r == 0) {
        d->context = context;
    }
    return driver_told(r, device, "opening the primary context", error);
}

/* Makes an open device's context current. */
static result driver_enter(int device)
{
    return driver.set_current(devices[device].context);
}

bool device_peer(int device, int peer)
{
    int can = 0;
    if (device == peer) {
        return true;
    }
    if (driver.can_access(&can, devices[device].handle, devices[peer].handle) != 0 ||
        !can || driver_enter(device) != 0) {
        return false;
    }
    result r = driver.enable_peer(devices[peer].context, 0);
    return r == 0 || r == RESULT_PEER_ENABLED;
}

fanin_status device_alloc(int device, size_t bytes, void **out, fanin_error *error)
{
    char what[64];
    address memory = 0;
    *out = NULL;
    result r = driver_enter(device);
    r = r != 0 ? r : driver.alloc(&memory, bytes);
    if (r == 0) {
        *out = (void *)(uintptr_t)memory;
    }
    snprintf(what, sizeof what, "no %zu bytes", bytes);
    return driver_told(r, device, what, error);
}

void device_free(int device, void *memory)
{
    if (memory != NULL && driver_enter(device) == 0) {
        driver.free((address)(uintptr_t)memory);
    }
}

fanin_status device_alloc_pinned(int device, size_t bytes, void **out,
                                 fanin_error *error)
{
    char what[64];
    *out = NULL;
    result r = driver_enter(device);
    r = r != 0 ? r : driver.host_alloc(out, bytes, REGISTER_PORTABLE);
    snprintf(what, sizeof what, "no %zu bytes of pinned memory", bytes);
    return driver_told(r, device, what, error);
}

void device_free_pinned(int device, void *memory)
{
    if (memory != NULL && driver_enter(device) == 0) {
        driver.host_free(memory);
    }
}

fanin_status device_register(int device, void *memory, size_t bytes, fanin_error *error)
{
    result r = driver_enter(device);
    r = r != 0 ? r : driver.host_register(memory, bytes, REGISTER_PORTABLE);
    return driver_told(r, device, "pinning memory", error);
}

void device_unregister(int device, void *memory)
{
    if (driver_enter(device) == 0) {
        driver.host_unregister(memory);
    }
}

fanin_status device_stream(int device, void **out, fanin_error *error)
{
    *out = NULL;
    result r = driver_enter(device);
    r = r != 0 ? r : driver.stream_create(out, STREAM_NON_BLOCKING);
    return driver_told(r, device, "cuStreamCreate", error);
}

void device_stream_free(int device, void *stream)
{
    if (stream != NULL && driver_enter(device) == 0) {
        driver.stream_destroy(stream);
    }
}

fanin_status device_wait(int device, void *stream, fanin_error *error)
{
    result r = driver_enter(device);
    r = r != 0 ? r : driver.stream_wait(stream);
    return driver_told(r, device, "work", error);
}

fanin_status device_copy(int device, void *stream, void *to, const void *from,
                         size_t bytes, fanin_error *error)
{
    result r = driver_enter(device);
    if (r == 0 && bytes > 0) {
        r = driver.copy((address)(uintptr_t)to, (address)(uintptr_t)from, bytes,
                        stream);
    }
    return driver_told(r, device, "a copy", error);
}

void *device_symbol(const char *name)
{
    return driver.library != NULL ? dlsym(driver.library, name) : NULL;
}
