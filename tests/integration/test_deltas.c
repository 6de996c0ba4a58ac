/* SPDX-License-Identifier: Apache-2.0 */
/* Pulls by patches from real ranks: after each one the destination holds the step, byte for byte,
   whatever happened before. With ON_DEVICE it is memory of two devices of the stand-in driver,
   which the CPU can touch as well, and of the host. */
#include "dtype.h"
#include "ends.h"
#include "local_world.h"
#include "log_catcher.h"
#include "rank_proxy.h"
#include "testing.h"
#include <stdatomic.h>

#ifdef ON_DEVICE
#include "fake_cuda.h"
#include "gpu.h"
#include <cuda.h>
#define PARTS 3
#else
#define PARTS 1
#endif
#define KEPT 4

/* 420 KB of a matrix, so that a rank has several segments; bytes; words of 4; three dimensions. */
static const world_tensor model[] = {
    {"a.embed", FANIN_DTYPE_BF16, 2, {700, 300}},
    {"b.gate", FANIN_DTYPE_U8, 2, {501, 129}},
    {"c.norm", FANIN_DTYPE_F32, 1, {2057}},
    {"d.experts", FANIN_DTYPE_BF16, 3, {8, 40, 66}},
};
#define TENSORS (sizeof model / sizeof *model)
/* For threads: of 24 MB. */
static const world_tensor large[] = {{"large", FANIN_DTYPE_BF16, 2, {6000, 2048}}};

typedef enum share {
    WHOLE,
    COLUMNS,  /* of the last dimension, as tensor parallelism cuts it */
    PERMUTED, /* dimensions in the opposite order, with room between */
    SHARES
} share;

/* What a test has, and what was said last. */
static world w;
static fanin_client *client;
static struct {
    fanin_box boxes[TENSORS];
    fanin_tensor tensors[TENSORS];
    struct part {
        uint8_t *memory, *before;
        size_t size;
    } parts[PARTS]; /* the last one is the host's */
} l;
static rank_proxy proxy;
static bool has_proxy;
static fanin_destination *into;
static fanin_pull_options options;
static fanin_result_info info;
static fanin_error error = FANIN_ERROR_INIT;
static uint64_t step;

/* ----------------------------------------------------------------- destinations */

static void place_box(size_t i, share of, size_t *used)
{
    const world_tensor *t = &w.tensors[i];
    fanin_box *box = &l.boxes[i];
    int64_t item = dtype_get_unit(t->dtype).bytes, stride = item;
    *box = (fanin_box){0};
    memcpy(box->extent, t->shape, sizeof box->extent);
    if (of == COLUMNS) {
        uint32_t last = t->n_dims - 1;
        box->offset[last] = t->shape[last] / 4 + 1;
        box->extent[last] = t->shape[last] / 3;
    }
    for (uint32_t d = 0; d < t->n_dims; d++) {
        uint32_t dim = of == PERMUTED ? d : t->n_dims - 1 - d;
        box->stride[dim] = stride;
        stride *= (int64_t)box->extent[dim] + (of == PERMUTED);
    }
    box->address = (void *)*used; /* added to the memory */
    *used += (size_t)stride + 3 * (of == PERMUTED);
    l.tensors[i] = world_boxes(t, box, 1);
}

static uint8_t *part_memory(size_t part, size_t size)
{
#ifdef ON_DEVICE
    if (part < PARTS - 1)
        return memset(fake_cuda_alloc((int)part, size + 1, FAKE_CUDA_MANAGED), 0, size);
#endif
    (void)part;
    return calloc(1, size + 1);
}

static void free_parts(void)
{
    for (size_t i = 0; i < PARTS; i++) {
#ifdef ON_DEVICE
        if (i < PARTS - 1 && l.parts[i].memory)
            fake_cuda_free(l.parts[i].memory);
        else
#endif
            free(l.parts[i].memory);
        free(l.parts[i].before);
    }
    memset(&l, 0, sizeof l);
}

