/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory, pinned host memory, and what the driver says about pointers. */
#include "fake_cuda_memory.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#define ARENA ((uint64_t)64 << 30)
#define GRAIN 512 /* CUDA's allocations start at multiples of it */
#define STRETCH ((uint64_t)2 << 20)

/* All memory that is known, by address. */
static fake_range **ranges;
static size_t n_ranges, capacity;
static uint64_t arena_size;
static uint64_t
    arena; /* addresses of device memory; only managed memory is ever mapped there */
static uint64_t last_id;
static int file; /* holds the bytes of all device memory of this process */
static uint64_t file_end;

static uint64_t round_up(uint64_t n, uint64_t grain)
{
    return (n + grain - 1) / grain * grain;
}

/* ----------------------------------------------------------------- known ranges */

void fake_memory_init(void)
{
    void *memory = MAP_FAILED;
    /* Checkers of memory have fewer addresses to give away. */
    for (arena_size = ARENA; memory == MAP_FAILED && arena_size >= ARENA / 64;
         arena_size /= 2)
        memory = mmap(NULL, arena_size, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    arena_size *= 2;
    file = memfd_create("fake-cuda", MFD_CLOEXEC);
    if (memory == MAP_FAILED || file < 0)
        fake_die("no addresses or no file for device memory");
    /* Like the real one's, they share no aligned stretch with host memory. */
    arena = round_up((uint64_t)(uintptr_t)memory, STRETCH);
    arena_size -= STRETCH;
}

int fake_memory_file(void)
{
    return file;
}

bool fake_is_device_address(uint64_t address)
{
    return address >= arena && address - arena < arena_size;
}

/* The first range that ends behind the address. */
static size_t place_of(uint64_t address)
{
    size_t low = 0, high = n_ranges;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle]->start + ranges[middle]->length <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

fake_range *fake_find(uint64_t address, uint64_t length)
{
    size_t at = place_of(address);
    if (at == n_ranges || ranges[at]->start > address)
        return NULL;
    fake_range *r = ranges[at];
    return length <= r->length - (address - r->start) ? r : NULL;
}

fake_range *fake_range_starting(uint64_t address)
{
    fake_range *r = fake_find(address, 1);
    return r != NULL && r->start == address ? r : NULL;
}

fake_range *fake_range_find_mapping(const struct CUctx_st *context, uint64_t nonce)
{
    for (size_t i = 0; i < n_ranges; i++)
        if (ranges[i]->opens > 0 && ranges[i]->nonce == nonce &&
            ranges[i]->context == context)
            return ranges[i];
    return NULL;
}

bool fake_range_overlaps_mapping(const struct CUctx_st *context, pid_t owner,
                                 uint64_t start, uint64_t length)
{
    for (size_t i = 0; i < n_ranges; i++) {
        const fake_range *r = ranges[i];
        if (r->opens > 0 && r->owner == owner && r->context == context &&
            start < r->owners + r->length && r->owners < start + length)
            return true;
    }
    return false;
}

bool fake_context_has_memory(const struct CUctx_st *context)
{
    for (size_t i = 0; i < n_ranges; i++)
        if (ranges[i]->context == context)
            return true;
    return false;
}

/* The lowest free addresses of that length: freed ones come again soon. */
static uint64_t free_addresses(uint64_t length, uint64_t grain)
{
    uint64_t at = arena;
    for (size_t i = place_of(arena);
         i < n_ranges && fake_is_device_address(ranges[i]->start); i++) {
        /* The grain may have taken `at` beyond its start. */
        if (ranges[i]->start >= at && ranges[i]->start - at >= length)
            return at;
        at = round_up(ranges[i]->start + ranges[i]->length, grain);
    }
    return length <= arena_size && at - arena <= arena_size - length ? at : 0;
}

static void insert(fake_range *r)
{
    if (n_ranges == capacity) {
        capacity = capacity == 0 ? 64 : 2 * capacity;
        fake_range **more = realloc(ranges, capacity * sizeof *more);
        if (more == NULL)
            fake_die("out of memory");
        ranges = more;
    }
    size_t at = place_of(r->start);
    memmove(ranges + at + 1, ranges + at, (n_ranges - at) * sizeof *ranges);
    ranges[at] = r;
    n_ranges++;
}

void fake_range_remove(fake_range *r)
{
    if (r->busy > 0)
        fake_die("memory at %#llx goes away under a copy or kernel that uses it",
                 (unsigned long long)r->start);
    size_t at = place_of(r->start);
    if (at >= n_ranges || ranges[at] != r)
        fake_die("a range at %#llx is not in the list", (unsigned long long)r->start);
    n_ranges--;
    memmove(ranges + at, ranges + at + 1, (n_ranges - at) * sizeof *ranges);
    free(r);
    if (n_ranges == 0) {
        free(ranges);
        ranges = NULL;
        capacity = 0;
    }
}

fake_range *fake_range_add(fake_range like)
{
    bool managed = like.kind == FAKE_CUDA_MANAGED;
    fake_range *r = malloc(sizeof *r);
    if (r == NULL)
        fake_die("out of memory");
    *r = like;
    if (!r->host)
        r->start = free_addresses(r->length, managed ? FAKE_PAGE : GRAIN);
    if (r->start == 0)
        fake_die("out of addresses for device memory");
    r->id = ++last_id;
    insert(r);
    return r;
}

bool fake_reachable(CUcontext context, const fake_range *r)
{
    if (r->host || r->kind == FAKE_CUDA_MANAGED || r->context == context)
        return true;
    return r->opens == 0 && context->peers[r->device];
}

/* --------------------------------------------------------------- device memory */

/* Bytes in our file behind a page that says what they are (fake_header), and mapped for us. */
static uint8_t *make_bytes(uint64_t length, uint64_t *offset_out, uint64_t *nonce_out)
{
    uint64_t bytes = FAKE_PAGE + round_up(length, FAKE_PAGE);
    if (ftruncate(file, (off_t)(file_end + bytes)) != 0)
        fake_die("no memory for a file");
    fake_header *header =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, (off_t)file_end);
    if (header == MAP_FAILED)
        fake_die("cannot map memory of a file");
    /* No two allocations of the machine have the same, so that a handle names one only. */
    if (getrandom(nonce_out, sizeof *nonce_out, 0) != (ssize_t)sizeof *nonce_out)
        fake_die("no random bytes");
    header->nonce = *nonce_out;
    header->length = length;
    *offset_out = file_end;
    file_end += bytes;
    return (uint8_t *)header + FAKE_PAGE;
}

