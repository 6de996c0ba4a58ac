/* SPDX-License-Identifier: Apache-2.0 */
/* Commits on a CUDA stream, by reference and as snapshots of device memory. The driver is a
   stand-in whose streams can be held. Built with FANIN_TEST_HOOKS. */
#include "call.h"
#include "core/rules.h"
#include "gpu.h"
#include "log_catcher.h"
#include "server_device.h"
#include "testing.h"

#include <cuda.h>

#define SIZE ((size_t)300000)
#define PATIENCE_MS 20000

static gpu *driver;
static fanin_stream stream; /* on device 0 */

/* ------------------------------------------------------------------ server */

static uint8_t *alloc(int device, fanin_server *s, const char *name)
{
    uint8_t *memory = device_alloc(device, SIZE, FAKE_CUDA_MALLOC);
    memset(fake_cuda_alias(memory), 1, SIZE);
    server_put(s, RUN, name, memory, SIZE);
    return memory;
}

static fanin_status commit(fanin_server *s, uint64_t step, uint32_t flags,
                           fanin_error *error)
{
    fanin_commit_options o;
    fanin_commit_options_init(&o, sizeof o);
    o.flags = flags;
    o.stream = stream;
    return fanin_server_commit(s, RUN, step, &o, error);
}

static void commit_ok(fanin_server *s, uint64_t step, uint32_t flags)
{
    assert_works(commit(s, step, flags, ERROR));
}

/* For call_start(). */
typedef struct order {
    fanin_server *server;
    uint64_t step;
    uint32_t flags;
} order;

static fanin_status commit_run(void *cookie)
{
    order *o = cookie;
    return commit(o->server, o->step, o->flags, NULL);
}

static fanin_status remove_run(void *server)
{
    return fanin_server_remove(server, RUN, NULL, NULL);
}

static fanin_status pause_run(void *server)
{
    return fanin_server_pause(server, RUN, NULL, NULL);
}

static fanin_status stop_run(void *server)
{
    server_stop(&(fanin_server *){server}, 0);
    return FANIN_OK;
}

static void start_and_stay_away(call *c, fanin_status (*run)(void *), void *cookie)
{
    call_start(c, run, cookie);
    assert_false(call_returns(c, 100));
}

static uint64_t begin(puller *r)
{
    puller_begin(r);
    return r->grant.step;
}

/* The step is there, and the first box holds @p value. */
static void expect_published(puller *r, uint64_t step, uint8_t value)
{
    assert_int_equal(begin(r), step);
    puller_expect(r, 0, value, SIZE);
    puller_end(r);
}

static void hold(void)
{
    fake_cuda_hold_stream(stream.handle);
}

static void release(void)
{
    fake_cuda_release(0);
    assert_true(fake_cuda_wait_idle(0));
}

/* ------------------------------------------------------------- by reference */

DEVICE_TEST(effect_comes_with_the_stream)
{
    fanin_server *s = server_start_lease(0);
    alloc(0, s, "a");
    puller r = puller_open(s);
    hold();
    commit_ok(s, 1, 0);
    assert_int_equal(peer_state(&r.control), WIRE_STATE_UNPUBLISHED);
    assert_int_equal(server_stats(s).commits, 0);
    peer_request_wait(&r.control, RUN, WIRE_RULE_NEWEST, 0, PATIENCE_MS);
    assert_true(peer_silent(&r.control, 50));
    release();
    msg_wait_ok ok; /* the parked one is woken */
    body in = peer_expect(&r.control, MSG_WAIT_OK);
    assert_int_equal(decode_wait_ok(&in, &ok), FANIN_OK);
    assert_int_equal(ok.step, 1);
    expect_published(&r, 1, 1);
    server_begin(s);
    commit_ok(s, 2, FANIN_COMMIT_WAIT); /* has taken effect on return */
    assert_int_equal(peer_entry(&r.control).step, 2);
    assert_int_equal(server_stats(s).commits, 2);
    assert_int_equal(server_stats(s).commits_withdrawn, 0);
}