static void make_destination(share of)
{
    fanin_destination_free(&into);
    free_parts();
    for (size_t i = 0; i < w.n_tensors; i++)
        place_box(i, of, &l.parts[i % PARTS].size);
    for (size_t i = 0; i < PARTS; i++) {
        l.parts[i].memory = part_memory(i, l.parts[i].size);
        l.parts[i].before = calloc(1, l.parts[i].size + 1);
    }
    for (size_t i = 0; i < w.n_tensors; i++)
        l.boxes[i].address = l.parts[i % PARTS].memory + (size_t)l.boxes[i].address;
    assert_ok(fanin_destination_create(l.tensors, w.n_tensors, &into, &error), error);
}

/* Every element of every box. */
static void check_step(void)
{
    for (size_t i = 0; i < w.n_tensors; i++) {
        const world_tensor *t = &w.tensors[i];
        const fanin_box *box = &l.boxes[i];
        size_t item = dtype_get_unit(t->dtype).bytes;
        uint8_t *whole = world_whole(&w, i, step);
        uint64_t n = 1;
        for (uint32_t d = 0; d < t->n_dims; d++)
            n *= box->extent[d];
        for (uint64_t k = 0; k < n; k++) {
            uint64_t rest = k, global = 0, scale = 1;
            const uint8_t *at = box->address;
            for (uint32_t d = t->n_dims; d-- > 0;) {
                uint64_t index = rest % box->extent[d];
                rest /= box->extent[d];
                at += (int64_t)index * box->stride[d];
                global += (box->offset[d] + index) * scale;
                scale *= t->shape[d];
            }
            if (memcmp(at, whole + global * item, item) != 0)
                fail_msg("%s: element %llu is not of step %llu", t->name,
                         (unsigned long long)k, (unsigned long long)step);
        }
        free(whole);
    }
}

/* ------------------------------------------------------------------------ worlds */

static int tear_down(void **state)
{
    (void)state;
    fanin_destination_free(&into);
    fanin_client_destroy(&client);
    if (has_proxy)
        rank_proxy_stop(&proxy);
    has_proxy = false;
    free_parts();
    world_stop(&w);
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, tear_down)

static fanin_client *new_client(fanin_path path)
{
    fanin_client_config config = make_client_config();
    config.path = path;
    config.log = log_catch;
    return world_client_with(&w, &config);
}

/* Step 1 is committed, without a patch. */
static void begin_of(const world_tensor *tensors, size_t n, size_t size, world_cut cut,
                     share of)
{
    tear_down(NULL);
    w = (world){.snapshots = true, .deltas = KEPT, .lease_ms = 100};
    world_start(&w, size, cut, tensors, n);
    step = 1;
    world_commit(&w, step);
    client = new_client(FANIN_PATH_STREAM);
    make_destination(of);
    options = make_options(FANIN_STEP_NEWEST, 0);
    options.deltas = options.verify = true;
    error = (fanin_error)FANIN_ERROR_INIT;
}

static void commit(void)
{
    world_commit(&w, ++step);
}

static fanin_status pull_by(fanin_client *by)
{
    fanin_result *result = NULL;
    for (size_t i = 0; i < PARTS; i++)
        memcpy(l.parts[i].before, l.parts[i].memory, l.parts[i].size);
    fanin_status status = fanin_client_pull_into(by, &options, into, &result, &error);
    info = (fanin_result_info){.struct_size = sizeof info};
    if (status == FANIN_OK)
        fanin_result_get(result, &info);
    /* The sentence is static; the rest goes. */
    fanin_result_free(&result);
    return status;
}

static void expect(uint64_t base, const char *because)
{
    assert_ok(pull_by(client), error);
    check_step();
    assert_int_equal(info.step, step);
    assert_int_equal(info.verified, options.verify);
    if (because)
        assert_says(info.whole_because ? info.whole_because : "it was a delta",
                    because);
    else if (info.whole_because)
        fail_msg("step %llu: whole: %s", (unsigned long long)step, info.whole_because);
    assert_int_equal(info.base_step, base);
}

static void expect_whole(const char *because)
{
    expect(0, because);
}