static fake_range *allocate(CUcontext context, uint64_t length, fake_cuda_kind kind)
{
    if (kind == FAKE_CUDA_MANAGED) /* mapped at its address: whole pages */
        length = round_up(length, FAKE_PAGE);
    if (length > fake.memory - context->used)
        return NULL;
    fake_range like = {
        .length = length, .context = context, .device = context->device, .kind = kind};
    like.alias = make_bytes(length, &like.offset, &like.nonce);
    fake_range *r = fake_range_add(like);
    if (kind == FAKE_CUDA_MANAGED &&
        mmap((void *)(uintptr_t)r->start, round_up(length, FAKE_PAGE),
             PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file,
             (off_t)(r->offset + FAKE_PAGE)) == MAP_FAILED)
        fake_die("cannot map managed memory");
    context->used += length;
    fake.counts.allocations++;
    fake.counts.bytes += length;
    if (fake.counts.bytes > fake.counts.peak_bytes)
        fake.counts.peak_bytes = fake.counts.bytes;
    return r;
}

/* The bytes become zeros for whoever has them mapped, and are given back. */
static void release(fake_range *r)
{
    uint64_t bytes = FAKE_PAGE + round_up(r->length, FAKE_PAGE);
    if (r->kind == FAKE_CUDA_MANAGED &&
        mmap((void *)(uintptr_t)r->start, round_up(r->length, FAKE_PAGE), PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
             0) == MAP_FAILED)
        fake_die("cannot unmap managed memory");
    fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)r->offset,
              (off_t)bytes);
    munmap(r->alias - FAKE_PAGE, bytes);
    r->context->used -= r->length;
    fake.counts.allocations--;
    fake.counts.bytes -= r->length;
    fake_range_remove(r);
}

