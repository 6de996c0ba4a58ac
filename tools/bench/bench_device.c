/* SPDX-License-Identifier: Apache-2.0 */
/* What copy engines, links and pages of this machine do with the bytes of a pull. */
#include "bench/bench.h"
#include "fetch/pattern.h"
#include "trainer/device_shards.h"
#include "clock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ROUNDS = 7, PAGE_ROUNDS = 3, MAX_THREADS = 4 };

void bench_spread_of(const rank_options *o, bench_spread *out)
{
    uint32_t parts = o->world_size / o->replicate;
    *out = (bench_spread){0};
    for (uint32_t rank = 0; rank < o->world_size; rank++) {
        int device = rank_device(o, rank);
        size_t at = 0;
        while (at < out->count && out->devices[at] != device)
            at++;
        if (at == out->count)
            out->devices[out->count++] = device;
        for (size_t i = 0; i < o->tensors->count; i++) {
            const tensor_spec *t = &o->tensors->tensors[i];
            shard s;
            shard_cut(t, o->shard_dim, parts, rank % parts, &s);
            bool halved = half_converts(t->dtype, o->publishing.cast);
            out->bytes[at] += s.bytes / (halved ? 2 : 1) / o->replicate;
        }
    }
}

/* One copy that is timed. */
typedef struct transfer {
    gpu *gpu;
    int device; /**< that does it */
    void *to, *from;
    gpu_stream *stream;
    uint64_t bytes;
} transfer;

/* Times @p count copies that run at the same time. */
static void time_copies(bench_limit *limit, const transfer *copies, size_t count)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_status status = FANIN_OK;
    uint64_t times[ROUNDS];
    limit->pieces = count;
    for (size_t i = 0; i < count; i++)
        limit->bytes += copies[i].bytes;
    /* The first one is for warming up. */
    for (int round = -1; round < ROUNDS && status == FANIN_OK; round++) {
        uint64_t start = clock_ns();
        for (size_t i = 0; i < count && status == FANIN_OK; i++)
            status = gpu_copy(copies[i].stream, copies[i].to, copies[i].from,
                              copies[i].bytes, &error);
        for (size_t i = 0; i < count && status == FANIN_OK; i++)
            status = gpu_stream_wait(copies[i].stream, UINT64_MAX, &error);
        if (round >= 0)
            times[round] = clock_ns() - start;
    }
    bench_limit_end(limit, times, ROUNDS, status != FANIN_OK ? error.message : NULL);
}

/* The device that copies, its stream, and memory with the bytes. */
static fanin_status open_source(transfer *t, fanin_error *error)
{
    fanin_status status = device_load(&t->gpu, error);
    if (status == FANIN_OK)
        status = gpu_stream_create(t->gpu, t->device, &t->stream, error);
    return status != FANIN_OK
               ? status
               : gpu_alloc(t->gpu, t->device, t->bytes + 1, &t->from, error);
}

static fanin_status bench_device_prepare(transfer *t, int from, int to, uint64_t bytes,
                                         fanin_error *error)
{
    *t = (transfer){.device = from, .bytes = bytes};
    fanin_status status = open_source(t, error);
    if (status != FANIN_OK)
        return status;
    if (to == DEVICE_HOST)
        return gpu_host_alloc(t->gpu, bytes + 1, &t->to, error);
    (void)gpu_let_access(t->gpu, to, from); /* else the driver goes through the host */
    (void)gpu_let_access(t->gpu, from, to);
    return gpu_alloc(t->gpu, to, bytes + 1, &t->to, error);
}

static void bench_device_release(transfer *t, int to)
{
    if (to != DEVICE_HOST)
        gpu_free(t->gpu, to, t->to);
    else
        gpu_host_free(t->gpu, t->to);
    gpu_free(t->gpu, t->device, t->from);
    gpu_stream_destroy(&t->stream);
}

static void name_copy(bench_limits *limits, int from, int to, const transfer *t)
{
    bench_limit *limit =
        to == DEVICE_HOST
            ? bench_limit_add(limits, "copy of one buffer, GPU %d to pinned memory",
                              from)
        : from == to
            ? bench_limit_add(limits, "copy of one buffer on GPU %d", from)
            : bench_limit_add(limits, "copy of one buffer, GPU %d to GPU %d", from, to);
    time_copies(limit, t, 1);
}

void bench_device_copies(bench_limits *limits, const bench_spread *spread, int to)
{
    transfer copies[GPU_MAX_DEVICES];
    fanin_error error = FANIN_ERROR_INIT;
    fanin_status status = FANIN_OK;
    size_t count = 0;
    for (size_t i = 0; i < spread->count && count < GPU_MAX_DEVICES; i++) {
        int from = spread->devices[i];
        if (from == DEVICE_HOST || spread->bytes[i] == 0)
            continue;
        status =
            bench_device_prepare(&copies[count++], from, to, spread->bytes[i], &error);
        if (status != FANIN_OK) {
            bench_limit_end(bench_limit_add(limits, "copies between devices"), NULL, 0,
                            error.message);
            break;
        }
        name_copy(limits, from, to, &copies[count - 1]);
        if (to != DEVICE_HOST && from != to) {
            const transfer *t = &copies[count - 1];
            const transfer back = {t->gpu, t->device, t->from,
                                   t->to,  t->stream, t->bytes};
            name_copy(limits, to, from, &back);
        }
    }
    if (status == FANIN_OK && count > 1)
        time_copies(bench_limit_add(limits, "all of them to their end at once"), copies,
                    count);
    for (size_t i = 0; i < count; i++)
        bench_device_release(&copies[i], to);
}

