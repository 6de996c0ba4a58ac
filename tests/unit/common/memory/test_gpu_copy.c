/* SPDX-License-Identifier: Apache-2.0 */
/* Copy tables and the launches of the copy kernel, on the stand-in for the CUDA driver, which does
   what the kernel is told and aborts where it would touch anything else. */
#include "copy_kernel.h"
#include "copy_list.h"
#include "fake_cuda.h"
#include "gpu.h"
#include "random.h"
#include "testing.h"
#include <cuda.h>

#define SOURCE ((uint64_t)1 << 20)
#define SOURCES 4
#define ENTRIES 12000
#define SOON deadline_in_ms(20000)

/* Sources of all kinds, a destination, and the same for the CPU alone. */
typedef struct world {
    uint8_t *sources[SOURCES]; /* cudaMalloc's, a pool's, managed, pinned */
    uint64_t bases[SOURCES + 1], aliases[SOURCES + 1]; /* base 0 is 0 */
    copy_entry *entries;
    uint64_t n, length; /* of entries; of the destination */
    uint8_t *to;        /* on device 0 */
    uint8_t *to_alias, *expected;
    gpu_stream *stream;
} world;

static gpu *g;
static fanin_error failure;
static fake_cuda_counts before;

/* ------------------------------------------------------------------- the world */

static copy_entry random_entry(random_source *r, uint64_t *place)
{
    copy_entry e = {.base = 1 + (uint32_t)random_below(r, SOURCES)};
    e.convert =
        random_below(r, 3) == 0 ? 1 + (uint32_t)random_below(r, 2) : CONVERT_NONE;
    e.run = 1 + (uint32_t)random_below(r, random_below(r, 200) == 0 ? 100000 : 300);
    e.runs = e.run > 1000 ? 1 + (uint32_t)random_below(r, 2)
                          : 1 + (uint32_t)random_below(r, 9);
    if (e.convert != CONVERT_NONE)
        e.run = (e.run + 3) / 4 * 4;
    uint64_t out = convert_bytes(e.convert, e.run), gap = random_below(r, 40);
    uint64_t span = (e.runs - 1) * (out + gap) + out;
    bool down = random_below(r, 4) == 0;
    e.to_step = down ? -(int64_t)(out + gap) : (int64_t)(out + gap);
    e.to = *place + (down ? span - out : 0);
    *place += span + random_below(r, 20);
    int64_t reach = (int64_t)((SOURCE - e.run) / e.runs);
    e.from_step = (int64_t)random_below(r, 2 * (uint64_t)reach + 1) - reach;
    uint64_t back = e.from_step < 0 ? (uint64_t)-e.from_step * (e.runs - 1) : 0;
    uint64_t ahead = e.from_step > 0 ? (uint64_t)e.from_step * (e.runs - 1) : 0;
    e.from = back + random_below(r, SOURCE - e.run - back - ahead + 1);
    return e;
}

static void make_sources(world *w, random_source *r)
{
    void *memory;
    for (int i = 0; i < SOURCES; i++) {
        static const fake_cuda_kind kinds[] = {FAKE_CUDA_MALLOC, FAKE_CUDA_POOL,
                                               FAKE_CUDA_MANAGED};
        if (i < 3)
            memory = fake_cuda_alloc(0, SOURCE, kinds[i]);
        else
            assert_ok(gpu_host_alloc(g, SOURCE, &memory, &failure), failure);
        w->sources[i] = memory;
        w->bases[i + 1] = (uintptr_t)memory;
        uint8_t *alias = fake_cuda_alias(memory);
        w->aliases[i + 1] = (uintptr_t)alias;
        for (uint64_t k = 0; k < SOURCE; k += 8) {
            uint64_t word = random_next(r);
            memcpy(alias + k, &word, 8);
        }
    }
}

static int set_up(void **state)
{
    random_source r = {11};
    world *w = calloc(1, sizeof *w);
    void *to;
    fake_cuda_count(&before);
    failure = (fanin_error)FANIN_ERROR_INIT;
    w->entries = calloc(ENTRIES, sizeof *w->entries);
    assert_non_null(w->entries);
    for (w->n = 0; w->n < ENTRIES; w->n++)
        w->entries[w->n] = random_entry(&r, &w->length);
    make_sources(w, &r);
    assert_ok(gpu_alloc(g, 0, w->length, &to, &failure), failure);
    w->to = to;
    w->to_alias = fake_cuda_alias(to);
    w->expected = calloc(1, w->length);
    assert_non_null(w->expected);
    assert_ok(gpu_stream_create(g, 0, &w->stream, &failure), failure);
    *state = w;
    return 0;
}

