/* SPDX-License-Identifier: Apache-2.0 */
/* Pieces from pinned chunks to places on (stand-in) devices: what lands, how much memory it
   takes, and what happens when streams stand still or devices fail. */
#include "device/device_sink.h"

#include "convert.h"
#include "fake_cuda.h"
#include "random.h"
#include "testing.h"
#include <pthread.h>

#define DEVICES 2
#define ROOM ((size_t)24 << 20) /* of destination on each device */
#define LAUNCH_FAILED 719

/* The driver's, for a stream of the caller's. */
int cuStreamCreate(void **stream, unsigned flags);
int cuStreamDestroy_v2(void *stream);

typedef struct bench {
    gpu *g;
    loop l;
    device_memory *pool;
    uint8_t *memory[DEVICES]; /* as devices see it */
    memory_range ranges[DEVICES];
    device_sink *sink;
    uint64_t done, failed, requests, bytes;
    int woken;
    sink_waiter waiter;
    uint64_t streams; /* before */
    bool broke;
} bench;

static int by_base(const void *a, const void *b)
{
    const memory_range *x = a, *y = b;
    return x->base < y->base ? -1 : x->base > y->base;
}

static int setup(void **state)
{
    bench *b = calloc(1, sizeof *b);
    fanin_error error = FANIN_ERROR_INIT;
    logger nobody = {0};
    assert_non_null(b);
    if (gpu_load(&nobody, &b->g, &error) != FANIN_OK) {
        print_message("%s\n", error.message);
        return -1;
    }
    assert_int_equal(loop_init(&b->l, &error), FANIN_OK);
    for (int i = 0; i < DEVICES; i++) {
        void *memory;
        assert_int_equal(gpu_alloc(b->g, i, ROOM, &memory, &error), FANIN_OK);
        b->memory[i] = memory;
        memset(fake_cuda_alias(memory), 0xee, ROOM);
        b->ranges[i] = (memory_range){memory, ROOM, i};
    }
    /* What the first table on a device makes for all later ones. */
    const copy_entry nothing = {.run = 1, .runs = 1};
    for (int i = 0; i < DEVICES; i++) {
        gpu_table *table = NULL;
        assert_int_equal(gpu_table_create(b->g, i, &nothing, 1, 1, &table, &error),
                         FANIN_OK);
        gpu_table_destroy(&table);
    }
    fake_cuda_counts counts;
    fake_cuda_count(&counts);
    b->streams = counts.streams;
    qsort(b->ranges, DEVICES, sizeof *b->ranges, by_base);
    *state = b;
    return 0;
}

static int teardown(void **state)
{
    bench *b = *state;
    for (int i = 0; i < DEVICES; i++) {
        fake_cuda_repair(i);
        fake_cuda_release(i);
        gpu_free(b->g, i, b->memory[i]);
    }
    assert_true(device_memory_close(b->pool, true));
    device_memory_destroy(&b->pool);
    fake_cuda_counts counts;
    fake_cuda_count(&counts);
    assert_int_equal(counts.pinned, 0);
    if (!b->broke) /* a device that has failed destroys nothing */
        assert_int_equal(counts.streams, b->streams);
    loop_finish(&b->l);
    free(b);
    return 0;
}

#define CASE(name) TEST_WITH(name, setup, teardown)

static void open_sink(bench *b, const fanin_stream *after)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_status status =
        device_sink_create(b->g, b->ranges, DEVICES, after, &b->sink, &error);
    if (status != FANIN_OK)
        fail_msg("%s", error.message);
    assert_true(device_sink_attach(b->sink, &b->l, &b->pool));
}

static void on_done(sink_job *job, bool ok)
{
    bench *b = job->owner;
    b->done++;
    b->failed += !ok;
    b->requests += job->requests;
    b->bytes += job->bytes;
    sink_job_give(job);
}

/* Steps the loop until @p n jobs have been told of. */
static void run_until(bench *b, uint64_t n)
{
    deadline at = deadline_in_ms(20000);
    while (b->done < n) {
        assert_false(deadline_passed(at));
        loop_step(&b->l, at);
    }
    assert_int_equal(b->done, n);
}

/* ------------------------------------------------------------------ landing */

/* A destination and what it must hold. */
typedef struct model {
    uint8_t *expected[DEVICES];
    size_t used[DEVICES];
} model;