CUresult CUDAAPI cuMemAlloc(CUdeviceptr *out, size_t bytes)
{
    CUresult result = fake_enter(__func__, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    if (bytes == 0)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    fake_range *r = allocate(fake_current(), bytes, fake.kind);
    if (r == NULL)
        return fake_leave(CUDA_ERROR_OUT_OF_MEMORY);
    *out = r->start;
    return fake_leave(CUDA_SUCCESS);
}

/* Waits for the device's work first, as CUDA does. */
static CUresult free_memory(uint64_t start)
{
    fake_range *r = fake_range_starting(start);
    if (r == NULL || r->host || r->opens > 0)
        return CUDA_ERROR_INVALID_VALUE;
    CUcontext context = r->context;
    CUresult result = fake_drain(context);
    r = fake_range_starting(start); /* the lock was not held */
    if (r == NULL)
        fake_die("memory was freed twice at a time");
    release(r);
    return result;
}

CUresult CUDAAPI cuMemFree(CUdeviceptr pointer)
{
    CUresult result = fake_enter(__func__, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    return fake_leave(pointer == 0 ? CUDA_SUCCESS : free_memory(pointer));
}

void *fake_cuda_alloc(int device, uint64_t bytes, fake_cuda_kind kind)
{
    if (cuInit(0) != CUDA_SUCCESS)
        fake_die("fake_cuda_alloc: cuInit() fails");
    pthread_mutex_lock(&fake.lock);
    CUcontext context = fake_context_of(device);
    fake_range *r = context == NULL ? NULL : allocate(context, bytes, kind);
    if (r == NULL)
        fake_die("fake_cuda_alloc: no such device, or no memory");
    void *memory = (void *)(uintptr_t)r->start;
    pthread_mutex_unlock(&fake.lock);
    return memory;
}

void fake_cuda_free(void *memory)
{
    pthread_mutex_lock(&fake.lock);
    if (memory != NULL &&
        free_memory((uint64_t)(uintptr_t)memory) == CUDA_ERROR_INVALID_VALUE)
        fake_die("fake_cuda_free: %p is no allocation", memory);
    pthread_mutex_unlock(&fake.lock);
}

void *fake_cuda_alias(const void *device_pointer)
{
    uint64_t address = (uint64_t)(uintptr_t)device_pointer;
    pthread_mutex_lock(&fake.lock);
    const fake_range *r = fake_find(address, 1);
    void *alias = r == NULL ? NULL : r->alias + (address - r->start);
    pthread_mutex_unlock(&fake.lock);
    return alias;
}

unsigned fake_cuda_mapped_by_others(const void *device_pointer)
{
    pthread_mutex_lock(&fake.lock);
    const fake_range *r = fake_find((uint64_t)(uintptr_t)device_pointer, 1);
    if (r == NULL || r->host || r->opens > 0)
        fake_die("%p is no memory of this process", device_pointer);
    unsigned n = fake_header_of(r)->mappings;
    pthread_mutex_unlock(&fake.lock);
    return n;
}

/* ---------------------------------------------------------- pinned host memory */

static fake_range *add_pinned(void *memory, size_t bytes, bool registered)
{
    fake_range *r = fake_range_add((fake_range){
        .start = (uint64_t)(uintptr_t)memory,
        .length = bytes,
        .alias = memory,
        .context = fake_current(),
        .device = -1,
        .host = true,
        .registered = registered,
    });
    fake.counts.pinned++;
    fake.counts.pinned_bytes += bytes;
    if (fake.counts.pinned_bytes > fake.counts.peak_pinned_bytes)
        fake.counts.peak_pinned_bytes = fake.counts.pinned_bytes;
    return r;
}

static void remove_pinned(fake_range *r)
{
    fake.counts.pinned--;
    fake.counts.pinned_bytes -= r->length;
    fake_range_remove(r);
}

CUresult CUDAAPI cuMemHostAlloc(void **out, size_t bytes, unsigned int flags)
{
    CUresult result = fake_enter(__func__, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    if (bytes == 0 ||
        (flags & ~(unsigned)(CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP |
                             CU_MEMHOSTALLOC_WRITECOMBINED)) != 0)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    void *memory = mmap(NULL, round_up(bytes, FAKE_PAGE), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return fake_leave(CUDA_ERROR_OUT_OF_MEMORY);
    add_pinned(memory, bytes, false);
    *out = memory;
    return fake_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuMemFreeHost(void *memory)
{
    CUresult result = fake_enter(__func__, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    fake_range *r = fake_range_starting((uint64_t)(uintptr_t)memory);
    if (r == NULL || !r->host || r->registered)
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    uint64_t bytes = round_up(r->length, FAKE_PAGE);
    remove_pinned(r);
    munmap(memory, bytes);
    return fake_leave(CUDA_SUCCESS);
}

static bool is_mapped(void *memory, size_t bytes)
{
    size_t pages = bytes / FAKE_PAGE;
    unsigned char *resident = malloc(pages);
    bool mapped = resident != NULL && mincore(memory, bytes, resident) == 0;
    free(resident);
    return mapped;
}

/* Whole pages only, which the real one would take for them. */
CUresult CUDAAPI cuMemHostRegister(void *memory, size_t bytes, unsigned int flags)
{
    CUresult result = fake_enter(__func__, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    uint64_t start = (uint64_t)(uintptr_t)memory;
    if (bytes == 0 || start % FAKE_PAGE != 0 || bytes % FAKE_PAGE != 0 ||
        (flags & ~(unsigned)(CU_MEMHOSTREGISTER_PORTABLE |
                             CU_MEMHOSTREGISTER_DEVICEMAP)) != 0 ||
        !is_mapped(memory, bytes))
        return fake_leave(CUDA_ERROR_INVALID_VALUE);
    size_t at = place_of(start);
    if (at < n_ranges && ranges[at]->start < start + bytes)
        return fake_leave(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    add_pinned(memory, bytes, true);
    return fake_leave(CUDA_SUCCESS);
}

CUresult CUDAAPI cuMemHostUnregister(void *memory)
{
    CUresult result = fake_enter(__func__, FAKE_CONTEXT);
    if (result != CUDA_SUCCESS)
        return result;
    fake_range *r = fake_range_starting((uint64_t)(uintptr_t)memory);
    if (r == NULL || !r->registered)
        return fake_leave(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    if (!is_mapped(memory, r->length))
        fake_die("memory at %p was unmapped while it was pinned", memory);
    remove_pinned(r);
    return fake_leave(CUDA_SUCCESS);
}