DEVICE_TEST(begin_update_withdraws)
{
    fanin_server *s = server_start_lease(0);
    alloc(0, s, "a");
    puller r = puller_open(s);
    log_listen("commit-withdrawn");
    call c;
    hold();
    call_start(&c, commit_run, &(order){s, 41, FANIN_COMMIT_WAIT});
    assert_true(fake_cuda_wait_queued(0, 1));
    assert_false(call_returns(&c, 100));
    server_begin(s);
    assert_int_equal(call_end(&c), FANIN_ERR_STATE);
    log_expect(1, "step 41");
    release();
    assert_int_equal(peer_state(&r.control), WIRE_STATE_WRITING);
    assert_int_equal(peer_entry(&r.control).step, 0);
    assert_int_equal(server_stats(s).commits_withdrawn, 1);
    commit_ok(s, 41, FANIN_COMMIT_WAIT); /* it was never published */
    assert_int_equal(begin(&r), 41);
    assert_int_equal(server_stats(s).commits, 1);
}

/* After the stream got there a begin_update withdraws nothing, however soon it comes. */
DEVICE_TEST(what_was_reached_is_published)
{
    fanin_server *s = server_start_lease(0);
    alloc(0, s, "a");
    for (uint64_t step = 1; step < 50; step++) {
        commit_ok(s, step, 0);
        assert_true(fake_cuda_wait_idle(0));
        server_begin(s);
        assert_int_equal(server_stats(s).commits, step);
    }
    assert_int_equal(server_stats(s).commits_withdrawn, 0);
}

static void abort_it(fanin_server *s)
{
    assert_int_equal(fanin_server_abort_update(s, RUN, NULL), FANIN_OK);
}

static void remove_it(fanin_server *s)
{
    assert_int_equal(fanin_server_remove(s, RUN, NULL, NULL), FANIN_OK);
}

static void remove_shard(fanin_server *s)
{
    assert_int_equal(fanin_server_remove(s, RUN, "a", NULL), FANIN_OK);
}

static void replace_shard(fanin_server *s)
{
    static uint8_t elsewhere[100];
    server_put(s, RUN, "a", elsewhere, sizeof elsewhere);
}

DEVICE_TEST(other_changes_withdraw)
{
    void (*const changes[])(fanin_server *) = {abort_it, remove_it, remove_shard,
                                               replace_shard};
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        fanin_server *s = server_start_lease(0);
        uint8_t *memory = alloc(0, s, "a");
        log_listen("commit-withdrawn");
        hold();
        commit_ok(s, 1, 0);
        changes[i](s);
        log_expect(1, "step 1");
        release();
        assert_int_equal(server_stats(s).commits, 0);
        assert_int_equal(server_stats(s).commits_withdrawn, 1);
        server_put(s, RUN, "b", memory, SIZE);
        commit_ok(s, 1, FANIN_COMMIT_WAIT);
        puller r = puller_open(s);
        puller_begin(&r);
        puller_expect(&r, i == 0 || i == 3 ? 1 : 0, 1, SIZE);
        device_tear_down(state);
    }
}

DEVICE_TEST(streams_may_outlive_the_server)
{
    fanin_server *s = server_start_lease(0);
    alloc(0, s, "a");
    log_listen("commit-withdrawn");
    hold();
    commit_ok(s, 1, 0);
    server_begin(s);
    commit_ok(s, 2, 0);
    server_stop(&s, 0);
    log_expect(2, "step 2");
    release();
}

DEVICE_TEST(a_commit_waits_for_the_one_before)
{
    fanin_server *s = server_start_lease(0);
    alloc(0, s, "a");
    call c;
    hold();
    commit_ok(s, 1, 0);
    start_and_stay_away(&c, commit_run, &(order){s, 2, 0});
    release();
    assert_int_equal(call_end(&c), FANIN_ERR_STATE); /* step 1 is there: no update */
    assert_int_equal(server_stats(s).commits, 1);
}