static void model_init(model *m)
{
    for (int i = 0; i < DEVICES; i++) {
        m->used[i] = 0;
        m->expected[i] = malloc(ROOM);
        assert_non_null(m->expected[i]);
        memset(m->expected[i], 0xee, ROOM);
    }
}

static void model_check(const bench *b, model *m)
{
    for (int i = 0; i < DEVICES; i++) {
        const uint8_t *got = fake_cuda_alias(b->memory[i]);
        for (size_t at = 0; at < ROOM; at++) {
            if (got[at] != m->expected[i][at])
                fail_msg("byte %zu of device %d is %02x instead of %02x", at, i,
                         got[at], m->expected[i][at]);
        }
        free(m->expected[i]);
    }
}

/* A view of packed bytes: rows and columns apart, some converted. */
static uint64_t random_view(random_source *r, strided *v, size_t *room)
{
    static const uint64_t units[] = {1, 2, 4, 8};
    bool converts = random_below(r, 2);
    uint64_t unit = converts ? 4 : units[random_below(r, 4)];
    uint64_t landed = converts ? 2 : unit;
    uint64_t extent[3], length = unit;
    int64_t from[3], to[3];
    size_t step = landed + (random_below(r, 2) ? random_below(r, 3) : 0);
    for (int i = 2; i >= 0; i--) {
        extent[i] = 1 + random_below(r, i == 2 ? 300 : 6);
        from[i] = (int64_t)length;
        length *= extent[i];
        to[i] = (int64_t)step * (converts ? 2 : 1);
        step *= extent[i];
        step += random_below(r, 3) == 0 ? random_below(r, 40) : 0;
    }
    strided_init(v, 3, extent, from, to, unit);
    for (uint32_t i = 0; converts && i < v->n_dims; i++)
        v->to[i] /= 2;
    if (converts)
        v->convert = random_below(r, 2) ? CONVERT_F32_BF16 : CONVERT_F32_F16;
    *room = step + landed;
    return length;
}

/* Puts one random piece into the job; false: it did not fit. */
static bool add_random(bench *b, model *m, random_source *r, sink_job *job, strided *v)
{
    int device = (int)random_below(r, DEVICES);
    bool plain = random_below(r, 3) == 0;
    size_t room;
    uint64_t length;
    if (plain)
        room = length = 1 + random_below(r, random_below(r, 8) == 0 ? 900000 : 5000);
    else
        length = random_view(r, v, &room);
    if (m->used[device] + room > ROOM)
        return true; /* the device is full: fine */
    size_t at = m->used[device];
    uint8_t *bytes =
        sink_job_place(job, length, b->memory[device] + at, plain ? NULL : v);
    if (!bytes)
        return false;
    for (uint64_t i = 0; i < length; i++)
        bytes[i] = (uint8_t)random_next(r);
    if (plain)
        memcpy(m->expected[device] + at, bytes, length);
    else
        strided_copy(v, m->expected[device] + at, bytes);
    m->used[device] += room;
    job->bytes += length;
    return true;
}

CASE(random_pieces_land)
{
    bench *b = *state;
    random_source r = {11};
    static strided views[4000];
    model m;
    model_init(&m);
    open_sink(b, NULL);
    uint64_t submitted = 0, requests = 0;
    for (size_t i = 0, n = 0; i < 40; i++) {
        sink_job *job;
        while (!(job = device_sink_take(b->sink, b)))
            loop_step(&b->l, deadline_in_ms(20000));
        for (uint64_t want = 1 + random_below(&r, 150); want > 0 && n < 4000; want--) {
            if (!add_random(b, &m, &r, job, &views[n++]))
                break;
        }
        requests += job->requests = random_below(&r, 5);
        if (random_below(&r, 6) == 0 && job->n_items == 0) {
            sink_job_give(job);
            continue;
        }
        device_sink_submit(job, on_done);
        submitted++;
    }
    run_until(b, submitted);
    assert_int_equal(b->failed, 0);
    assert_int_equal(b->requests, requests);
    assert_true(m.used[0] > 1000000 && m.used[1] > 1000000);
    model_check(b, &m);
    assert_true(device_sink_destroy(&b->sink));
    assert_null(b->sink);
}

