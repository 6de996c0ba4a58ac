/* SPDX-License-Identifier: Apache-2.0 */
/* What is put on streams: copies, callbacks, kernels; and events. */
#include "fake_cuda_stream.h"

#include <stdlib.h>
#include <string.h>

#define STAGED 65536 /* bytes that CUDA takes out of pageable memory at once */

/* ---------------------------------------------------------------- work on them */

/* Memory that a copy may name: host memory, or all of it in one allocation. */
static bool can_copy(uint64_t address, uint64_t length)
{
    return fake_find(address, length) != NULL || !fake_is_device_address(address);
}

/* Little that comes from pageable memory is read at once; more, or what goes there, waits. */
static CUresult queue_copy(CUstream s, op like)
{
    bool to_pageable = fake_find(like.to, like.length) == NULL;
    bool from_pageable = fake_find(like.from, like.length) == NULL;
    if (from_pageable && !to_pageable && like.length <= STAGED) {
        like.staged = malloc(like.length);
        if (like.staged == NULL)
            fake_die("out of memory");
        memcpy(like.staged, (const void *)(uintptr_t)like.from, like.length);
        return fake_queue(s, like);
    }
    fake_queue(s, like);
    return to_pageable || from_pageable ? fake_wait_for(s, s->queued) : CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes,
                               CUstream handle)
{
    CUstream s;
    CUresult result = fake_enter_stream(__func__, handle, &s);
    if (result != CUDA_SUCCESS)
        return result;
    if (bytes == 0)
        return fake_leave(CUDA_SUCCESS);
    if (!can_copy(to, bytes) || !can_copy(from, bytes))
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    op like = {.kind = OP_COPY, .to = to, .from = from, .length = bytes};
    return fake_leave(queue_copy(s, like));
}

CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes,
                                   CUstream handle)
{
    return cuMemcpyAsync(to, (CUdeviceptr)(uintptr_t)from, bytes, handle);
}

/* Not on a stream: what is held does not stop it. */
CUresult CUDAAPI cuMemcpyHtoD(CUdeviceptr to, const void *from, size_t bytes)
{
    CUresult result = fake_enter(__func__, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    fake_range *range = bytes == 0 ? NULL : fake_find(to, bytes);
    if (range == NULL)
        return fake_leave(bytes == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
    memcpy(range->alias + (to - range->start), from, bytes);
    fake.counts.copies++;
    return fake_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes,
                                 CUstream handle)
{
    CUstream s;
    CUresult result = fake_enter_stream(__func__, handle, &s);
    if (result != CUDA_SUCCESS)
        return result;
    if (bytes == 0)
        return fake_leave(CUDA_SUCCESS);
    if (fake_find(to, bytes) == NULL)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    op like = {.kind = OP_FILL, .to = to, .length = bytes, .value = value};
    return fake_leave(fake_queue(s, like));
}

CUresult CUDAAPI cuLaunchHostFunc(CUstream handle, CUhostFn fn, void *cookie)
{
    CUstream s;
    CUresult result = fake_enter_stream(__func__, handle, &s);
    if (result != CUDA_SUCCESS)
        return result;
    op like = {.kind = OP_HOST, .host = fn, .cookie = cookie};
    return fake_leave(fake_queue(s, like));
}

CUresult CUDAAPI cuStreamAddCallback(CUstream handle, CUstreamCallback fn, void *cookie,
                                     unsigned int flags)
{
    CUstream s;
    CUresult result = fake_enter_stream(__func__, handle, &s);
    if (result != CUDA_SUCCESS)
        return result;
    if (flags != 0)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    op like = {.kind = OP_CALLBACK, .callback = fn, .cookie = cookie};
    return fake_leave(fake_queue(s, like));
}

CUresult fake_stream_launch(CUcontext context, CUstream handle, fake_launch *launch)
{
    CUstream s = fake_stream_of(context, handle);
    if (s == NULL) {
        fake_kernel_free(launch);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    op like = {.kind = OP_KERNEL, .launch = launch};
    return fake_queue(s, like);
}

/* ---------------------------------------------------------------------- events */

CUresult CUDAAPI cuEventCreate(CUevent *out, unsigned int flags)
{
    CUresult result = fake_enter(__func__, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    if ((flags & ~(unsigned)(CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING)) != 0)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    CUevent e = calloc(1, sizeof *e);
    if (e == NULL)
        fake_die("out of memory");
    e->context = fake_current();
    e->uses = 1;
    *out = e;
    fake.counts.events++;
    return fake_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuEventDestroy(CUevent e)
{
    CUresult result = fake_enter(__func__, FAKE_INIT);
    if (result != CUDA_SUCCESS)
        return result;
    if (e == NULL)
        return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    fake_put_event(e);
    fake.counts.events--;
    return fake_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuEventRecord(CUevent e, CUstream handle)
{
    CUstream s;
    CUresult result = fake_enter_stream(__func__, handle, &s);
    if (result != CUDA_SUCCESS)
        return result;
    if (e == NULL || e->context != s->context)
        return fake_leave(CUDA_ERROR_INVALID_HANDLE);
    op like = {.kind = OP_RECORD, .event = e, .turn = ++e->recorded};
    return fake_leave(fake_queue(s, like));
}

/* The event may be another device's. */
CUresult CUDAAPI cuStreamWaitEvent(CUstream handle, CUevent e, unsigned int flags)
{
    CUstream s;
    CUresult result = fake_enter_stream(__func__, handle, &s);
    if (result != CUDA_SUCCESS)
        return result;
    if (e == NULL || flags != 0)
        return fake_leave(e == NULL ? CUDA_ERROR_INVALID_HANDLE
                                    : CUDA_ERROR_INVALID_VALUE);
    op like = {.kind = OP_WAIT, .event = e, .turn = e->recorded};
    return fake_leave(fake_queue(s, like));
}