static int tear_down(void **state)
{
    world *w = *state;
    gpu_stream_destroy(&w->stream);
    for (int i = 0; i < SOURCES; i++) {
        if (i < 3)
            gpu_free(g, 0, w->sources[i]);
        else
            gpu_host_free(g, w->sources[i]);
    }
    gpu_free(g, 0, w->to);
    free(w->entries);
    free(w->expected);
    free(w);
    fake_cuda_counts after;
    fake_cuda_count(&after);
    CUcontext context;
    return after.allocations != before.allocations || after.pinned != before.pinned ||
           after.streams != before.streams || after.events != before.events ||
           cuCtxGetCurrent(&context) != CUDA_SUCCESS || context != NULL;
}

#define CASE(name) TEST_WITH(name, set_up, tear_down)

static gpu_table *table_of(const world *w)
{
    gpu_table *t;
    assert_ok(gpu_table_create(g, 0, w->entries, w->n, SOURCES + 1, &t, &failure),
              failure);
    assert_int_equal(gpu_table_count(t), w->n);
    return t;
}

static void finish(const world *w)
{
    assert_ok(gpu_stream_wait(w->stream, SOON, &failure), failure);
}

/* The destination is what the CPU makes of these entries; then it is cleared. */
static void assert_copied(world *w, uint64_t first, uint64_t count)
{
    copy_entries_run(w->entries + first, count, w->aliases, 0, (uintptr_t)w->expected);
    assert_memory_equal(w->to_alias, w->expected, w->length);
    memset(w->to_alias, 0, w->length);
    memset(w->expected, 0, w->length);
}

/* ---------------------------------------------------------------------- tables */

/* In whatever turn: what is copied is the same, each entry once. */
CASE(test_in_turns)
{
    world *w = *state;
    gpu_table *t = table_of(w);
    assert_ok(gpu_table_set_bases(t, w->stream, w->bases, &failure), failure);
    for (uint32_t ways = 1; ways <= 70; ways += ways < 9 ? 1 : 20) {
        gpu_table_take_in_turns(t, ways);
        uint64_t first = ways % 3, count = w->n - first - ways % 2;
        assert_ok(
            gpu_table_run(t, w->stream, first, count, 0, (uintptr_t)w->to, &failure),
            failure);
        finish(w);
        assert_copied(w, first, count);
    }
    gpu_table_destroy(&t);
}

/* One of each section, and nobody twice. */
CASE(test_turns)
{
    bool seen[40];
    for (uint64_t count = 1; count <= 40; count++) {
        for (uint32_t ways = 1; ways <= 45; ways++) {
            uint64_t found = 0;
            memset(seen, 0, sizeof seen);
            for (uint64_t turn = 0; turn < copy_turns(count, ways); turn++) {
                uint64_t at = copy_entry_of(turn, count, ways);
                if (at >= count)
                    continue;
                assert_false(seen[at]);
                seen[at] = true;
                found++;
            }
            assert_int_equal(found, count);
        }
    }
    assert_int_equal(copy_entry_of(0, 8, 2), 0);
    assert_int_equal(copy_entry_of(1, 8, 2), 4);
    assert_int_equal(copy_entry_of(2, 8, 2), 1);
}

/* Bases count from the call on, in the stream's order, and are the caller's own no longer. */
CASE(test_bases_change_in_order)
{
    world *w = *state;
    gpu_table *t = table_of(w);
    const uint64_t half = w->n / 2;
    uint64_t bases[SOURCES + 1], swapped[SOURCES + 1];
    memcpy(bases, w->bases, sizeof bases);
    fake_cuda_hold(0);
    assert_ok(gpu_table_set_bases(t, w->stream, bases, &failure), failure);
    assert_ok(gpu_table_run(t, w->stream, 0, half, 0, (uintptr_t)w->to, &failure),
              failure);
    for (int i = 1; i <= SOURCES; i++) {
        bases[i] = w->bases[SOURCES + 1 - i];
        swapped[i] = w->aliases[SOURCES + 1 - i];
    }
    assert_ok(gpu_table_set_bases(t, w->stream, bases, &failure), failure);
    assert_ok(
        gpu_table_run(t, w->stream, half, w->n - half, 0, (uintptr_t)w->to, &failure),
        failure);
    memset(bases, 0x55, sizeof bases);
    fake_cuda_release(0);
    finish(w);
    copy_entries_run(w->entries, half, w->aliases, 0, (uintptr_t)w->expected);
    memcpy(w->aliases, swapped, sizeof swapped);
    assert_copied(w, half, w->n - half);
    gpu_table_destroy(&t);
}

CASE(test_equal_bases_cost_nothing)
{
    world *w = *state;
    gpu_table *t = table_of(w);
    assert_ok(gpu_table_set_bases(t, w->stream, w->bases, &failure), failure);
    finish(w);
    fake_cuda_counts a, b;
    fake_cuda_count(&a);
    for (int i = 0; i < 3; i++)
        assert_ok(gpu_table_set_bases(t, w->stream, w->bases, &failure), failure);
    finish(w);
    fake_cuda_count(&b);
    assert_int_equal(a.copies, b.copies);
    gpu_table_destroy(&t);
}

