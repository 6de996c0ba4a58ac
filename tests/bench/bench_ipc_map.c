/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How long it takes to map other processes' allocations, by how many threads at a time: what a
 * first pull by cuda_ipc waits for, and why it does that in one thread. Exporters allocate on
 * device 0; device 1 maps (or the same, if there is one only); then the same for both devices, one
 * after the other and by a thread each.
 *
 *     bench_ipc_map [EXPORTERS [ALLOCATIONS [MIB]]]      8 processes of 100 times 20 MiB
 *
 * Prints the median of some rounds, of all and of one. Exit status 77 without a GPU.
 */
#include "gpu.h"
#include "ipc_key.h"
#include "error_set.h"
#include "clock.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define ROUNDS 5
#define MOST 16
#define MOST_THREADS 16

static fanin_error failure = FANIN_ERROR_INIT;

static void must(fanin_status status, const char *what)
{
    if (status == FANIN_OK)
        return;
    fprintf(stderr, "%s: %s\n", what, failure.message);
    exit(1);
}

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

/* ------------------------------------------------------------ the other processes */

/* Writes the keys down the pipe, lives until its input ends. */
static void export_memory(int in, int out, size_t n, uint64_t bytes)
{
    gpu *g;
    char end;
    must(gpu_load(NULL, &g, &failure), "exporter: load");
    for (size_t i = 0; i < n; i++) {
        void *memory;
        gpu_range range;
        ipc_key key = {.length = bytes};
        must(gpu_alloc(g, 0, bytes, &memory, &failure), "exporter: allocate");
        must(gpu_range_of(g, memory, &range, &failure), "exporter: range");
        must(gpu_export(g, &range, key.handle, &failure), "exporter: export");
        if (write(out, &key, sizeof key) != sizeof key)
            fail("exporter: write");
    }
    _exit(read(in, &end, 1) == 0 ? 0 : 1);
}

/* Its number n_out keys are written behind @p keys; *@p stop: closing it ends the process. */
static pid_t start_exporter(size_t n, uint64_t bytes, ipc_key *keys, int *stop)
{
    int down[2], up[2];
    if (pipe(down) != 0 || pipe(up) != 0)
        fail("pipe");
    pid_t pid = fork();
    if (pid < 0)
        fail("fork");
    if (pid == 0) {
        close(down[1]);
        close(up[0]);
        close(*stop);
        export_memory(down[0], up[1], n, bytes);
    }
    close(down[0]);
    close(up[1]);
    for (size_t i = 0; i < n; i++) {
        if (read(up[0], &keys[i], sizeof keys[i]) != sizeof keys[i])
            exit(77); /* it has said why */
    }
    close(up[0]);
    *stop = down[1];
    return pid;
}

/* ------------------------------------------------------------------- mapping */

/* A thread's share. */
typedef struct share {
    gpu *g;
    int device;
    const ipc_key *keys;
    void **bases;
    size_t n;
    pthread_t thread;
} share;

static void *map_share(void *cookie)
{
    share *s = cookie;
    fanin_error error = FANIN_ERROR_INIT;
    for (size_t i = 0; i < s->n; i++) {
        if (gpu_map(s->g, s->device, s->keys[i].handle, &s->bases[i], &error) !=
            FANIN_OK) {
            fprintf(stderr, "map: %s\n", error.message);
            exit(1);
        }
    }
    return NULL;
}

static double map_all(gpu *g, int device, const ipc_key *keys, size_t n,
                      unsigned threads)
{
    share shares[MOST_THREADS];
    void **bases = calloc(n, sizeof *bases);
    if (!bases)
        fail("calloc");
    uint64_t started = clock_ns();
    for (unsigned t = 0; t < threads; t++) {
        size_t first = n * t / threads, end = n * (t + 1) / threads;
        shares[t] = (share){.g = g,
                            .device = device,
                            .keys = keys + first,
                            .bases = bases + first,
                            .n = end - first};
        if (pthread_create(&shares[t].thread, NULL, map_share, &shares[t]) != 0)
            fail("pthread_create");
    }
    for (unsigned t = 0; t < threads; t++)
        pthread_join(shares[t].thread, NULL);
    double ms = (double)(clock_ns() - started) / 1e6;
    for (size_t i = 0; i < n; i++)
        gpu_unmap(g, device, bases[i]);
    free(bases);
    return ms;
}

