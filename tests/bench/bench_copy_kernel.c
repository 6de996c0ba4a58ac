/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The copy kernel on real GPUs, beside the driver's own copies of the same bytes: from another
 * process's memory on device 0 to device 1 (or the same device if there is one only), in pieces as
 * LoRA adapters have them. With two GPUs also both at once: each reads a half of what it gets from
 * its own memory and a half from the other's, in rows and in columns of rows, as two
 * tensor-parallel workers do. Prints medians. Exit status 77 without a GPU.
 *
 *     bench_copy_kernel [both]    both: nothing but that
 */
#include "copy_list.h"
#include "error_set.h"
#include "gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define ROUNDS 21
#define SEGMENT ((uint64_t)20 << 20)
#define SEGMENTS 84
#define BYTES (SEGMENT * SEGMENTS)
#define RANKS 8 /* of both devices, in turn */
#define SHARD ((uint64_t)256 << 20)

static fanin_error failure = FANIN_ERROR_INIT;

static void must(fanin_status status, const char *what)
{
    if (status == FANIN_OK)
        return;
    fprintf(stderr, "%s: %s\n", what, failure.message);
    exit(1);
}

static int by_value(const void *a, const void *b)
{
    const double *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

static void report(const char *what, double *ms, int n, uint64_t bytes)
{
    qsort(ms, (size_t)n, sizeof *ms, by_value);
    printf("%-52s %8.3f ms  %7.1f GB/s  (%.3f .. %.3f)\n", what, ms[n / 2],
           (double)bytes / ms[n / 2] / 1e6, ms[0], ms[n - 1]);
    fflush(stdout);
}

/* ------------------------------------------------------------- the other process */

static void export_one(gpu *g, int device, uint64_t size, int out)
{
    void *memory;
    gpu_range range;
    uint8_t handle[GPU_HANDLE_SIZE];
    must(gpu_alloc(g, device, size, &memory, &failure), "exporter: allocate");
    must(gpu_range_of(g, memory, &range, &failure), "exporter: range");
    must(gpu_export(g, &range, handle, &failure), "exporter: export");
    if (write(out, handle, sizeof handle) != (ssize_t)sizeof handle)
        exit(1);
}

/* Allocates on device 0, and for RANKS on all, writes the handles down the pipe, lives until its
   input ends. */
static void export_memory(int in, int out)
{
    gpu *g;
    must(gpu_load(NULL, &g, &failure), "exporter: load");
    for (int i = 0; i < SEGMENTS; i++)
        export_one(g, 0, SEGMENT, out);
    for (int i = 0; i < RANKS && gpu_count(g) > 1; i++)
        export_one(g, i % 2, SHARD, out);
    char c;
    (void)!read(in, &c, 1);
    exit(0);
}

/* ------------------------------------------------------------------ measuring */

static double run_table(gpu_table *table, gpu_stream *s, uint64_t n)
{
    uint64_t begin = clock_ns();
    must(gpu_table_run(table, s, 0, n, 0, 0, &failure), "run");
    must(gpu_stream_wait(s, deadline_in_ms(10000), &failure), "wait");
    return (double)(clock_ns() - begin) / 1e6;
}

/* Pieces of @p piece bytes from all bases to a packed destination, in a shuffled order of places.
   */
static void measure(gpu *g, gpu_stream *s, int device, const uint64_t *bases,
                    uint8_t *to, uint64_t piece, uint64_t shift, uint32_t convert,
                    const char *what)
{
    copy_list list = {0};
    uint64_t per = (SEGMENT - shift) / piece, n = per * SEGMENTS;
    uint64_t out = convert_bytes(convert, piece);
    for (uint64_t i = 0; i < n; i++) {
        uint64_t place = i * 7919 % n;
        strided view = {.run = piece, .convert = convert};
        copy_list_add_view(&list, (uint32_t)(i / per), i % per * piece + shift,
                           (uint64_t)(uintptr_t)to + place * out, &view);
    }
    gpu_table *table;
    uint64_t begin = clock_ns();
    must(gpu_table_create(g, device, list.entries, list.n, SEGMENTS, &table, &failure),
         "table");
    double make = (double)(clock_ns() - begin) / 1e6;
    must(gpu_table_set_bases(table, s, bases, &failure), "bases");
    double ms[ROUNDS];
    run_table(table, s, list.n);
    for (int i = 0; i < ROUNDS; i++)
        ms[i] = run_table(table, s, list.n);
    char text[128];
    snprintf(text, sizeof text, "%s, %llu pieces of %llu%s (table %.1f ms)", what,
             (unsigned long long)n, (unsigned long long)piece,
             convert ? ", to bf16" : "", make);
    report(text, ms, ROUNDS, n * piece);
    gpu_table_destroy(&table);
    copy_list_free(&list);
}

static void measure_copies(gpu_stream *s, const uint64_t *bases, uint8_t *to,
                           const char *what)
{
    double ms[ROUNDS];
    for (int r = 0; r < ROUNDS; r++) {
        uint64_t begin = clock_ns();
        for (uint64_t i = 0; i < SEGMENTS; i++)
            must(gpu_copy(s, to + i * SEGMENT, (void *)(uintptr_t)bases[i], SEGMENT,
                          &failure),
                 "copy");
        must(gpu_stream_wait(s, deadline_in_ms(10000), &failure), "wait");
        ms[r] = (double)(clock_ns() - begin) / 1e6;
    }
    report(what, ms, ROUNDS, BYTES);
}

static void measure_all(gpu *g, gpu_stream *s, int device, const uint64_t *bases,
                        uint8_t *to, const char *from)
{
    char what[64];
    snprintf(what, sizeof what, "%s: copies of 20 MiB", from);
    measure_copies(s, bases, to, what);
    static const uint64_t pieces[] = {1 << 20, 45312, 45056, 5664, 1024, 256};
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++)
        measure(g, s, device, bases, to, pieces[i], 0, CONVERT_NONE, from);
    measure(g, s, device, bases, to, 45056, 2, CONVERT_NONE, "shifted by 2");
    measure(g, s, device, bases, to, 45056, 0, CONVERT_F32_BF16, from);
}