/* With the late effect's rule the step that was begun anew is not published. */
static bool late_effect_is_withdrawn(void)
{
    fanin_server *s = server_start_lease(0);
    alloc(0, s, "a");
    puller r = puller_open(s);
    hold();
    commit_ok(s, 1, 0);
    server_begin(s);
    release();
    (void)server_stats(s);
    peer_ping(&r.control); /* the control thread has been woken before */
    return peer_state(&r.control) == WIRE_STATE_WRITING;
}

DEVICE_TEST(late_effects_mind_the_epoch)
{
    assert_true(late_effect_is_withdrawn());
    atomic_store(&server_rules_off, RULE_LATE_EFFECT);
    bool without = late_effect_is_withdrawn();
    atomic_store(&server_rules_off, 0);
    assert_false(without);
}

DEVICE_TEST(streams_are_checked)
{
    fanin_server *s = server_start_lease(0);
    alloc(0, s, "a");
    fanin_commit_options o;
    fanin_error error = FANIN_ERROR_INIT;
    fanin_commit_options_init(&o, sizeof o);
    o.stream = stream;
    const int32_t devices[] = {-1, 2, 64};
    for (size_t i = 0; i < 3; i++) {
        o.stream.device = devices[i];
        assert_int_equal(fanin_server_commit(s, RUN, 1, &o, &error),
                         FANIN_ERR_ARGUMENT);
    }
    assert_non_null(strstr(error.message, "64"));
    fake_cuda_fail("cuStreamAddCallback", CUDA_ERROR_UNKNOWN, 0, 1);
    assert_int_equal(commit(s, 1, 0, NULL), FANIN_ERR_TRANSPORT);
    fake_cuda_fail("cuStreamAddCallback", CUDA_SUCCESS, 0, 0);
    commit_ok(s, 1, FANIN_COMMIT_WAIT);
}

/* ---------------------------------------------------------------- snapshots */

/* What the trainer's next kernel does: queued on its stream. */
static void write_later(uint8_t *memory, uint8_t value)
{
    assert_int_equal(gpu_context_enter(driver, 0, NULL), FANIN_OK);
    assert_int_equal(cuMemsetD8Async((CUdeviceptr)(uintptr_t)memory, value, SIZE,
                                     (CUstream)stream.handle),
                     CUDA_SUCCESS);
    gpu_context_leave(driver);
}

DEVICE_TEST(copies_are_made_in_the_streams_order)
{
    fanin_server *s = server_start_lease(0);
    uint8_t *a = alloc(0, s, "a"), *b = alloc(1, s, "b");
    puller r = puller_open(s);
    hold();
    write_later(a, 11);
    write_later(b, 12);
    commit_ok(s, 1, FANIN_COMMIT_SNAPSHOT);
    write_later(a, 91); /* behind the copy */
    write_later(b, 92);
    assert_int_equal(peer_state(&r.control), WIRE_STATE_UNPUBLISHED);
    release();
    assert_int_equal(begin(&r), 1);
    puller_expect(&r, 0, 11, SIZE);
    puller_expect(&r, 1, 12, SIZE);
    assert_int_equal(((uint8_t *)fake_cuda_alias(a))[SIZE - 1], 91);
    puller_end(&r);
}

/* The trainer runs ahead of its stream: steps are published one after the other. */
DEVICE_TEST(the_trainer_runs_ahead)
{
    fanin_server *s = server_start_lease(0);
    uint8_t *a = alloc(0, s, "a");
    puller r = puller_open(s);
    log_listen("commit-withdrawn");
    commit_ok(s, 1, FANIN_COMMIT_SNAPSHOT | FANIN_COMMIT_WAIT);
    hold();
    server_begin(s);
    write_later(a, 2);
    commit_ok(s, 2, FANIN_COMMIT_SNAPSHOT);
    server_begin(s); /* withdraws no copy */
    write_later(a, 3);
    call c;
    start_and_stay_away(&c, commit_run,
                        &(order){s, 3, FANIN_COMMIT_SNAPSHOT | FANIN_COMMIT_WAIT});
    expect_published(&r, 1, 1); /* readers go on */
    fake_cuda_release(0);
    assert_int_equal(call_end(&c), FANIN_OK);
    expect_published(&r, 3, 3);
    log_expect(0, "");
    assert_int_equal(server_stats(s).commits, 3);
}