static void expect_delta(uint64_t base)
{
    expect(base, NULL);
    assert_in_range(info.patch_bytes, 1, info.bytes / 2);
}

/* The destination holds the step before, and a patch leads from there. */
static void begin_deltas(size_t size, world_cut cut, share of)
{
    begin_of(model, TENSORS, size, cut, of);
    expect_whole("not known");
    commit();
}

/* -------------------------------------------------------------------- every cut */

CASE(test_every_cut_and_share)
{
    static const struct {
        world_cut cut;
        size_t size;
    } cases[] = {{CUT_CHUNK0, 1},  {CUT_CHUNK0, 3},    {CUT_CHUNK1, 4}, {CUT_GRID, 4},
                 {CUT_STRIDED, 3}, {CUT_REPLICATE, 2}, {CUT_HSDP, 4}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (share of = WHOLE; of < SHARES; of++) {
            begin_deltas(cases[i].size, cases[i].cut, of);
            expect_delta(step - 1);
            options.verify = false;
            commit();
            expect_delta(step - 1);
            commit();
            commit();
            commit();
            options.verify = true;
            expect_delta(step - 3);
            for (int k = 0; k <= KEPT; k++)
                commit();
            expect_whole("no patches from");
            commit();
            expect_delta(step - 1);
        }
    }
}

CASE(test_by_threads)
{
    begin_of(large, 1, 1, CUT_CHUNK0, WHOLE);
    expect_whole("not known");
    for (int i = 0; i < 3; i++)
        commit();
    expect_delta(1);
    assert_true(info.patch_bytes > 1 << 18);
}

/* -------------------------------------------------------------- what is a base */

/* A job that was started again has the same steps, with other bytes. */
CASE(test_another_life_of_the_same_steps)
{
    begin_deltas(1, CUT_CHUNK0, WHOLE);
    expect_delta(1);
    world_stop_rank(&w, 0);
    w.salt = 77;
    world_restart_rank(&w, 0);
    for (uint64_t i = 1; i <= step; i++)
        world_commit(&w, i);
    expect_whole("started again");
    commit();
    expect_delta(step - 1);
}

CASE(test_replicas)
{
    begin_deltas(2, CUT_REPLICATE, WHOLE);
    expect_delta(1);
    commit();
    world_stop_rank(&w, 0);
    expect_whole("another plan");
    world_restart_rank(&w, 0);
    commit();
    expect_whole("");
    commit();
    expect_delta(step - 1);
}

static void *commit_late(void *unused)
{
    (void)unused;
    usleep(200000);
    world_commit_rank(&w, 1, step);
    return NULL;
}

/* The other one alone would do, and would have to bring the whole. */
CASE(test_a_replica_that_lags)
{
    pthread_t late;
    begin_deltas(2, CUT_REPLICATE, WHOLE);
    expect_delta(1);
    world_commit_rank(&w, 0, ++step);
    assert_int_equal(pthread_create(&late, NULL, commit_late, NULL), 0);
    expect_delta(step - 1);
    pthread_join(late, NULL);
}

CASE(test_two_clients)
{
    begin_deltas(3, CUT_CHUNK0, PERMUTED);
    fanin_client *mine = client, *other = new_client(FANIN_PATH_STREAM);
    for (int i = 0; i < 4; i++) {
        client = i % 2 ? mine : other;
        expect_delta(step - 1); /* ranks and plan are the same */
        commit();
    }
    client = mine;
    fanin_client_destroy(&other);
    expect_delta(step - 1);
}

/* Ranks know of no reader any more. */
static void leave(void)
{
    fanin_client_destroy(&client);
    for (size_t i = 0; i < w.size; i++) {
        fanin_server_stats stats = {.struct_size = sizeof stats, .sessions = 1};
        while (stats.sessions > 0)
            assert_works(fanin_server_get_stats(w.ranks[i].server, &stats));
    }
}

