/* SPDX-License-Identifier: Apache-2.0 */
/* What the driver says about pointers. */
#include "fake_cuda_memory.h"

#include <string.h>

static void put_int(void *out, int value)
{
    memcpy(out, &value, sizeof value);
}

static void put_word(void *out, uint64_t value)
{
    memcpy(out, &value, sizeof value);
}

/* One attribute, at the size that the real one writes; r NULL: of no memory that it knows. */
static CUresult attribute(void *out, CUpointer_attribute which, const fake_range *r)
{
    switch (which) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        put_int(out,
                r == NULL ? 0 : (r->host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE));
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        put_word(out, r == NULL ? 0 : r->id);
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        put_int(out, r != NULL && r->kind == FAKE_CUDA_MANAGED);
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        put_int(out, r == NULL ? CU_DEVICE_INVALID
                               : (r->host ? r->context->device : r->device));
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        put_int(out,
                r != NULL && !r->host && r->kind == FAKE_CUDA_MALLOC && r->opens == 0);
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        put_word(out, r == NULL ? 0 : r->start);
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        put_word(out, r == NULL ? 0 : r->length);
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        put_word(out, r != NULL && r->kind == FAKE_CUDA_POOL
                          ? (uint64_t)(uintptr_t)r->context
                          : 0);
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

/* Knows an answer for any pointer. */
CUresult CUDAAPI cuPointerGetAttributes(unsigned int n, CUpointer_attribute *which,
                                        void **data, CUdeviceptr pointer)
{
    CUresult result = fake_enter(__func__, FAKE_INIT);
    if (result != CUDA_SUCCESS)
        return result;
    const fake_range *r = fake_find(pointer, 1);
    for (unsigned i = 0; i < n && result == CUDA_SUCCESS; i++)
        result = attribute(data[i], which[i], r);
    return fake_leave(result);
}