/* ------------------------------------------------------------- both directions */

typedef struct reader {
    gpu_stream *s;
    uint64_t shards[RANKS]; /* as this device sees them */
    uint8_t *to;
    gpu_table *table;
} reader;

/* Of each shard @p run bytes of every @p pitch, in blocks of at most 4 MiB; or a run an entry. */
static uint64_t list_shards(reader *r, uint64_t run, uint64_t pitch, bool single,
                            copy_list *list)
{
    uint64_t rows = ((uint64_t)4 << 20) / pitch, to = (uint64_t)(uintptr_t)r->to;
    uint64_t blocks = SHARD / (rows * pitch), bytes = 0;
    for (uint32_t i = 0; i < RANKS; i++) {
        for (uint64_t b = 0; b < blocks; b++) {
            const strided view = {.n_dims = 1,
                                  .extent = {rows},
                                  .from = {(int64_t)pitch},
                                  .to = {(int64_t)run},
                                  .run = run};
            for (uint64_t k = 0; k < rows && (single || k == 0); k++) {
                uint64_t from = (b * rows + k) * pitch, at = to + bytes + k * run;
                if (single || rows == 1)
                    copy_list_add(list, i, from, at, run);
                else
                    copy_list_add_view(list, i, from, at, &view);
            }
            bytes += rows * run;
        }
    }
    return bytes;
}

/* As slow as the slower one. */
static double run_both(reader *readers, size_t first, uint64_t n)
{
    uint64_t begin = clock_ns();
    for (size_t d = first; d < 2; d++)
        must(gpu_table_run(readers[d].table, readers[d].s, 0, n, 0, 0, &failure),
             "run");
    for (size_t d = first; d < 2; d++)
        must(gpu_stream_wait(readers[d].s, deadline_in_ms(10000), &failure), "wait");
    return (double)(clock_ns() - begin) / 1e6;
}