/* CUDA frees an arena when nothing is queued on its device any more. */
DEVICE_TEST(readers_go_on_while_arenas_are_freed)
{
    fanin_server *s = server_start_lease(0);
    uint8_t *a = alloc(0, s, "a");
    puller r = puller_open(s);
    commit_ok(s, 1, FANIN_COMMIT_SNAPSHOT | FANIN_COMMIT_WAIT);
    expect_published(&r, 1, 1);
    hold(); /* the trainer's next step, which begins late */
    write_later(a, 2);
    fanin_stream busy = stream;
    stream = (fanin_stream){.device = 0};
    uint64_t freed = fake_cuda_calls("cuMemFree_v2");
    alloc(0, s, "b");
    server_begin(s);
    commit_ok(s, 2, FANIN_COMMIT_SNAPSHOT);
    stream = busy;
    deadline at = deadline_in_ms(PATIENCE_MS);
    while (fake_cuda_calls("cuMemFree_v2") == freed && !deadline_passed(at))
        sched_yield();
    assert_true(fake_cuda_calls("cuMemFree_v2") > freed);
    expect_published(&r, 2, 1);
    release();
}

DEVICE_TEST(without_a_stream_it_is_complete)
{
    static uint8_t host[SIZE];
    fanin_server *s = server_start_lease(0);
    uint8_t *a = alloc(0, s, "a"), *b = alloc(1, s, "b");
    server_put(s, RUN, "c", host, SIZE);
    puller r = puller_open(s);
    for (uint8_t step = 1; step < 5; step++) {
        memset(fake_cuda_alias(a), step, SIZE);
        memset(fake_cuda_alias(b), step + 10, SIZE);
        memset(host, step + 20, SIZE);
        server_begin(s);
        server_snapshot(s, step);
        memset(fake_cuda_alias(a), 99, SIZE);
        memset(fake_cuda_alias(b), 99, SIZE);
        memset(host, 99, SIZE);
        assert_int_equal(begin(&r), step);
        puller_expect(&r, 0, step, SIZE);
        puller_expect(&r, 1, step + 10, SIZE);
        puller_expect(&r, 2, step + 20, SIZE);
        puller_end(&r);
    }
}

/* The stream may write host memory too: it is copied when the stream has got there. */
DEVICE_TEST(host_memory_waits_for_the_stream)
{
    static uint8_t host[SIZE];
    fanin_server *s = server_start_lease(0);
    alloc(0, s, "a");
    server_put(s, RUN, "h", host, SIZE);
    memset(host, 1, SIZE);
    puller r = puller_open(s);
    call c;
    hold();
    call_start(&c, commit_run, &(order){s, 1, FANIN_COMMIT_SNAPSHOT});
    assert_true(fake_cuda_wait_queued(0, 1));
    assert_false(call_returns(&c, 100));
    memset(host, 2, SIZE);
    fake_cuda_release(0);
    assert_int_equal(call_end(&c), FANIN_OK);
    assert_int_equal(begin(&r), 1);
    puller_expect(&r, 1, 2, SIZE);
    puller_end(&r);
}

/* Nothing reads the trainer's memory when remove has returned. */
DEVICE_TEST(removal_waits_for_the_copy)
{
    fanin_server *s = server_start_lease(0);
    uint8_t *a = alloc(0, s, "a");
    log_listen("commit-withdrawn");
    hold();
    commit_ok(s, 7, FANIN_COMMIT_SNAPSHOT);
    call c;
    start_and_stay_away(&c, remove_run, s);
    fake_cuda_release(0);
    assert_int_equal(call_end(&c), FANIN_OK);
    device_free(a);
    log_expect(1, "step 7");
    assert_int_equal(server_stats(s).commits, 0);
}