/* Long runs and many runs, which are cut, in one table with short ones. */
CASE(test_big_entries)
{
    world *w = *state;
    const uint64_t big = (uint64_t)12 << 20;
    void *from, *to;
    gpu_table *t;
    assert_ok(gpu_alloc(g, 0, big, &from, &failure), failure);
    assert_ok(gpu_alloc(g, 0, 4 * big, &to, &failure), failure);
    uint8_t *from_alias = fake_cuda_alias(from), *expected = calloc(4, big);
    assert_non_null(expected);
    random_source r = {5};
    for (uint64_t i = 0; i < big; i++)
        from_alias[i] = (uint8_t)random_next(&r);
    const copy_entry entries[] = {
        {.from = 3, .to = 1, .run = 5, .runs = 1},
        {.from = 1, .to = 100, .run = (uint32_t)big - 1, .runs = 1},
        {.from = 4,
         .to = big + 100,
         .run = (uint32_t)big - 4,
         .runs = 1,
         .convert = CONVERT_F32_F16},
        {.from = 0,
         .to = 2 * big,
         .from_step = 10,
         .to_step = 9,
         .run = 7,
         .runs = 1000000},
        {.from = 8,
         .to = 4 * big - 2,
         .from_step = 8,
         .to_step = -2,
         .run = 4,
         .runs = 999999,
         .convert = CONVERT_F32_BF16},
        {.from = 9, .to = 20, .run = 3, .runs = 1},
    };
    const uint64_t n = sizeof entries / sizeof *entries;
    const uint64_t base = (uintptr_t)from, alias = (uintptr_t)from_alias;
    assert_ok(gpu_table_create(g, 0, entries, n, 1, &t, &failure), failure);
    assert_int_equal(gpu_table_count(t), n);
    assert_ok(gpu_table_set_bases(t, w->stream, &base, &failure), failure);
    for (uint64_t i = 0; i < n; i++) {
        assert_ok(gpu_table_run(t, w->stream, i, 1, 0, (uintptr_t)to, &failure),
                  failure);
        finish(w);
        copy_entries_run(entries + i, 1, &alias, 0, (uintptr_t)expected);
        assert_memory_equal(fake_cuda_alias(to), expected, 4 * big);
    }
    gpu_table_destroy(&t);
    gpu_free(g, 0, from);
    gpu_free(g, 0, to);
    free(expected);
}

/* More than a block has, and one that alone is more than a block. */
CASE(test_many_entries)
{
    world *w = *state;
    const uint32_t n = 450001, runs = 70000 * COPY_UNIT_RUNS;
    void *memory;
    gpu_table *t;
    assert_ok(gpu_alloc(g, 0, 2 * n, &memory, &failure), failure);
    uint8_t *alias = fake_cuda_alias(memory);
    memset(alias, 0, 2 * n);
    copy_entry *entries = calloc(n + 1, sizeof *entries);
    assert_non_null(entries);
    for (uint32_t i = 0; i < n; i++) {
        alias[i] = (uint8_t)(i * 31 + i / 251);
        entries[i] = (copy_entry){.from = i, .to = 2 * n - 1 - i, .run = 1, .runs = 1};
    }
    /* never carried out */
    entries[n] = (copy_entry){.to = 2 * n - 1, .run = 1, .runs = runs};
    assert_ok(gpu_table_create(g, 0, entries, n + 1, 1, &t, &failure), failure);
    const uint64_t base = (uintptr_t)memory;
    assert_ok(gpu_table_set_bases(t, w->stream, &base, &failure), failure);
    assert_ok(gpu_table_run(t, w->stream, 0, n, 0, base, &failure), failure);
    finish(w);
    for (uint32_t i = 0; i < n; i++)
        assert_int_equal(alias[2 * n - 1 - i], alias[i]);
    gpu_table_destroy(&t);
    gpu_free(g, 0, memory);
    free(entries);
}

/* -------------------------------------------------------------------- failures */

/* All that a pull does with a table. */
static fanin_status use_table(const world *w, fanin_error *error)
{
    gpu_table *t = NULL;
    fanin_status status =
        gpu_table_create(g, 0, w->entries, w->n, SOURCES + 1, &t, error);
    if (status != FANIN_OK) {
        assert_null(t);
        return status;
    }
    status = gpu_table_set_bases(t, w->stream, w->bases, error);
    if (status == FANIN_OK)
        status = gpu_table_run(t, w->stream, 0, w->n, 0, (uintptr_t)w->to, error);
    if (status == FANIN_OK)
        status = gpu_stream_wait(w->stream, SOON, error);
    gpu_table_destroy(&t);
    return status;
}

