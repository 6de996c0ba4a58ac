/* SPDX-License-Identifier: Apache-2.0 */
/* patch-commit [MIB [ONE_OF [PAIRS]]]: what a patch costs the trainer. Snapshots of so many MiB of
   which one of so many words has changed are committed, in turns with a patch and without. */
#include "clock.h"
#include "server_peer.h"
#include "testing.h"

#include <inttypes.h>

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static uint64_t seed = 1;

static double seconds_of_cpu(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void change(uint16_t *words, size_t n, uint32_t one_of)
{
    for (size_t i = 0; i < n; i++) {
        seed = seed * 6364136223846793005U + 1442695040888963407U;
        words[i] ^= (uint32_t)(seed >> 33) % one_of == 0;
    }
}

/* @p spent: seconds of the clock, and of the CPU. */
static void commit(fanin_server *s, uint64_t step, uint32_t deltas, double spent[2])
{
    fanin_commit_options o;
    fanin_commit_options_init(&o, sizeof o);
    o.flags = FANIN_COMMIT_SNAPSHOT;
    o.deltas = deltas;
    server_begin(s);
    uint64_t began = clock_ns();
    double cpu = seconds_of_cpu();
    assert_works(fanin_server_commit(s, RUN, step, &o, ERROR));
    spent[0] = 1e-9 * (double)(clock_ns() - began);
    spent[1] = seconds_of_cpu() - cpu;
}

static int ascending(const void *a, const void *b)
{
    double one = *(const double *)a, other = *(const double *)b;
    return one < other ? -1 : one > other;
}

static void tell(const char *what, double *plain, double *made, size_t n)
{
    qsort(plain, n, sizeof *plain, ascending);
    qsort(made, n, sizeof *made, ascending);
    printf("%-6s without %.1f (best %.1f), with %.1f (best %.1f) ms: %.2f times (best "
           "%.2f)\n",
           what, 1e3 * plain[n / 2], 1e3 * plain[0], 1e3 * made[n / 2], 1e3 * made[0],
           made[n / 2] / plain[n / 2], made[0] / plain[0]);
}

int main(int argc, char **argv)
{
    size_t size = (argc > 1 ? strtoul(argv[1], NULL, 10) : 512) << 20;
    uint32_t one_of = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 100;
    size_t n = argc > 3 ? strtoul(argv[3], NULL, 10) : 15;
    double *times = calloc(4 * n, sizeof *times), spent[2];
    uint16_t *words = malloc(size);
    fanin_server *s = server_start_lease(0);
    patch_offers offers;
    assert_non_null(words);
    for (size_t i = 0; i < size / 2; i++)
        words[i] = (uint16_t)(i * 40503);
    server_put(s, RUN, "a", words, size);
    server_snapshot(s, 1);
    peer p = peer_open(s);
    peer_request_patches(&p, WIRE_RULE_NEWEST, 0);
    (void)peer_patches(&p, &offers);
    for (size_t i = 0; i < 2 * n + 2; i++) {
        change(words, size / 2, one_of);
        commit(s, i + 2, i % 2, spent);
        if (i < 2) /* the arenas' pages are new */
            continue;
        for (size_t j = 0; j < 2; j++)
            times[(2 * j + i % 2) * n + i / 2 - 1] = spent[j];
    }
    fanin_server_stats stats = server_stats(s);
    printf("%zu MiB, %" PRIu64 " patches\n", size >> 20, stats.patches_made);
    tell("clock", times, times + n, n);
    tell("CPU", times + 2 * n, times + 3 * n, n);
    peer_close(&p);
    server_stop(&s, 0);
    free(times);
    free(words);
    return 0;
}