/* A view that takes more entries than a chunk has room for, among pieces that do not. */
CASE(many_entries_land)
{
    bench *b = *state;
    model m;
    strided v;
    uint64_t extent[] = {CHUNK_ENTRIES + 7, 2, 2};
    int64_t from[] = {16, 8, 4}, to[] = {40, 20, 6};
    model_init(&m);
    open_sink(b, NULL);
    strided_init(&v, 3, extent, from, to, 4);
    v.to[0] = 41; /* nothing to fuse */
    sink_job *job = device_sink_take(b->sink, b);
    assert_non_null(job);
    uint64_t length = (CHUNK_ENTRIES + 7) * 16;
    uint8_t *bytes = sink_job_place(job, length, b->memory[1] + 64, &v);
    assert_non_null(bytes);
    for (uint64_t i = 0; i < length; i++)
        bytes[i] = (uint8_t)(i * 7);
    strided_copy(&v, m.expected[1] + 64, bytes);
    /* Full by its entries, though not by its bytes. */
    assert_null(sink_job_place(job, 8, b->memory[1], NULL));
    device_sink_submit(job, on_done);
    run_until(b, 1);
    assert_int_equal(b->failed, 0);
    model_check(b, &m);
    assert_true(device_sink_destroy(&b->sink));
}

/* Slots of the owner's memory instead of chunks, used again and again. */
CASE(slots_land)
{
    bench *b = *state;
    model m;
    void *slot;
    fanin_error error = FANIN_ERROR_INIT;
    sink_job job;
    model_init(&m);
    assert_int_equal(gpu_host_alloc(b->g, 1 << 20, &slot, &error), FANIN_OK);
    open_sink(b, NULL);
    sink_job_init(&job, b->sink, 3, b);
    for (unsigned round = 0; round < 5; round++) {
        memset(slot, (int)round + 1, 1 << 20);
        for (unsigned i = 0; i < 3000; i++) {
            size_t at = ((size_t)round * 3000 + i) * 300;
            int device = (int)(i % DEVICES);
            assert_true(sink_job_add(&job, (uint8_t *)slot + i * 300, 290,
                                     b->memory[device] + at, NULL));
            memset(m.expected[device] + at, (int)round + 1, 290);
        }
        b->done = 0;
        device_sink_submit(&job, on_done); /* gives it, which it outlives */
        run_until(b, 1);
    }
    sink_job_give(&job);
    model_check(b, &m);
    assert_true(device_sink_destroy(&b->sink));
    gpu_host_free(b->g, slot);
}

/* ------------------------------------------------------------ standing still */

static void on_ready(sink_waiter *waiter)
{
    bench *b = (bench *)((char *)waiter - offsetof(bench, waiter));
    b->woken++;
}

static sink_job *filled(bench *b, size_t at, size_t length, int value)
{
    sink_job *job = device_sink_take(b->sink, b);
    if (!job)
        return NULL;
    uint8_t *bytes = sink_job_place(job, length, b->memory[0] + at, NULL);
    assert_non_null(bytes);
    memset(bytes, value, length);
    return job;
}

CASE(chunks_are_bounded)
{
    bench *b = *state;
    open_sink(b, NULL);
    b->waiter.ready = on_ready;
    fake_cuda_hold(0);
    unsigned jobs = 0;
    for (sink_job *job; (job = filled(b, jobs * 1000, 1000, 5)); jobs++)
        device_sink_submit(job, on_done);
    assert_int_equal(jobs, POOL_CHUNKS);
    assert_false(device_sink_failed(b->sink, NULL));
    assert_false(device_sink_is_short(b->sink));
    device_sink_wait(b->sink, &b->waiter);
    assert_true(device_sink_is_short(b->sink));
    fake_cuda_counts counts;
    fake_cuda_count(&counts);
    assert_true(counts.pinned_bytes <= POOL_CHUNKS * (CHUNK_BYTES + (256 << 10)));
    fake_cuda_release(0);
    run_until(b, POOL_CHUNKS);
    deadline at = deadline_in_ms(20000);
    while (b->woken == 0 && !deadline_passed(at))
        loop_step(&b->l, at);
    assert_int_equal(b->woken, 1);
    assert_false(device_sink_is_short(b->sink));
    /* The next pull finds its chunks made. */
    assert_true(device_sink_destroy(&b->sink));
    uint64_t calls = fake_cuda_calls("cuMemHostAlloc");
    open_sink(b, NULL);
    sink_job *job = filled(b, 0, 100, 6);
    assert_non_null(job);
    sink_job_give(job);
    assert_int_equal(fake_cuda_calls("cuMemHostAlloc"), calls);
    assert_true(device_sink_destroy(&b->sink));
}