/* A program that is started for each step. */
CASE(test_a_client_that_comes_back)
{
    begin_deltas(2, CUT_CHUNK0, WHOLE);
    expect_delta(1);
    for (uint64_t missed = 1; missed <= KEPT + 1; missed++) {
        leave();
        for (uint64_t i = 0; i < missed; i++)
            commit();
        client = new_client(FANIN_PATH_STREAM);
        if (missed <= KEPT)
            expect_delta(step - missed);
    }
    expect_whole("no patches from");
}

/* The copy stays what it is while the trainer's memory is away. */
CASE(test_pause_and_aborted_updates)
{
    begin_deltas(1, CUT_CHUNK0, WHOLE);
    fanin_server *server = w.ranks[0].server;
    assert_works(fanin_server_pause(server, "lora:0", NULL, ERROR));
    assert_works(fanin_server_resume(server, "lora:0", ERROR));
    assert_works(fanin_server_begin_update(server, "lora:0", ERROR));
    world_write(&w, 0, step + 9);
    assert_works(fanin_server_abort_update(server, "lora:0", ERROR));
    commit();
    expect_delta(1);
}

/* ------------------------------------------------------------- what has no patches */

CASE(test_what_is_read_whole)
{
    begin_deltas(1, CUT_CHUNK0, WHOLE);
    options.dtype = FANIN_DTYPE_BF16; /* in memory of F32 it stays F32 */
    expect_whole("another dtype");
    options.dtype = 0;
    commit();
    expect_delta(2); /* nothing was converted: it held step 2 */
    tear_down(NULL);
    world_start(&w, 1, CUT_CHUNK0, model, TENSORS);
    world_commit(&w, step = 1); /* by reference */
    client = new_client(FANIN_PATH_STREAM);
    make_destination(WHOLE);
    expect_whole("keeps no patches");
    if (!world_has_cma())
        return;
    fanin_client_destroy(&client);
    client = new_client(FANIN_PATH_CMA);
    for (int i = 0; i < 2; i++) {
        expect_whole("a path that reads no patches");
        commit();
    }
    expect_whole("a path that reads no patches");
}

/* ------------------------------------------------------------------------ unequal */

/* Whoever breaks the promise that nobody else writes there. */
CASE(test_a_destination_that_was_written)
{
    begin_deltas(2, CUT_CHUNK0, COLUMNS);
    log_listen("delta-unequal");
    expect_delta(1);
    log_expect(0, "");
    commit();
    memset(l.boxes[2].address, 0x5a, 8);
    expect_whole("not what the ranks held");
    log_expect(1, "c.norm");
    assert_int_equal(info.restarts, 1);
    commit();
    expect_delta(step - 1);
}

/* ---------------------------------------------------------- what a failure leaves */

/* In the proxy's thread, which must not fail the test. */
static atomic_bool written_early;

static void look(void *cookie)
{
    (void)cookie;
    for (size_t i = 0; i < PARTS; i++)
        if (memcmp(l.parts[i].memory, l.parts[i].before, l.parts[i].size) != 0)
            written_early = true;
}

/* The client knows rank 0 by a proxy, which strikes before the first such request. */
static void strike(message_type when, void (*trigger)(void *), size_t size)
{
    const char *addresses[WORLD_MAX_RANKS];
    begin_deltas(size, CUT_CHUNK0, WHOLE);
    fanin_client_destroy(&client);
    rank_proxy_start(&proxy, (uint16_t)atoi(strrchr(w.addresses[0], ':') + 1), when,
                     trigger, NULL);
    has_proxy = true;
    proxy.triggered = true; /* not yet */
    memcpy(addresses, w.address_list, sizeof addresses);
    addresses[0] = proxy.address;
    client = connect_client(NULL, addresses, w.size);
    expect_delta(1);
    commit();
    written_early = false;
    proxy.triggered = false;
}

/* Twice, so that the copy that is read goes. */
static void update(void *cookie)
{
    look(cookie);
    commit();
    commit();
}

static void stop_rank_0(void *cookie)
{
    look(cookie);
    world_stop_rank(&w, 0);
}