static void measure_shards(gpu *g, reader *readers, uint64_t run, uint64_t pitch,
                           bool single)
{
    uint64_t n = 0, bytes = 0;
    char text[128];
    double ms[ROUNDS];
    for (int d = 0; d < 2; d++) {
        copy_list list = {0};
        bytes = list_shards(&readers[d], run, pitch, single, &list);
        n = list.n;
        must(
            gpu_table_create(g, d, list.entries, n, RANKS, &readers[d].table, &failure),
            "table");
        gpu_table_take_in_turns(readers[d].table, RANKS);
        must(gpu_table_set_bases(readers[d].table, readers[d].s, readers[d].shards,
                                 &failure),
             "bases");
        copy_list_free(&list);
    }
    for (int first = 0; first < 2; first++) {
        run_both(readers, (size_t)first, n);
        for (int i = 0; i < ROUNDS; i++)
            ms[i] = run_both(readers, (size_t)first, n);
        snprintf(text, sizeof text, "%s: %llu of %llu bytes%s, crossing",
                 first ? "one alone" : "both at once", (unsigned long long)run,
                 (unsigned long long)pitch, single ? ", an entry each" : "");
        report(text, ms, ROUNDS, bytes / 2);
    }
    for (int d = 0; d < 2; d++)
        gpu_table_destroy(&readers[d].table);
}

static void measure_crossing_copies(reader *readers)
{
    double ms[ROUNDS];
    for (int first = 0; first < 2; first++) {
        for (int r = 0; r < ROUNDS; r++) {
            uint64_t begin = clock_ns();
            for (int d = first; d < 2; d++) {
                for (int i = 1 - d; i < RANKS; i += 2)
                    must(gpu_copy(readers[d].s, readers[d].to + (uint64_t)i * SHARD,
                                  (void *)(uintptr_t)readers[d].shards[i], SHARD,
                                  &failure),
                         "copy");
            }
            for (int d = first; d < 2; d++)
                must(gpu_stream_wait(readers[d].s, deadline_in_ms(10000), &failure),
                     "wait");
            ms[r] = (double)(clock_ns() - begin) / 1e6;
        }
        report(first ? "one alone: the driver's copies, crossing"
                     : "both at once: the driver's copies, crossing",
               ms, ROUNDS, SHARD * RANKS / 2);
    }
}

static void measure_both(gpu *g, int handles)
{
    reader readers[2] = {0};
    for (int d = 0; d < 2; d++) {
        void *to;
        must(gpu_stream_create(g, d, &readers[d].s, &failure), "stream");
        must(gpu_alloc(g, d, SHARD * RANKS, &to, &failure), "allocate");
        readers[d].to = to;
    }
    for (int i = 0; i < RANKS; i++) {
        uint8_t handle[GPU_HANDLE_SIZE];
        if (read(handles, handle, sizeof handle) != (ssize_t)sizeof handle)
            exit(1);
        for (int d = 0; d < 2; d++) {
            void *base;
            must(gpu_map(g, d, handle, &base, &failure), "map");
            readers[d].shards[i] = (uint64_t)(uintptr_t)base;
        }
    }
    measure_crossing_copies(readers);
    measure_shards(g, readers, 4 << 20, 4 << 20, false);
    static const uint64_t runs[] = {12288, 4096, 768};
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        measure_shards(g, readers, runs[i], 2 * runs[i], false);
        measure_shards(g, readers, runs[i], 2 * runs[i], true);
    }
    for (int d = 0; d < 2; d++)
        for (int i = 0; i < RANKS; i++)
            gpu_unmap(g, d, (void *)(uintptr_t)readers[d].shards[i]);
}

