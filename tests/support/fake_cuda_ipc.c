/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of other processes. A handle says where its owner's file is (/proc/PID/fd/N) and what
 * part of it. */
#include "fake_cuda_memory.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAGIC 0x6375646166616b65u

typedef struct handle {
    uint64_t magic, nonce;
    uint64_t offset, length;
    int32_t pid, file;
    uint64_t address; /* of the owner */
    int32_t physical; /* the machine's number of the device */
    uint8_t spare[12];
} handle;
_Static_assert(sizeof(handle) == sizeof(CUipcMemHandle), "a handle's size");

CUresult CUDAAPI cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr pointer)
{
    CUresult result = fake_enter(__func__, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    const fake_range *r = fake_find(pointer, 1);
    if (r == NULL || r->host || r->opens > 0 || r->kind != FAKE_CUDA_MALLOC)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    handle h = {
        .magic = MAGIC,
        .nonce = r->nonce,
        .offset = r->offset,
        .length = r->length,
        .pid = getpid(),
        .file = fake_memory_file(),
        .address = r->start,
        .physical = r->context->physical,
    };
    memcpy(out, &h, sizeof h);
    return fake_leave(CUDA_SUCCESS);
}

/* The device of this process that has the number, -1: it does not see it. */
static int device_of(int physical)
{
    for (int i = 0; i < fake.n_devices; i++)
        if (fake.contexts[i].physical == physical)
            return i;
    return -1;
}

/* The header and the bytes; NULL: the owner is gone, or has freed them. */
static fake_header *map_bytes(const handle *h)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)h->pid, (int)h->file);
    int file = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    if (file < 0)
        return NULL;
    fake_header *header = mmap(NULL, FAKE_PAGE + h->length, PROT_READ | PROT_WRITE,
                               MAP_SHARED, file, (off_t)h->offset);
    off_t size = lseek(file, 0, SEEK_END);
    close(file);
    if (header == MAP_FAILED)
        return NULL;
    /* A process number may have been used again: then what is there is something else. */
    if (size < 0 || h->offset + FAKE_PAGE + h->length > (uint64_t)size ||
        header->nonce != h->nonce || header->length != h->length) {
        munmap(header, FAKE_PAGE + h->length);
        return NULL;
    }
    return header;
}

static CUresult open_handle(CUcontext context, const handle *h, CUdeviceptr *out)
{
    int device = device_of(h->physical);
    if (h->magic != MAGIC)
        return CUDA_ERROR_INVALID_VALUE;
    if (h->pid == getpid() && !fake.own_ipc)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (device < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    if (!fake_can_access(context, device))
        return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    fake_range *r = fake_range_find_mapping(context, h->nonce);
    if (r == NULL) {
        if (fake_range_overlaps_mapping(context, h->pid, h->address, h->length))
            return CUDA_ERROR_ALREADY_MAPPED;
        fake_header *header = map_bytes(h);
        if (header == NULL)
            return CUDA_ERROR_MAP_FAILED;
        header->mappings++;
        r = fake_range_add((fake_range){
            .length = h->length,
            .alias = (uint8_t *)header + FAKE_PAGE,
            .context = context,
            .device = device,
            .nonce = h->nonce,
            .owner = h->pid,
            .owners = h->address,
        });
    }
    r->opens++;
    fake.counts.mappings++;
    fake.counts.opens++;
    *out = r->start;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuIpcOpenMemHandle(CUdeviceptr *out, CUipcMemHandle from,
                                    unsigned int flags)
{
    CUresult result = fake_enter(__func__, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    handle h;
    memcpy(&h, &from, sizeof h);
    return fake_leave(open_handle(fake_current(), &h, out));
}

CUresult CUDAAPI cuIpcCloseMemHandle(CUdeviceptr pointer)
{
    CUresult result = fake_enter(__func__, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    fake_range *r = fake_range_starting(pointer);
    if (r == NULL || r->opens == 0)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    if (r->context != fake_current())
        return fake_leave(CUDA_ERROR_INVALID_CONTEXT);
    fake.counts.mappings--;
    if (--r->opens > 0)
        return fake_leave(CUDA_SUCCESS);
    fake_header *header = fake_header_of(r);
    if (header->nonce == r->nonce)
        header->mappings--;
    uint64_t bytes = FAKE_PAGE + r->length;
    fake_range_remove(r);
    munmap(header, bytes);
    return fake_leave(CUDA_SUCCESS);
}
