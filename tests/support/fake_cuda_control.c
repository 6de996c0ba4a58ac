/* SPDX-License-Identifier: Apache-2.0 */
/* What tests control and count, and the names of errors. */
#include "fake_cuda_stream.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_FUNCTIONS 128

/* Calls counted and failures ordered, by function. */
static struct function {
    const char *name;
    uint64_t calls;
    CUresult failure;
    unsigned after, times;
    bool forever;
} functions[MAX_FUNCTIONS];

/* ------------------------------------------------------------- calls and failures */

static struct function *function_of(const char *name)
{
    for (size_t i = 0; i < MAX_FUNCTIONS; i++) {
        if (functions[i].name == NULL)
            functions[i].name = strdup(name);
        if (functions[i].name != NULL && strcmp(functions[i].name, name) == 0)
            return &functions[i];
    }
    fake_die("more than %d functions", MAX_FUNCTIONS);
}

static CUresult ordered_failure(struct function *f)
{
    if (f->failure == CUDA_SUCCESS)
        return CUDA_SUCCESS;
    if (f->after > 0) {
        f->after--;
        return CUDA_SUCCESS;
    }
    CUresult result = f->failure;
    if (!f->forever && --f->times == 0)
        f->failure = CUDA_SUCCESS;
    return result;
}

CUresult fake_count_call(const char *function, bool good)
{
    struct function *f = function_of(function);
    f->calls++;
    return good ? ordered_failure(f) : CUDA_SUCCESS;
}

void fake_order_failures(const char *list)
{
    char name[64];
    int result, read;
    while (list != NULL && sscanf(list, "%63[^=]=%d%n", name, &result, &read) == 2) {
        struct function *f = function_of(name);
        f->failure = (CUresult)result;
        f->forever = true;
        list += read;
        if (*list == '@')
            f->after = (unsigned)strtoul(list + 1, (char **)&list, 10);
        if (*list != ',')
            break;
        list++;
    }
}

uint64_t fake_cuda_calls(const char *function)
{
    pthread_mutex_lock(&fake.lock);
    uint64_t calls = function_of(function)->calls;
    pthread_mutex_unlock(&fake.lock);
    return calls;
}

void fake_cuda_fail(const char *function, int result, unsigned after, unsigned times)
{
    pthread_mutex_lock(&fake.lock);
    struct function *f = function_of(function);
    f->failure = (CUresult)result;
    f->after = after;
    f->times = times;
    f->forever = times == 0;
    pthread_mutex_unlock(&fake.lock);
}

/* ----------------------------------------------------------------------- counts */

void fake_cuda_count(fake_cuda_counts *out)
{
    pthread_mutex_lock(&fake.lock);
    *out = fake.counts;
    pthread_mutex_unlock(&fake.lock);
}

void fake_cuda_reset_peaks(void)
{
    pthread_mutex_lock(&fake.lock);
    fake.counts.peak_bytes = fake.counts.bytes;
    fake.counts.peak_pinned_bytes = fake.counts.pinned_bytes;
    pthread_mutex_unlock(&fake.lock);
}

/* --------------------------------------------------------------- failing, holding */

/* The context for a function of the tests, which have to name one that there is. Locks. */
static CUcontext lock_device(int device)
{
    if (cuInit(0) != CUDA_SUCCESS)
        fake_die("a test's function needs the driver, and cuInit() fails");
    pthread_mutex_lock(&fake.lock);
    CUcontext context = fake_context_of(device);
    if (context == NULL)
        fake_die("a test names device %d", device);
    return context;
}

void fake_cuda_break(int device)
{
    CUcontext context = lock_device(device);
    context->failed = CUDA_ERROR_LAUNCH_FAILED;
    pthread_cond_broadcast(&fake.changed); /* streams' threads drop what is queued */
    pthread_mutex_unlock(&fake.lock);
}

void fake_cuda_repair(int device)
{
    lock_device(device)->failed = CUDA_SUCCESS;
    pthread_mutex_unlock(&fake.lock);
}

void fake_cuda_hold(int device)
{
    lock_device(device)->held = true;
    pthread_mutex_unlock(&fake.lock);
}

void fake_cuda_hold_kernel(int device, uint64_t entries)
{
    CUcontext context = lock_device(device);
    context->hold_kernel = true;
    context->hold_after = entries;
    pthread_mutex_unlock(&fake.lock);
}

