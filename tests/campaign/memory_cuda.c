/* SPDX-License-Identifier: Apache-2.0 */
/*
 * By the driver that FANIN_CUDA_LIBRARY names, a real one or the stand-in. The CPU has a copy of
 * each allocation. What is written beyond a destination shows in bands of known bytes around it;
 * the stand-in ends a process whose kernels touch anything else besides.
 */
#include "memory.h"

#include "board.h"
#include "fake_cuda.h"
#include "gpu.h"
#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What touches is read by one copy, which the stand-in takes for one that leaves its allocation; on
   a device it is none. */
#define APART 64
#define BAND 4096
#define BAND_BYTE 0xb5
#define MOST 64
#define PATIENCE_NS UINT64_C(120000000000)
/* Of the stand-in's count, one a device: for uploads, which stays for the process's life, and for
   what is copied here. */
#define KEPT_STREAMS 4

typedef struct allocation {
    char *device; /* NULL: free */
    char *copy;
    size_t size, band; /* bytes in all, and on each side */
    int number;
} allocation;

static allocation all[MOST];
static gpu *cuda; /* NULL: there is no driver, or no device */
static gpu_stream *streams[GPU_MAX_DEVICES];

/* False: it cannot be done now. */
static bool worked(fanin_status status, const fanin_error *error)
{
    if (status != FANIN_OK && status != FANIN_ERR_MEMORY) {
        fprintf(stderr, "memory of a device: %s\n", error->message);
        exit(2);
    }
    return status == FANIN_OK;
}

bool memory_there(void)
{
    return gpu_load(NULL, &cuda, NULL) == FANIN_OK;
}

static allocation *holder(const void *memory)
{
    const char *p = memory;
    for (allocation *a = all; a < all + MOST; a++)
        if (a->device && p >= a->device && p < a->device + a->size)
            return a;
    fprintf(stderr, "%p is no memory of a device\n", memory);
    exit(2);
}

static allocation *unused(void)
{
    for (allocation *a = all; a < all + MOST; a++)
        if (!a->device)
            return a;
    fprintf(stderr, "more than %d allocations\n", MOST);
    exit(2);
}

static allocation *get(size_t size, unsigned device, size_t band)
{
    fanin_error error = FANIN_ERROR_INIT;
    uint64_t until = board_now() + PATIENCE_NS;
    int count = memory_there() ? gpu_count(cuda) : 0;
    allocation *a = unused();
    *a = (allocation){.size = size + 2 * band + APART, .band = band};
    a->number = count > 0 ? (int)(device % 2) % count : 0;
    if (!streams[a->number])
        (void)worked(gpu_stream_create(cuda, a->number, &streams[a->number], &error),
                     &error);
    void *memory = NULL;
    while (!worked(gpu_alloc(cuda, a->number, a->size, &memory, &error), &error) &&
           board_now() < until)
        board_sleep(5000000);
    a->device = memory;
    a->copy = calloc(1, a->size);
    if (!a->device || !a->copy) {
        fprintf(stderr, "no memory: %s\n", error.message);
        exit(2);
    }
    return a;
}

void *memory_get(size_t size, unsigned device)
{
    return get(size, device, 0)->device;
}

void memory_free(void *memory, size_t size)
{
    (void)size;
    allocation *a = holder(memory);
    gpu_free(cuda, a->number, a->device);
    free(a->copy);
    a->device = NULL;
}

void *memory_bytes(void *memory)
{
    const allocation *a = holder(memory);
    return a->copy + ((const char *)memory - a->device);
}

static void copy(const allocation *a, void *to, const void *from, size_t size)
{
    fanin_error error = FANIN_ERROR_INIT;
    gpu_stream *stream = streams[a->number];
    if (!worked(gpu_copy(stream, to, from, size, &error), &error) ||
        !worked(gpu_stream_wait(stream, UINT64_MAX, &error), &error)) {
        fprintf(stderr, "no copy: %s\n", error.message);
        exit(2);
    }
}

void memory_send(void *memory, size_t size)
{
    copy(holder(memory), memory, memory_bytes(memory), size);
}

static bool is_band(const char *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++)
        if ((uint8_t)bytes[i] != BAND_BYTE)
            return false;
    return true;
}

void memory_fetch(void *memory, size_t size)
{
    const allocation *a = holder(memory);
    if (a->band == 0) {
        copy(a, memory_bytes(memory), memory, size);
        return;
    }
    size_t whole = a->size - APART;
    copy(a, a->copy, a->device, whole);
    if (!is_band(a->copy, a->band) || !is_band(a->copy + whole - a->band, a->band)) {
        fprintf(stderr, "something was written beside a destination\n");
        abort();
    }
}

void *memory_guarded(size_t size, unsigned device)
{
    allocation *a = get(size, device, BAND);
    memset(a->copy, BAND_BYTE, a->size);
    memory_send(a->device, a->size);
    return a->device + a->band;
}

bool memory_left(size_t own)
{
    const char *name = getenv("FANIN_CUDA_LIBRARY");
    void *library = name ? dlopen(name, RTLD_NOW | RTLD_NOLOAD) : NULL;
    void *symbol = library ? dlsym(library, "fake_cuda_count") : NULL;
    void (*count)(fake_cuda_counts *);
    fake_cuda_counts c;
    if (!symbol)
        return false; /* a real one counts nothing */
    memcpy(&count, &symbol, sizeof count);
    count(&c);
    if (c.allocations == own && c.mappings == 0 && c.pinned == 0 && c.events == 0 &&
        c.streams <= KEPT_STREAMS)
        return false;
    fprintf(stderr,
            "left on devices: %" PRIu64 " allocations, %" PRIu64 " mappings, %" PRIu64
            " pinned, %" PRIu64 " events, %" PRIu64 " streams\n",
            c.allocations - own, c.mappings, c.pinned, c.events, c.streams);
    return true;
}