/* Of a commit, whose step is published before, and of a copy that nobody will see. */
DEVICE_TEST(pauses_wait_for_the_stream)
{
    for (uint32_t flags = 0; flags <= FANIN_COMMIT_SNAPSHOT; flags++) {
        bool copies = flags == FANIN_COMMIT_SNAPSHOT;
        fanin_server *s = server_start_lease(0);
        uint8_t *a = alloc(0, s, "a");
        puller r = puller_open(s);
        commit_ok(s, 1, flags | FANIN_COMMIT_WAIT);
        server_begin(s);
        hold();
        commit_ok(s, 2, flags);
        if (copies)
            abort_it(s);
        call c;
        start_and_stay_away(&c, pause_run, s);
        release();
        assert_int_equal(call_end(&c), FANIN_OK);
        memset(fake_cuda_alias(a), 9, SIZE);
        if (copies)
            expect_published(&r, 1, 1); /* the last snapshot */
        memset(fake_cuda_alias(a), 1, SIZE);
        assert_int_equal(fanin_server_resume(s, RUN, NULL), FANIN_OK);
        expect_published(&r, copies ? 1 : 2, 1);
        device_tear_down(state);
    }
}

DEVICE_TEST(destruction_waits_for_the_copy)
{
    fanin_server *s = server_start_lease(0);
    uint8_t *a = alloc(0, s, "a");
    log_listen("commit-withdrawn");
    hold();
    commit_ok(s, 7, FANIN_COMMIT_SNAPSHOT);
    call c;
    start_and_stay_away(&c, stop_run, s);
    fake_cuda_release(0);
    assert_int_equal(call_end(&c), FANIN_OK);
    device_free(a);
    log_expect(1, "step 7");
    fake_cuda_counts now;
    fake_cuda_count(&now);
    assert_int_equal(now.allocations, 0);
}

DEVICE_TEST(aborted_copies_are_not_published)
{
    fanin_server *s = server_start_lease(0);
    uint8_t *a = alloc(0, s, "a");
    puller r = puller_open(s);
    commit_ok(s, 1, FANIN_COMMIT_SNAPSHOT | FANIN_COMMIT_WAIT);
    server_begin(s);
    hold();
    commit_ok(s, 2, FANIN_COMMIT_SNAPSHOT);
    abort_it(s);
    write_later(a, 3);
    commit_ok(s, 3, FANIN_COMMIT_SNAPSHOT); /* into the same arena, behind it */
    release();
    expect_published(&r, 3, 3);
    assert_int_equal(server_stats(s).commits, 2);
    assert_int_equal(server_stats(s).commits_withdrawn, 1);
}

DEVICE_TEST(arenas_can_be_exported)
{
    fanin_server *s = server_start_lease(0);
    uint8_t *a = device_alloc(0, SIZE, FAKE_CUDA_VIRTUAL);
    server_put(s, RUN, "a", a, SIZE);
    server_snapshot(s, 1);
    puller r = puller_open_unix(s);
    r.grant = peer_newest(&r.control);
    peer_request_path(&r.control, WIRE_PATH_CUDA_IPC);
    peer_expect(&r.control, MSG_OPEN_PATH_OK);
    region_table *regions = peer_regions(&r.control, &r.grant, WIRE_PATH_CUDA_IPC);
    assert_int_equal(regions->count, 2);
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(regions->entries[i].memory, FANIN_MEMORY_CUDA);
        assert_int_equal(regions->entries[i].length, SIZE);
        assert_true(regions->entries[i].rkey_size > 0);
    }
    region_table_free(&regions);
}

DEVICE_TEST(short_memory_leaves_the_last_snapshot)
{
    fanin_server *s = server_start_lease(0);
    fanin_error error = FANIN_ERROR_INIT;
    alloc(0, s, "a");
    puller r = puller_open(s);
    commit_ok(s, 1, FANIN_COMMIT_SNAPSHOT | FANIN_COMMIT_WAIT);
    server_begin(s);
    alloc(0, s, "b");
    for (unsigned after = 0; after < 2; after++) {
        fake_cuda_fail("cuMemAlloc_v2", CUDA_ERROR_OUT_OF_MEMORY, after, 1);
        assert_int_equal(commit(s, 2, FANIN_COMMIT_SNAPSHOT, &error), FANIN_ERR_MEMORY);
        fake_cuda_fail("cuMemAlloc_v2", CUDA_SUCCESS, 0, 0);
        char bytes[32];
        snprintf(bytes, sizeof bytes, "%zu", (SIZE + 511) / 512 * 512 + SIZE);
        assert_non_null(strstr(error.message, bytes));
    }
    expect_published(&r, 1, 1);
    commit_ok(s, 2, FANIN_COMMIT_SNAPSHOT | FANIN_COMMIT_WAIT);
    assert_int_equal(begin(&r), 2);
    puller_expect(&r, 1, 1, SIZE);
    puller_end(&r);
}