/* The destinations may be in use until the caller's stream gets there. */
CASE(nothing_lands_before_its_time)
{
    bench *b = *state;
    fanin_stream after = {NULL, 0};
    assert_int_equal(gpu_context_enter(b->g, 0, NULL), FANIN_OK);
    assert_int_equal(cuStreamCreate(&after.handle, 1), 0);
    gpu_context_leave(b->g);
    uint8_t *alias = fake_cuda_alias(b->memory[0]);
    fake_cuda_hold_stream(after.handle);
    open_sink(b, &after);
    assert_false(device_sink_ready(b->sink));
    for (int i = 0; i < 3; i++)
        device_sink_submit(filled(b, (size_t)i * 100, 100, 7), on_done);
    for (int i = 0; i < 3; i++)
        loop_step(&b->l, 0);
    assert_int_equal(b->done, 0);
    assert_int_equal(alias[0], 0xee);
    fake_cuda_release(0);
    run_until(b, 3);
    assert_true(device_sink_ready(b->sink));
    assert_int_equal(b->failed, 0);
    assert_true(alias[0] == 7 && alias[299] == 7 && alias[300] == 0xee);
    assert_true(device_sink_destroy(&b->sink));

    /* Given up before that: it does not wait for the caller, and never writes. */
    fake_cuda_hold_stream(after.handle);
    open_sink(b, &after);
    device_sink_submit(filled(b, 1000, 100, 8), on_done);
    loop_step(&b->l, 0);
    assert_true(device_sink_recall(b->sink, b));
    assert_true(device_sink_destroy(&b->sink));
    fake_cuda_release(0);
    assert_true(fake_cuda_wait_idle(0));
    assert_int_equal(alias[1000], 0xee);
    assert_int_equal(b->done, 3);
    assert_int_equal(gpu_context_enter(b->g, 0, NULL), FANIN_OK);
    assert_int_equal(cuStreamDestroy_v2(after.handle), 0);
    gpu_context_leave(b->g);
}

static void *release_when_held(void *cookie)
{
    (void)cookie;
    bool held = fake_cuda_wait_kernel_held(0);
    fake_cuda_release(0);
    return held ? cookie : NULL;
}

/* A kernel that has begun is waited for: nothing is written after the recall. */
CASE(a_recall_waits_for_what_runs)
{
    bench *b = *state;
    int others;
    uint8_t *alias = fake_cuda_alias(b->memory[0]);
    open_sink(b, NULL);
    fake_cuda_hold_kernel(0, 1);
    sink_job *job = filled(b, 0, 200000, 9);
    assert_non_null(job);
    device_sink_submit(job, on_done);
    job = filled(b, 300000, 1000, 10);
    assert_non_null(job);
    job->owner = &others;
    pthread_t thread;
    void *held;
    assert_int_equal(pthread_create(&thread, NULL, release_when_held, b), 0);
    assert_true(device_sink_recall(b->sink, b));
    assert_true(alias[0] == 9 && alias[199999] == 9);
    pthread_join(thread, &held);
    assert_ptr_equal(held, b);
    assert_int_equal(b->done, 0);
    /* What is another owner's goes on. */
    job->owner = b;
    device_sink_submit(job, on_done);
    run_until(b, 1);
    assert_int_equal(alias[300999], 10);
    assert_true(device_sink_destroy(&b->sink));
}

/* ------------------------------------------------------------------ failures */

static void assert_failure(bench *b, const char *device)
{
    fanin_error error = FANIN_ERROR_INIT;
    assert_true(device_sink_failed(b->sink, &error));
    assert_int_equal(error.status, FANIN_ERR_TRANSPORT);
    assert_non_null(strstr(error.message, device));
    assert_null(device_sink_take(b->sink, b));
}