/* Everything for devices 0 and 1: one after the other, or by a thread each. */
static double map_for_two(gpu *g, const ipc_key *keys, size_t n, bool at_once)
{
    share shares[2];
    void **bases = calloc(2 * n, sizeof *bases);
    if (!bases)
        fail("calloc");
    uint64_t started = clock_ns();
    for (int d = 0; d < 2; d++) {
        shares[d] =
            (share){.g = g, .device = d, .keys = keys, .bases = bases + d * n, .n = n};
        if (!at_once)
            map_share(&shares[d]);
        else if (pthread_create(&shares[d].thread, NULL, map_share, &shares[d]) != 0)
            fail("pthread_create");
    }
    for (int d = 0; at_once && d < 2; d++)
        pthread_join(shares[d].thread, NULL);
    double ms = (double)(clock_ns() - started) / 1e6;
    for (size_t i = 0; i < 2 * n; i++)
        gpu_unmap(g, i < n ? 0 : 1, bases[i]);
    free(bases);
    return ms;
}

static int by_value(const void *a, const void *b)
{
    const double *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

int main(int argc, char **argv)
{
    static const unsigned threads[] = {1, 2, 4, 8, MOST_THREADS};
    size_t exporters = argc > 1 ? strtoul(argv[1], NULL, 10) : 8;
    size_t n = argc > 2 ? strtoul(argv[2], NULL, 10) : 100;
    uint64_t bytes = (argc > 3 ? strtoul(argv[3], NULL, 10) : 20) << 20;
    int stops[MOST];
    pid_t pids[MOST];
    if (exporters == 0 || exporters > MOST || n == 0 || bytes == 0) {
        fprintf(stderr, "bench_ipc_map: 1 to %d exporters of something\n", MOST);
        return 2;
    }
    ipc_key *keys = calloc(exporters * n, sizeof *keys);
    if (!keys)
        fail("calloc");
    for (size_t e = 0; e < exporters; e++) {
        stops[e] = e > 0 ? stops[e - 1] : STDIN_FILENO;
        pids[e] = start_exporter(n, bytes, &keys[e * n], &stops[e]);
    }
    gpu *g;
    must(gpu_load(NULL, &g, &failure), "load");
    int device = gpu_count(g) > 1 ? 1 : 0;
    printf("%zu processes, %zu allocations of %llu MiB each, mapped for device %d\n",
           exporters, n, (unsigned long long)(bytes >> 20), device);
    map_all(g, device, keys, exporters * n, 1); /* the driver's first time */
    for (size_t t = 0; t < sizeof threads / sizeof *threads; t++) {
        double ms[ROUNDS];
        for (int r = 0; r < ROUNDS; r++)
            ms[r] = map_all(g, device, keys, exporters * n, threads[t]);
        qsort(ms, ROUNDS, sizeof *ms, by_value);
        printf("%2u threads  %9.2f ms  %7.1f us each  (%.2f .. %.2f)\n", threads[t],
               ms[ROUNDS / 2], ms[ROUNDS / 2] * 1e3 / (double)(exporters * n), ms[0],
               ms[ROUNDS - 1]);
        fflush(stdout);
    }
    for (int at_once = 0; at_once < 2 && device == 1; at_once++) {
        double ms[ROUNDS];
        for (int r = 0; r < ROUNDS; r++)
            ms[r] = map_for_two(g, keys, exporters * n, at_once);
        qsort(ms, ROUNDS, sizeof *ms, by_value);
        printf("devices 0 and 1, %s  %9.2f ms  (%.2f .. %.2f)\n",
               at_once ? "a thread each" : "one thread   ", ms[ROUNDS / 2], ms[0],
               ms[ROUNDS - 1]);
        fflush(stdout);
    }
    for (size_t e = 0; e < exporters; e++)
        close(stops[e]);
    for (size_t e = 0; e < exporters; e++)
        waitpid(pids[e], NULL, 0);
    free(keys);
    return 0;
}