static void measure_host(gpu *g, gpu_stream *s, const uint8_t *from)
{
    void *memory =
        mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        exit(1);
    uint64_t begin = clock_ns();
    memset(memory, 0, BYTES);
    printf("populating %.2f GB: %.1f ms\n", BYTES / 1e9,
           (double)(clock_ns() - begin) / 1e6);
    begin = clock_ns();
    must(gpu_pin(g, memory, BYTES, &failure), "pin");
    printf("pinning it: %.1f ms\n", (double)(clock_ns() - begin) / 1e6);
    double ms[5];
    for (int i = 0; i < 5; i++) {
        begin = clock_ns();
        must(gpu_copy(s, memory, from, BYTES, &failure), "copy to the host");
        must(gpu_stream_wait(s, deadline_in_ms(10000), &failure), "wait");
        ms[i] = (double)(clock_ns() - begin) / 1e6;
    }
    report("device to pinned host", ms, 5, BYTES);
    gpu_unpin(g, memory);
    munmap(memory, BYTES);
}

static void measure_fixed(gpu *g, gpu_stream *s, int device, uint8_t *to)
{
    copy_list list = {0};
    copy_list_add(&list, 0, (uint64_t)(uintptr_t)to, (uint64_t)(uintptr_t)to + 4096,
                  4096);
    gpu_table *table;
    must(gpu_table_create(g, device, list.entries, 1, 1, &table, &failure), "table");
    double ms[201];
    for (int i = 0; i < 201; i++)
        ms[i] = run_table(table, s, 1);
    report("one piece of 4 KiB: launch and wait", ms, 201, 4096);
    gpu_table_destroy(&table);
    copy_list_free(&list);
}

int main(int argc, char **argv)
{
    bool both_only = argc > 1 && strcmp(argv[1], "both") == 0;
    int down[2], up[2];
    if (pipe(down) != 0 || pipe(up) != 0)
        return 1;
    pid_t child = fork(); /* before CUDA is started: it does not survive a fork */
    if (child == 0) {
        close(down[1]);
        export_memory(down[0], up[1]);
    }
    close(up[1]);
    gpu *g;
    if (gpu_load(NULL, &g, &failure) != FANIN_OK) {
        printf("skipped: %s\n", failure.message);
        return 77;
    }
    int device = gpu_count(g) > 1 ? 1 : 0;
    printf("%d GPUs, driver for CUDA %s, destination on device %d\n", gpu_count(g),
           gpu_driver_version(g), device);
    gpu_stream *s;
    must(gpu_stream_create(g, device, &s, &failure), "stream");
    uint64_t remote[SEGMENTS], local[SEGMENTS];
    double open_ms[SEGMENTS];
    for (int i = 0; i < SEGMENTS; i++) {
        uint8_t handle[GPU_HANDLE_SIZE];
        void *base;
        if (read(up[0], handle, sizeof handle) != (ssize_t)sizeof handle)
            return 1;
        uint64_t begin = clock_ns();
        must(gpu_map(g, device, handle, &base, &failure), "map");
        open_ms[i] = (double)(clock_ns() - begin) / 1e6;
        remote[i] = (uint64_t)(uintptr_t)base;
        must(gpu_alloc(g, device, SEGMENT, &base, &failure), "allocate");
        local[i] = (uint64_t)(uintptr_t)base;
    }
    report("opening a handle", open_ms, SEGMENTS, 0);
    void *to;
    must(gpu_alloc(g, device, BYTES, &to, &failure), "allocate");
    if (!both_only) {
        measure_all(g, s, device, remote, to, "another process's memory");
        measure_all(g, s, device, local, to, "own memory");
        measure_fixed(g, s, device, to);
    }
    if (device == 1)
        measure_both(g, up[0]);
    if (!both_only)
        measure_host(g, s, to);
    for (int i = 0; i < SEGMENTS; i++)
        gpu_unmap(g, device, (void *)(uintptr_t)remote[i]);
    close(down[1]);
    waitpid(child, NULL, 0);
    return 0;
}