CASE(a_broken_device_is_named)
{
    bench *b = *state;
    open_sink(b, NULL);
    fake_cuda_hold(1);
    sink_job *job = device_sink_take(b->sink, b);
    assert_non_null(job);
    for (int i = 0; i < DEVICES; i++)
        memset(sink_job_place(job, 50, b->memory[i], NULL), 1, 50);
    device_sink_submit(job, on_done);
    fake_cuda_break(1);
    b->broke = true;
    run_until(b, 1);
    assert_int_equal(b->failed, 1);
    assert_failure(b, "device 1");
    assert_true(device_sink_destroy(&b->sink));
}

CASE(waiters_learn_of_failures)
{
    bench *b = *state;
    open_sink(b, NULL);
    b->waiter.ready = on_ready;
    fake_cuda_hold(0);
    unsigned jobs = 0;
    for (sink_job *job; (job = filled(b, 0, 10, 5)); jobs++)
        device_sink_submit(job, on_done);
    device_sink_wait(b->sink, &b->waiter);
    fake_cuda_break(0);
    b->broke = true;
    run_until(b, jobs);
    assert_int_equal(b->failed, jobs);
    assert_int_equal(b->woken, 1);
    assert_failure(b, "device 0");
    assert_true(device_sink_destroy(&b->sink));
}

/* Each function of the driver that the sink's work comes down to. */
CASE(calls_that_fail)
{
    bench *b = *state;
    static const char *const functions[] = {"cuLaunchKernel", "cuLaunchHostFunc",
                                            "cuStreamAddCallback"};
    uint64_t tried = 0;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        uint64_t calls = fake_cuda_calls(functions[i]);
        open_sink(b, NULL);
        b->done = b->failed = 0;
        fake_cuda_fail(functions[i], LAUNCH_FAILED, 0, 0);
        sink_job *job = filled(b, 0, 100, 3);
        assert_non_null(job);
        device_sink_submit(job, on_done);
        run_until(b, 1);
        fake_cuda_fail(functions[i], 0, 0, 0);
        assert_int_equal(b->failed, fake_cuda_calls(functions[i]) > calls);
        if (b->failed)
            assert_failure(b, "device 0");
        tried += b->failed;
        assert_true(device_sink_destroy(&b->sink));
    }
    assert_int_equal(tried, 2);
}

CASE(pinned_memory_that_is_short)
{
    bench *b = *state;
    fanin_error error = FANIN_ERROR_INIT;
    open_sink(b, NULL);
    fake_cuda_fail("cuMemHostAlloc", 2, 0, 0);
    assert_null(device_sink_take(b->sink, b));
    assert_true(device_sink_failed(b->sink, &error));
    assert_int_equal(error.status, FANIN_ERR_MEMORY);
    fake_cuda_fail("cuMemHostAlloc", 0, 0, 0);
    assert_true(device_sink_destroy(&b->sink));
    /* With a chunk or two there is enough. */
    open_sink(b, NULL);
    fake_cuda_fail("cuMemHostAlloc", 2, 2, 0);
    sink_job *first = filled(b, 0, 10, 3), *second = filled(b, 10, 10, 3);
    assert_true(first && second && !device_sink_take(b->sink, b));
    assert_false(device_sink_failed(b->sink, NULL));
    device_sink_submit(first, on_done);
    device_sink_submit(second, on_done);
    run_until(b, 2);
    fake_cuda_fail("cuMemHostAlloc", 0, 0, 0);
    assert_int_equal(b->failed, 0);
    assert_true(device_sink_destroy(&b->sink));
}

CASE(host_memory_needs_no_sink)
{
    bench *b = *state;
    fanin_error error = FANIN_ERROR_INIT;
    uint8_t bytes[10];
    memory_range host = {bytes, sizeof bytes, -1};
    assert_int_equal(device_sink_create(b->g, &host, 1, NULL, &b->sink, &error),
                     FANIN_OK);
    assert_null(b->sink);
    assert_int_equal(device_sink_device(NULL, bytes), -1);
    assert_false(device_sink_failed(NULL, NULL));
    assert_true(device_sink_destroy(&b->sink));
    open_sink(b, NULL);
    assert_int_equal(device_sink_device(b->sink, bytes), -1);
    for (int i = 0; i < DEVICES; i++) {
        assert_int_equal(device_sink_device(b->sink, b->memory[i]), i);
        assert_int_equal(device_sink_device(b->sink, b->memory[i] + ROOM - 1), i);
    }
    assert_true(device_sink_destroy(&b->sink));
}