CASE(test_updates_while_patches_are_read)
{
    strike(MSG_READ, update, 2);
    expect_delta(2);
    assert_true(info.restarts > 0);
    assert_false(written_early);
    strike(MSG_DIGEST, update, 2);
    expect_delta(2);
    assert_true(info.restarts > 0);
    strike(MSG_END, update, 2);
    expect_delta(2);
    assert_true(info.restarts > 0);
    assert_false(written_early);
}

CASE(test_nothing_is_written_before_the_end)
{
    strike(MSG_END, look, 2);
    expect_delta(2);
    assert_true(proxy.triggered);
    assert_false(written_early);
}

CASE(test_ranks_that_die)
{
    static const message_type when[] = {MSG_READ, MSG_DIGEST, MSG_END};
    for (size_t i = 0; i < sizeof when / sizeof *when; i++) {
        strike(when[i], stop_rank_0, 2);
        options.timeout_ms = 1500;
        assert_int_not_equal(pull_by(client), FANIN_OK);
        look(NULL);
        assert_false(written_early);
        world_restart_rank(&w, 0);
        options.timeout_ms = 20000;
        commit();
        expect_whole("started again");
        commit();
        expect_delta(step - 1);
    }
}

/* ------------------------------------------------------------------------ devices */

#ifdef ON_DEVICE
static fake_cuda_counts counts(void)
{
    fake_cuda_counts now;
    fake_cuda_count(&now);
    return now;
}

/* One launch a patch and device; pinned room and tables stay, and go with the client. */
CASE(test_launches_and_memory)
{
    begin_deltas(1, CUT_CHUNK0, WHOLE);
    options.verify = false;
    expect_delta(1);
    fake_cuda_counts before = counts();
    for (int i = 0; i < 3; i++)
        commit();
    expect_delta(step - 3);
    assert_int_equal(counts().kernels - before.kernels, 2 * 3);
    before = counts();
    commit();
    expect_delta(step - 1);
    assert_int_equal(counts().pinned, before.pinned);
    assert_int_equal(counts().allocations, before.allocations);
    fanin_client_destroy(&client);
    assert_int_equal(counts().pinned, 0);
    assert_int_equal(counts().streams, 0);
}

CASE(test_what_a_device_cannot_do)
{
    begin_deltas(1, CUT_CHUNK0, WHOLE);
    fake_cuda_fail("cuMemHostAlloc", 2, 0, 1);
    expect_whole("no pinned memory");
    commit();
    expect_delta(step - 1);
    /* A device that fails ends the pull: what is there is not known. */
    commit();
    options.verify = false;
    fake_cuda_fail("cuLaunchKernel", 719, 0, 1);
    expect_whole("not known");
    commit();
    expect_delta(step - 1);
}

/* Nothing is written while the caller's stream is busy, and the pull's time holds. */
CASE(test_a_busy_stream)
{
    CUcontext context;
    CUstream stream;
    begin_deltas(1, CUT_CHUNK0, WHOLE);
    assert_int_equal(cuDevicePrimaryCtxRetain(&context, 1), CUDA_SUCCESS);
    assert_int_equal(cuCtxPushCurrent(context), CUDA_SUCCESS);
    assert_int_equal(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    options.stream = (fanin_stream){.handle = stream, .device = 1};
    fake_cuda_hold_stream(stream);
    uint32_t time = options.timeout_ms;
    options.timeout_ms = 1000;
    assert_int_equal(pull_by(client), FANIN_ERR_TIMEOUT);
    assert_says(error.message, "caller's stream of device 1");
    for (size_t i = 0; i < PARTS; i++)
        assert_memory_equal(l.parts[i].memory, l.parts[i].before, l.parts[i].size);
    fake_cuda_release(1);
    options.timeout_ms = time;
    expect_delta(step - 1);
    assert_int_equal(cuStreamDestroy(stream), CUDA_SUCCESS);
    assert_int_equal(cuCtxPopCurrent(NULL), CUDA_SUCCESS);
}

static int set_up(void **state)
{
    (void)state;
    gpu *g;
    return gpu_load(&(logger){0}, &g, NULL) == FANIN_OK ? 0 : -1;
}

TESTS_BETWEEN(set_up, NULL)
#endif