/* Each call of the driver fails once: that is told, nothing leaks, and the next time works. */
CASE(test_failing_calls)
{
    world *w = *state;
    static const char *const functions[] = {
        "cuMemAlloc_v2", "cuMemHostAlloc", "cuMemcpyHtoD_v2",
        "cuMemcpyAsync", "cuStreamCreate", "cuEventCreate",
        "cuEventRecord", "cuLaunchKernel", "cuStreamSynchronize",
    };
    unsigned failures = 0;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        for (unsigned after = 0; after < 50; after++) {
            fake_cuda_fail(functions[i], CUDA_ERROR_UNKNOWN, after, 1);
            failure = (fanin_error)FANIN_ERROR_INIT;
            fanin_status status = use_table(w, &failure);
            fake_cuda_fail(functions[i], CUDA_SUCCESS, 0, 0);
            if (status == FANIN_OK)
                break;
            failures++;
            assert_int_equal(status, FANIN_ERR_TRANSPORT);
            assert_non_null(strstr(failure.message, "CUDA_ERROR_UNKNOWN"));
            assert_ok(use_table(w, &failure), failure);
            assert_copied(w, 0, w->n);
        }
    }
    assert_true(failures >= 4);
}

CASE(test_no_memory_for_a_table)
{
    world *w = *state;
    fake_cuda_fail("cuMemAlloc_v2", CUDA_ERROR_OUT_OF_MEMORY, 0, 1);
    assert_int_equal(use_table(w, &failure), FANIN_ERR_MEMORY);
    assert_non_null(strstr(failure.message, "device 0"));
}

/* Before any kernel is loaded on device 1. */
CASE(test_kernels_are_not_for_the_device)
{
    gpu_table *t;
    gpu_stream *s;
    uint8_t *memory = fake_cuda_alloc(1, 8, FAKE_CUDA_MALLOC),
            *alias = fake_cuda_alias(memory);
    const copy_entry e = {.to = 4, .run = 4, .runs = 1};
    const uint64_t at = (uintptr_t)memory;
    memcpy(alias, "abcd----", 8);
    assert_ok(gpu_stream_create(g, 1, &s, &failure), failure);
    assert_ok(gpu_table_create(g, 1, &e, 1, 1, &t, &failure), failure);
    fake_cuda_fail("cuModuleLoadData", CUDA_ERROR_NO_BINARY_FOR_GPU, 0, 1);
    assert_int_equal(gpu_table_run(t, s, 0, 1, at, at, &failure),
                     FANIN_ERR_UNSUPPORTED);
    assert_non_null(
        strstr(failure.message, "device 1 (Fake GPU, compute capability 9.0)"));
    assert_non_null(strstr(failure.remedy, "driver"));
    assert_ok(gpu_table_run(t, s, 0, 1, at, at, &failure), failure);
    assert_ok(gpu_stream_wait(s, SOON, &failure), failure);
    assert_memory_equal(alias, "abcdabcd", 8);
    gpu_table_destroy(&t);
    gpu_stream_destroy(&s);
    fake_cuda_free(memory);
}

/* A table, its streams and events belong to one device. */
CASE(test_other_device)
{
    world *w = *state;
    gpu_table *t;
    gpu_stream *s;
    const copy_entry e = {.run = 4, .runs = 1};
    const uint64_t base = 1;
    assert_ok(gpu_stream_create(g, 1, &s, &failure), failure);
    assert_ok(gpu_table_create(g, 0, &e, 1, 1, &t, &failure), failure);
    assert_int_equal(gpu_table_set_bases(t, s, &base, &failure), FANIN_ERR_ARGUMENT);
    assert_int_equal(gpu_table_run(t, s, 0, 1, 0, 0, &failure), FANIN_ERR_ARGUMENT);
    assert_int_equal(gpu_table_run(t, w->stream, 1, 1, 0, 0, &failure),
                     FANIN_ERR_ARGUMENT);
    assert_int_equal(gpu_table_run(t, w->stream, 2, 0, 0, 0, &failure),
                     FANIN_ERR_ARGUMENT);
    gpu_table_destroy(&t);
    gpu_stream_destroy(&s);
}

/* What is made once for a device and stays is made here. */
static int set_up_all(void **state)
{
    const copy_entry e = {.run = 4, .runs = 1};
    fanin_status status = gpu_load(NULL, &g, NULL);
    for (int i = 0; i < 2 && status == FANIN_OK; i++) {
        gpu_table *t;
        status = gpu_table_create(g, i, &e, 1, 1, &t, NULL);
        if (status == FANIN_OK)
            gpu_table_destroy(&t);
    }
    return status;
}

TESTS_BETWEEN(set_up_all, NULL)
