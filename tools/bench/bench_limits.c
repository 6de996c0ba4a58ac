/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/bench.h"
#include "fetch/output.h"
#include "fetch/progress.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>

enum { PIECE = 1 << 20, PAGE = 4096, ROUNDS = 5, MAX_THREADS = 64 };

/* A contiguous stretch of a rank's memory: 1 MiB at most. */
typedef struct piece {
    pid_t pid;
    uint64_t from, to, length; /**< to: offset in the arena */
} piece;

typedef struct pieces {
    piece *items;
    size_t count, capacity;
    uint64_t bytes;
} pieces;

static void add_piece(pieces *p, pid_t pid, uint64_t from, uint64_t length,
                      uint64_t room)
{
    p->items = output_room(p->items, p->count, &p->capacity, sizeof p->items[0]);
    /* Allocations lie a few bytes apart, so that a little more is read than the tensors
       have; what goes beyond the arena starts at its front again. */
    length = length < room ? length : room;
    const piece *last = p->count > 0 ? &p->items[p->count - 1] : NULL;
    uint64_t to = last != NULL ? last->to + last->length : 0;
    p->items[p->count++] = (piece){pid, from, to + length <= room ? to : 0, length};
    p->bytes += length;
}

static int by_address(const void *a, const void *b)
{
    const rank_extent *x = a;
    const rank_extent *y = b;
    return (x->address > y->address) - (x->address < y->address);
}

/* Stretches of shards that share pages or neighbouring ones, cut into pieces; until there are
   @p most bytes. */
static void add_rank(pieces *p, pid_t pid, const rank_extent *shards, size_t count,
                     uint64_t room, uint64_t most)
{
    rank_extent *sorted = output_require(malloc((count + 1) * sizeof sorted[0]));
    memcpy(sorted, shards, count * sizeof sorted[0]);
    qsort(sorted, count, sizeof sorted[0], by_address);
    for (size_t i = 0; i < count;) {
        uint64_t from = sorted[i].address;
        uint64_t end = from + sorted[i].bytes;
        for (i++; i < count && sorted[i].address <= end + PAGE; i++) {
            end = sorted[i].address + sorted[i].bytes;
        }
        for (; from < end && p->bytes < most; from += PIECE) {
            add_piece(p, pid, from, end - from < PIECE ? end - from : PIECE, room);
        }
    }
    free(sorted);
}

typedef struct reader {
    const pieces *pieces;
    const arena *arena;
    size_t first, step;
    int failed; /**< errno */
} reader;

static void *read_pieces(void *cookie)
{
    reader *r = cookie;
    for (size_t i = r->first; i < r->pieces->count; i += r->step) {
        const piece *p = &r->pieces->items[i];
        struct iovec local = {r->arena->memory + p->to, p->length};
        struct iovec remote = {(void *)(uintptr_t)p->from, p->length};
        ssize_t n = process_vm_readv(p->pid, &local, 1, &remote, 1, 0);
        if (n != (ssize_t)p->length) {
            r->failed = n < 0 ? errno : EFAULT;
            break;
        }
    }
    return NULL;
}

static int read_once(const pieces *p, const arena *a, uint32_t threads)
{
    reader readers[MAX_THREADS] = {{.pieces = p, .arena = a, .step = threads}};
    pthread_t handles[MAX_THREADS];
    int failed = 0;
    uint32_t started = 1;
    for (uint32_t t = 1; t < threads && failed == 0; t++) {
        readers[t] = (reader){p, a, t, threads, 0};
        failed = pthread_create(&handles[t], NULL, read_pieces, &readers[t]);
        started += failed == 0;
    }
    read_pieces(&readers[0]);
    for (uint32_t t = 0; t < started; t++) {
        if (t > 0) {
            pthread_join(handles[t], NULL);
        }
        failed = failed != 0 ? failed : readers[t].failed;
    }
    return failed;
}

void bench_raw_read(bench_limits *limits, const rank_options *options, const ranks *r,
                    const arena *a, uint64_t most, uint32_t threads)
{
    pieces p = {0};
    uint64_t times[ROUNDS];
    bench_limit *limit = bench_limit_add(limits, "raw reads");
    int failed = 0;
    uint32_t parts = options->world_size / options->replicate;
    threads = threads < MAX_THREADS ? threads : MAX_THREADS;
    for (uint32_t rank = 0; rank < parts; rank++) {
        add_rank(&p, ranks_slot(r, rank)->pid, ranks_extents(r, rank),
                 options->tensors->count, a->size, most);
    }
    for (uint32_t round = 0; round < ROUNDS && failed == 0; round++) {
        uint64_t start = progress_now_ns();
        failed = read_once(&p, a, threads);
        times[round] = progress_now_ns() - start;
    }
    limit->threads = threads;
    limit->bytes = p.bytes;
    limit->pieces = p.count;
    bench_limit_end(limit, times, ROUNDS, failed != 0 ? strerror(failed) : NULL);
    free(p.items);
}

void bench_memcpy(bench_limits *limits, const arena *a)
{
    uint64_t times[ROUNDS];
    bench_limit *limit = bench_limit_add(limits, "memcpy");
    limit->bytes = a->size;
    limit->threads = 1;
    uint8_t *source = arena_map(a->size);
    if (source == NULL) {
        bench_limit_end(limit, NULL, 0, "out of memory");
        return;
    }
    memset(source, 1, a->size); /* all pages its own, not the zero page */
    for (uint32_t round = 0; round < ROUNDS; round++) {
        uint64_t start = progress_now_ns();
        memcpy(a->memory, source, a->size);
        times[round] = progress_now_ns() - start;
    }
    bench_limit_end(limit, times, ROUNDS, NULL);
    munmap(source, a->size > 0 ? a->size : 1);
}