DEVICE_TEST(any_failing_call_is_survived)
{
    static const char *const functions[] = {
        "cuMemAlloc_v2",        "cuStreamCreate",      "cuEventCreate",
        "cuEventRecord",        "cuStreamWaitEvent",   "cuLaunchKernel",
        "cuMemcpyHtoDAsync_v2", "cuStreamAddCallback", "cuCtxPushCurrent_v2"};
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        for (unsigned after = 0; after < 4; after++) {
            fanin_server *s = server_start_lease(0);
            alloc(0, s, "a");
            uint8_t *b = alloc(1, s, "b");
            puller r = puller_open(s);
            fake_cuda_fail(functions[i], CUDA_ERROR_OUT_OF_MEMORY, after, 1);
            fanin_status status =
                commit(s, 1, FANIN_COMMIT_SNAPSHOT | FANIN_COMMIT_WAIT, NULL);
            fake_cuda_fail(functions[i], CUDA_SUCCESS, 0, 0);
            server_begin(s);
            if (status != FANIN_OK) /* some copies may have been queued */
                assert_true(fake_cuda_wait_idle(0) && fake_cuda_wait_idle(1));
            memset(fake_cuda_alias(b), 2, SIZE);
            commit_ok(s, 2, FANIN_COMMIT_SNAPSHOT | FANIN_COMMIT_WAIT);
            assert_int_equal(begin(&r), 2);
            puller_expect(&r, 0, 1, SIZE);
            puller_expect(&r, 1, 2, SIZE);
            puller_end(&r);
            device_tear_down(state);
        }
}

DEVICE_TEST(unchanged_shards_cost_little)
{
    fanin_server *s = server_start_lease(0);
    alloc(0, s, "a");
    commit_ok(s, 1, FANIN_COMMIT_SNAPSHOT | FANIN_COMMIT_WAIT);
    fake_cuda_counts before, after;
    fake_cuda_count(&before);
    for (uint64_t step = 2; step < 12; step++) {
        server_begin(s);
        commit_ok(s, step, FANIN_COMMIT_SNAPSHOT | FANIN_COMMIT_WAIT);
    }
    fake_cuda_count(&after);
    assert_int_equal(after.kernels - before.kernels, 10);
    assert_int_equal(after.copies, before.copies);
    assert_int_equal(after.allocations, before.allocations);
}

/* Last: what was on a broken device cannot be given back. */
DEVICE_TEST(failed_devices_are_told)
{
    fanin_server *s = server_start_lease(0);
    alloc(0, s, "a");
    log_listen("commit-failed");
    call c;
    hold();
    call_start(&c, commit_run, &(order){s, 5, FANIN_COMMIT_WAIT});
    assert_true(fake_cuda_wait_queued(0, 1));
    fake_cuda_break(0);
    fake_cuda_release(0);
    assert_int_equal(call_end(&c), FANIN_ERR_TRANSPORT);
    log_expect(1, "step 5");
    assert_int_equal(server_stats(s).commits, 0);
    fake_cuda_repair(0);
}

static int set_up(void **state)
{
    assert_works(gpu_load(&(logger){0}, &driver, ERROR));
    assert_int_equal(gpu_context_enter(driver, 0, NULL), FANIN_OK);
    CUstream made;
    assert_int_equal(cuStreamCreate(&made, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
    gpu_context_leave(driver);
    stream.handle = made;
    return 0;
}

TESTS_BETWEEN(set_up, NULL)