void fake_kernel_gate(CUcontext context, uint64_t done)
{
    if (!context->hold_kernel)
        return;
    pthread_mutex_lock(&fake.lock);
    if (context->hold_kernel && done >= context->hold_after) {
        context->kernel_held = true;
        pthread_cond_broadcast(&fake.changed);
        while (context->hold_kernel && context->failed == CUDA_SUCCESS && !fake.ending)
            pthread_cond_wait(&fake.changed, &fake.lock);
        context->kernel_held = false;
    }
    pthread_mutex_unlock(&fake.lock);
}

bool fake_cuda_wait_kernel_held(int device)
{
    CUcontext context = lock_device(device);
    struct timespec end = fake_end(FAKE_WAIT_MS);
    while (!context->kernel_held && fake_wait(&end))
        ;
    bool held = context->kernel_held;
    pthread_mutex_unlock(&fake.lock);
    return held;
}

/* The device's queued operations. With the lock. */
static uint64_t queued_on(const struct CUctx_st *context)
{
    uint64_t n = 0;
    for (CUstream s = context->streams; s != NULL; s = s->next)
        n += s->queued - s->finished;
    return n;
}

bool fake_cuda_wait_queued(int device, uint64_t n)
{
    const struct CUctx_st *context = lock_device(device);
    struct timespec limit = fake_end(FAKE_WAIT_MS);
    while (queued_on(context) < n && fake_wait(&limit))
        ;
    bool enough = queued_on(context) >= n;
    pthread_mutex_unlock(&fake.lock);
    return enough;
}

bool fake_cuda_wait_idle(int device)
{
    const struct CUctx_st *context = lock_device(device);
    struct timespec limit = fake_end(FAKE_WAIT_MS);
    while (!fake_is_idle(context) && fake_wait(&limit))
        ;
    bool idle = fake_is_idle(context);
    pthread_mutex_unlock(&fake.lock);
    return idle;
}

void fake_cuda_hold_stream(void *stream)
{
    pthread_mutex_lock(&fake.lock);
    CUstream s = fake_find_stream(stream);
    if (s == NULL)
        fake_die("a test holds no stream");
    s->held = true;
    pthread_mutex_unlock(&fake.lock);
}

void fake_cuda_release(int device)
{
    CUcontext context = lock_device(device);
    context->held = false;
    context->hold_kernel = false;
    for (CUstream s = context->streams; s != NULL; s = s->next)
        s->held = false;
    fake_release_zombies(context);
    pthread_cond_broadcast(&fake.changed);
    pthread_mutex_unlock(&fake.lock);
}

/* ---------------------------------------------------------------------- errors */

static const struct {
    CUresult result;
    const char *name, *text;
} errors[] = {
#define ERROR(name, text)                                                              \
    {                                                                                  \
        name, #name, text                                                              \
    }
    ERROR(CUDA_SUCCESS, "no error"),
    ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    ERROR(CUDA_ERROR_STUB_LIBRARY, "stub library"),
    ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    ERROR(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
    ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    ERROR(CUDA_ERROR_MAP_FAILED, "mapping of buffer object failed"),
    ERROR(CUDA_ERROR_ALREADY_MAPPED, "resource already mapped"),
    ERROR(CUDA_ERROR_NO_BINARY_FOR_GPU, "no kernel image is available for execution"),
    ERROR(CUDA_ERROR_ECC_UNCORRECTABLE, "uncorrectable ECC error encountered"),
    ERROR(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "peer access is not supported"),
    ERROR(CUDA_ERROR_OPERATING_SYSTEM, "OS call failed"),
    ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    ERROR(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled"),
    ERROR(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    ERROR(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "memory is already registered"),
    ERROR(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "memory has not been registered"),
    ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    ERROR(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    ERROR(CUDA_ERROR_SYSTEM_NOT_READY, "system not yet initialized"),
    ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
#undef ERROR
};

/* Both work always, without cuInit() as well. */
CUresult CUDAAPI cuGetErrorName(CUresult result, const char **out)
{
    *out = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors && *out == NULL; i++)
        if (errors[i].result == result)
            *out = errors[i].name;
    return *out != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuGetErrorString(CUresult result, const char **out)
{
    *out = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors && *out == NULL; i++)
        if (errors[i].result == result)
            *out = errors[i].text;
    return *out != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