/* ------------------------------------------------------------------- files */

/* A fresh file, removed already; NULL with errno. */
static uint8_t *map_file(const char *directory, uint64_t bytes)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/fanin-bench-XXXXXX", directory);
    int descriptor = mkostemp(path, O_CLOEXEC);
    if (descriptor < 0)
        return NULL;
    unlink(path);
    void *memory = MAP_FAILED;
    if (ftruncate(descriptor, (off_t)bytes) == 0)
        memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    int saved = errno;
    close(descriptor);
    errno = saved;
    return memory != MAP_FAILED ? memory : NULL;
}

typedef struct populator {
    uint8_t *from;
    uint64_t bytes;
    int failed; /**< errno */
} populator;

static void *populate(void *cookie)
{
    populator *p = cookie;
    if (madvise(p->from, p->bytes, MADV_POPULATE_WRITE) != 0)
        p->failed = errno;
    return NULL;
}

static int populate_all(uint8_t *memory, uint64_t bytes, uint32_t threads)
{
    populator parts[MAX_THREADS];
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t share = (bytes / threads + page) / page * page;
    uint32_t n = 0;
    for (; n < threads && n * share < bytes; n++) {
        uint64_t left = bytes - n * share;
        parts[n] = (populator){memory + n * share, left < share ? left : share, 0};
    }
    int failed = bench_together(populate, parts, sizeof parts[0], n);
    for (uint32_t i = 0; i < n && failed == 0; i++)
        failed = parts[i].failed;
    return failed;
}

static void time_pages(bench_limits *limits, const char *directory, uint64_t bytes,
                       uint32_t threads)
{
    uint64_t times[PAGE_ROUNDS];
    bench_limit *limit = bench_limit_add(limits, "pages of a fresh file");
    limit->threads = threads;
    limit->bytes = bytes;
    int failed = 0;
    for (int round = 0; round < PAGE_ROUNDS && failed == 0; round++) {
        uint8_t *memory = map_file(directory, bytes);
        uint64_t start = clock_ns();
        failed = memory == NULL ? errno : populate_all(memory, bytes, threads);
        times[round] = clock_ns() - start;
        if (memory != NULL)
            munmap(memory, bytes);
    }
    bench_limit_end(limit, times, PAGE_ROUNDS, failed != 0 ? strerror(failed) : NULL);
}

/* The devices' bytes, one behind the other, into the file. */
static void time_into_file(bench_limits *limits, const bench_spread *spread,
                           uint8_t *memory, uint64_t bytes)
{
    transfer copies[GPU_MAX_DEVICES];
    fanin_error error = FANIN_ERROR_INIT;
    fanin_status status = FANIN_OK;
    size_t count = 0;
    uint64_t at = 0;
    for (size_t i = 0;
         i < spread->count && count < GPU_MAX_DEVICES && status == FANIN_OK; i++) {
        if (spread->devices[i] == DEVICE_HOST)
            continue;
        transfer *t = &copies[count++];
        uint64_t left = bytes - at;
        *t = (transfer){.device = spread->devices[i],
                        .to = memory + at,
                        .bytes = spread->bytes[i] < left ? spread->bytes[i] : left};
        at += t->bytes;
        status = open_source(t, &error);
    }
    bench_limit *limit = bench_limit_add(limits, "copies into the file's pinned pages");
    if (status == FANIN_OK)
        time_copies(limit, copies, count);
    else
        bench_limit_end(limit, NULL, 0, error.message);
    for (size_t i = 0; i < count; i++) {
        gpu_free(copies[i].gpu, copies[i].device, copies[i].from);
        gpu_stream_destroy(&copies[i].stream);
    }
}

static bool has_device(const bench_spread *spread)
{
    return spread->count > 1 ||
           spread->devices[0] != DEVICE_HOST; /* each is there once */
}

static void time_pinning(bench_limits *limits, const bench_spread *spread,
                         const char *directory, uint64_t bytes)
{
    uint64_t times[PAGE_ROUNDS];
    fanin_error error = FANIN_ERROR_INIT;
    gpu *g = NULL;
    fanin_status status = device_load(&g, &error);
    bench_limit *limit = bench_limit_add(limits, "pinning its pages");
    limit->bytes = bytes;
    limit->threads = 1;
    uint8_t *memory = map_file(directory, bytes);
    int failed = memory == NULL ? errno : populate_all(memory, bytes, MAX_THREADS);
    for (int round = 0; failed == 0 && round < PAGE_ROUNDS && status == FANIN_OK;
         round++) {
        uint64_t start = clock_ns();
        status = gpu_pin(g, memory, bytes, &error);
        times[round] = clock_ns() - start;
        if (status == FANIN_OK && round + 1 < PAGE_ROUNDS)
            gpu_unpin(g, memory);
    }
    bench_limit_end(limit, times, PAGE_ROUNDS,
                    failed != 0          ? strerror(failed)
                    : status != FANIN_OK ? error.message
                                         : NULL);
    if (failed == 0 && status == FANIN_OK) {
        time_into_file(limits, spread, memory, bytes);
        gpu_unpin(g, memory);
    }
    if (memory != NULL)
        munmap(memory, bytes);
}

void bench_file_pages(bench_limits *limits, const bench_spread *spread,
                      const char *directory, uint64_t bytes)
{
    if (bytes == 0)
        return;
    time_pages(limits, directory, bytes, 1);
    time_pages(limits, directory, bytes, MAX_THREADS);
    if (has_device(spread))
        time_pinning(limits, spread, directory, bytes);
}
