/* SPDX-License-Identifier: Apache-2.0 */
/* Pulls of several reads: every path and cut, what ends them, and what they leave behind. */
#include "testing.h"
#include "call.h"
#include "ends.h"
#include "local_world.h"
#include "pull/pull_session.h"

/* What a test has, and what was said last. */
static world w;
static fanin_client *client;
static fanin_session *session;
static fanin_error error = FANIN_ERROR_INIT;

/* A destination for the whole world: each tensor with a byte behind it that nobody may write. */
static struct {
    fanin_tensor *tensors;
    fanin_box *boxes;
    uint8_t **starts; /* of their memory; boxes may begin elsewhere in it */
} land;

static void make_land(void)
{
    land.tensors = calloc(w.n_tensors, sizeof *land.tensors);
    land.boxes = calloc(w.n_tensors, sizeof *land.boxes);
    land.starts = calloc(w.n_tensors, sizeof *land.starts);
    for (size_t i = 0; i < w.n_tensors; i++) {
        const world_tensor *t = &w.tensors[i];
        memcpy(land.boxes[i].extent, t->shape, sizeof land.boxes[i].extent);
        land.boxes[i].address = land.starts[i] = malloc(world_bytes(t) + 1);
        land.tensors[i] = world_boxes(t, &land.boxes[i], 1);
    }
}

static void clear_land(void)
{
    for (size_t i = 0; i < w.n_tensors; i++)
        memset(land.starts[i], 0xcc, world_bytes(&w.tensors[i]) + 1);
}

static void free_land(void)
{
    for (size_t i = 0; land.boxes && i < w.n_tensors; i++)
        free(land.starts[i]);
    free(land.starts);
    free(land.boxes);
    free(land.tensors);
    land.boxes = NULL;
    land.starts = NULL;
    land.tensors = NULL;
}

static int tear_down(void **state)
{
    fanin_session_abandon(&session);
    fanin_client_destroy(&client);
    free_land();
    world_stop(&w);
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, tear_down)

static void begin_world(size_t size, world_cut cut, fanin_path path)
{
    tear_down(NULL);
    world_begin(&w, size, cut, 1);
    client = world_client(&w, path);
    make_land();
}

static fanin_status open_with(const fanin_pull_options *options)
{
    clear_land();
    return fanin_client_begin(client, options, land.tensors, w.n_tensors, &session,
                              &error);
}

static void open_session(void)
{
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    assert_ok(open_with(&options), error);
}

static fanin_status read_from(size_t first, size_t count)
{
    return fanin_session_read(session, first, count, &error);
}

/* That the tensors are of the session's step, and nothing behind them was written. */
static void check_land(size_t first, size_t count, uint64_t step)
{
    for (size_t i = first; i < first + count; i++) {
        const uint8_t *bytes = land.boxes[i].address;
        world_check(&w, i, step, bytes);
        assert_int_equal(bytes[world_bytes(&w.tensors[i])], 0xcc);
    }
}

/* That nothing of the tensors was written. */
static void check_untouched(size_t first, size_t count)
{
    for (size_t i = first; i < first + count; i++) {
        const uint8_t *bytes = land.boxes[i].address;
        for (uint64_t j = 0; j <= world_bytes(&w.tensors[i]); j++)
            assert_int_equal(bytes[j], 0xcc);
    }
}

static uint64_t bytes_of(size_t first, size_t count)
{
    uint64_t sum = 0;
    for (size_t i = first; i < first + count; i++)
        sum += world_bytes(&w.tensors[i]);
    return sum;
}

static void end_well(fanin_result_info *info)
{
    fanin_result *result = NULL;
    assert_ok(fanin_session_end(&session, &result, &error), error);
    assert_null(session);
    *info = (fanin_result_info){.struct_size = sizeof *info};
    fanin_result_get(result, info);
    fanin_result_free(&result);
    info->path_reason = info->ranks_json = NULL;
}

/* The last ones first, one by one and in a run; what was not asked for stays as it was. */
static void read_all(uint64_t step)
{
    size_t n = w.n_tensors, half = n / 2;
    assert_ok(read_from(half, n - half), error);
    check_land(half, n - half, step);
    check_untouched(0, half);
    for (size_t i = half; i-- > 0;) {
        assert_ok(read_from(i, 1), error);
        check_untouched(0, i);
    }
    check_land(0, n, step);
}

static fanin_status read_runs(const group_run *runs, size_t n)
{
    return pull_session_read(session, runs, n, &error);
}

/* With gaps, of which the last read fills one up to the last tensor; and nothing. */
static void read_lists(uint64_t step)
{
    size_t n = w.n_tensors;
    const group_run ends[] = {{0, 1}, {1, 0}, {n - 1, 1}}, middle = {2, n - 3};
    clear_land();
    assert_ok(read_runs(NULL, 0), error);
    assert_ok(read_runs(&(group_run){n, 0}, 1), error);
    check_untouched(0, n);
    assert_ok(read_runs(ends, 3), error);
    check_land(0, 1, step);
    check_untouched(1, n - 2);
    check_land(n - 1, 1, step);
    assert_ok(read_runs(&middle, 1), error);
    check_untouched(1, 1);
    assert_ok(read_runs(&(group_run){1, 1}, 1), error);
    check_land(0, n, step);
}

static void expect_session(uint64_t step, fanin_path path)
{
    fanin_result_info info;
    open_session();
    assert_int_equal(fanin_session_step(session), step);
    read_all(step);
    read_lists(step);
    end_well(&info);
    assert_int_equal(info.step, step);
    assert_int_equal(info.path, path);
    assert_int_equal(info.bytes, 2 * bytes_of(0, w.n_tensors));
    assert_int_equal(info.restarts, 0);
}

/* ------------------------------------------------------------------- good ends */

static void every_cut(fanin_path path)
{
    static const struct {
        world_cut cut;
        size_t size;
    } cases[] = {{CUT_CHUNK0, 1},  {CUT_CHUNK0, 3},    {CUT_CHUNK1, 4}, {CUT_GRID, 4},
                 {CUT_STRIDED, 3}, {CUT_REPLICATE, 3}, {CUT_HSDP, 4}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        begin_world(cases[i].size, cases[i].cut, path);
        expect_session(1, path);
        world_commit(&w, 5);
        expect_session(5, path);
        assert_ok(world_pull(&w, client, NULL, NULL, &error), error);
        world_commit(&w, 6);
        expect_session(6, path);
    }
}

CASE(test_stream)
{
    every_cut(FANIN_PATH_STREAM);
}

CASE(test_cma)
{
    if (!world_has_cma())
        skip();
    every_cut(FANIN_PATH_CMA);
}

/* The trainer publishes its next copy, and that is no matter: the arena that is read stays. */
CASE(test_snapshot_committed_meanwhile)
{
    fanin_result_info info;
    w.snapshots = true;
    world_begin(&w, 2, CUT_CHUNK0, 1);
    client = world_client(&w, FANIN_PATH_STREAM);
    make_land();
    open_session();
    assert_ok(read_from(0, 2), error);
    world_commit(&w, 2);
    assert_ok(read_from(2, w.n_tensors - 2), error);
    check_land(0, w.n_tensors, 1);
    end_well(&info);
    assert_int_equal(info.step, 1);
}

/* ... until the arena is needed again: the commit after the next waits for the lease time, no
   longer. */
CASE(test_snapshot_overtaken)
{
    w.snapshots = true;
    w.lease_ms = 1;
    world_begin(&w, 2, CUT_CHUNK0, 1);
    client = world_client(&w, FANIN_PATH_STREAM);
    make_land();
    open_session();
    read_all(1);
    world_commit(&w, 2);
    world_commit(&w, 3);
    assert_int_equal(fanin_session_end(&session, NULL, &error), FANIN_ERR_STALE);
    expect_session(3, FANIN_PATH_STREAM);
}

CASE(test_read_again)
{
    fanin_result_info info;
    begin_world(2, CUT_CHUNK0, FANIN_PATH_STREAM);
    open_session();
    assert_ok(read_from(0, 3), error);
    for (size_t i = 0; i < 3; i++)
        memset(land.boxes[i].address, 0xcc, world_bytes(&w.tensors[i]));
    assert_ok(read_from(1, 2), error);
    check_untouched(0, 1);
    check_land(1, 2, 1);
    end_well(&info);
    assert_int_equal(info.bytes, bytes_of(0, 3) + bytes_of(1, 2));
}

CASE(test_nothing_read)
{
    fanin_result_info info;
    begin_world(2, CUT_CHUNK0, FANIN_PATH_STREAM);
    open_session();
    assert_ok(read_from(w.n_tensors, 0), error);
    assert_ok(read_from(0, 0), error);
    end_well(&info);
    assert_int_equal(info.bytes, 0);
    check_untouched(0, w.n_tensors);
    open_session();
    assert_ok(fanin_session_end(&session, NULL, &error), error);
}

/* Cuts of all kinds, so that kept parts are dropped and made again. */
CASE(test_other_cuts)
{
    fanin_result_info info;
    begin_world(3, CUT_STRIDED, FANIN_PATH_STREAM);
    for (int round = 0; round < 2; round++) {
        open_session();
        for (size_t width = 1; width <= w.n_tensors; width++) {
            for (size_t i = 0; i + width <= w.n_tensors; i++) {
                assert_ok(read_from(i, width), error);
                check_land(i, width, 1);
            }
        }
        end_well(&info);
    }
}

/* Rows upside down, as BF16 where they are F32: what a pull of one call makes of the same boxes. */
static void read_odd(fanin_path path, fanin_dtype dtype)
{
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    fanin_result_info info;
    uint8_t **whole = calloc(world_lora_count, sizeof *whole);
    options.dtype = dtype;
    options.verify = true;
    begin_world(3, CUT_STRIDED, path);
    for (size_t i = 0; i < w.n_tensors; i++) {
        const world_tensor *t = &w.tensors[i];
        bool halves = dtype && t->dtype == FANIN_DTYPE_F32;
        int64_t bytes = (int64_t)(halves ? world_bytes(t) / 2 : world_bytes(t));
        int64_t unit = fanin_dtype_bits(halves ? dtype : t->dtype) / 8;
        land.tensors[i].dtype = halves ? dtype : t->dtype;
        if (t->n_dims != 2 || bytes == 0)
            continue;
        land.boxes[i].stride[1] = unit;
        land.boxes[i].stride[0] = -bytes / (int64_t)t->shape[0];
        land.boxes[i].address =
            (uint8_t *)land.boxes[i].address + bytes + land.boxes[i].stride[0];
    }
    clear_land();
    assert_ok(
        fanin_client_pull(client, &options, land.tensors, w.n_tensors, NULL, &error),
        error);
    for (size_t i = 0; i < w.n_tensors; i++) {
        whole[i] = malloc(world_bytes(&w.tensors[i]) + 1);
        memcpy(whole[i], land.starts[i], world_bytes(&w.tensors[i]) + 1);
    }
    assert_ok(open_with(&options), error);
    for (size_t i = 0; i < w.n_tensors; i += 2)
        assert_ok(read_from(i, w.n_tensors - i < 2 ? 1 : 2), error);
    end_well(&info);
    assert_true(info.verified);
    for (size_t i = 0; i < w.n_tensors; i++) {
        assert_memory_equal(land.starts[i], whole[i], world_bytes(&w.tensors[i]) + 1);
        free(whole[i]);
    }
    free(whole);
}

CASE(test_odd_boxes)
{
    static const fanin_dtype dtypes[] = {0, FANIN_DTYPE_BF16};
    for (size_t i = 0; i < 2; i++) {
        read_odd(FANIN_PATH_STREAM, dtypes[i]);
        if (world_has_cma())
            read_odd(FANIN_PATH_CMA, dtypes[i]);
    }
}

typedef struct told {
    uint64_t done, total;
    unsigned calls;
} told;

static void on_progress(void *cookie, uint64_t done, uint64_t total)
{
    told *t = cookie;
    assert_true(done >= t->done && done <= total);
    *t = (told){done, total, t->calls + 1};
}

CASE(test_progress)
{
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    told t = {0};
    fanin_result_info info;
    options.progress = on_progress;
    options.progress_cookie = &t;
    begin_world(2, CUT_CHUNK0, FANIN_PATH_STREAM);
    assert_ok(open_with(&options), error);
    /* The first read is told of when it begins, later ones 20 times a second at most. */
    while (t.calls < 3)
        assert_ok(read_from(0, w.n_tensors), error);
    assert_int_equal(t.total, bytes_of(0, w.n_tensors));
    assert_int_equal(t.done, t.total);
    end_well(&info);
}

/* ------------------------------------------------------------------- bad ends */

CASE(test_stale_by_stream)
{
    fanin_error first;
    w.lease_ms = 1; /* the update does not wait for who has gone away */
    begin_world(2, CUT_CHUNK0, FANIN_PATH_STREAM);
    open_session();
    assert_ok(read_from(0, 2), error);
    world_commit_rank(&w, 1, 2);
    assert_int_equal(read_from(0, w.n_tensors), FANIN_ERR_STALE);
    assert_non_null(strstr(error.message, "rank 1"));
    first = error;
    assert_int_equal(read_from(0, 1), FANIN_ERR_STALE);
    assert_int_equal(fanin_session_end(&session, NULL, &error), FANIN_ERR_STALE);
    assert_string_equal(error.message, first.message);
    assert_null(session);
    world_commit_rank(&w, 0, 2);
    expect_session(2, FANIN_PATH_STREAM);
}

/* What was confirmed stays good when an update ends the session; what was not does not count. */
static void confirm_and_overtake(fanin_path path)
{
    w.lease_ms = 1;
    begin_world(3, CUT_CHUNK0, path);
    open_session();
    assert_ok(fanin_session_confirm(session, &error), error); /* of nothing */
    assert_ok(read_from(0, 3), error);
    assert_ok(fanin_session_confirm(session, &error), error);
    assert_ok(read_from(3, 2), error);
    assert_ok(fanin_session_confirm(session, &error), error);
    check_land(0, 5, 1);
    world_commit(&w, 2);
    check_land(0, 5, 1);
    assert_int_equal(fanin_session_confirm(session, &error), FANIN_ERR_STALE);
    assert_int_equal(fanin_session_read(session, 5, 1, NULL), FANIN_ERR_STALE);
    assert_int_equal(fanin_session_end(&session, NULL, NULL), FANIN_ERR_STALE);
    expect_session(2, path);
    assert_int_equal(fanin_session_confirm(NULL, NULL), FANIN_ERR_ARGUMENT);
}

CASE(test_confirm_by_stream)
{
    confirm_and_overtake(FANIN_PATH_STREAM);
}

CASE(test_confirm_by_cma)
{
    if (!world_has_cma())
        skip();
    confirm_and_overtake(FANIN_PATH_CMA);
}

/* Also when the rank is overtaken after the last read, on whichever path. */
static void stale_at_end(fanin_path path)
{
    w.lease_ms = 1;
    begin_world(2, CUT_CHUNK0, path);
    open_session();
    read_all(1);
    world_commit(&w, 2);
    assert_int_equal(fanin_session_end(&session, NULL, &error), FANIN_ERR_STALE);
    assert_non_null(strstr(error.message, "rewrote"));
    /* the update waited for the lease, so that reading took longer than that */
    assert_non_null(strstr(error.message, "a lease delays updates for"));
    assert_non_null(strstr(error.remedy, "publish snapshots"));
    expect_session(2, path);
}

CASE(test_stale_at_end)
{
    stale_at_end(FANIN_PATH_STREAM);
    if (world_has_cma())
        stale_at_end(FANIN_PATH_CMA);
}

static fanin_status update(void *server)
{
    return fanin_server_begin_update(server, "lora:0", &error);
}

/* An update waits for the session between its reads, and goes on when it is given up. */
CASE(test_abandoned)
{
    call c;
    w.lease_ms = 60000;
    begin_world(1, CUT_CHUNK0, FANIN_PATH_STREAM);
    open_session();
    assert_ok(read_from(0, 1), error);
    call_start(&c, update, w.ranks[0].server);
    assert_false(call_returns(&c, 50));
    fanin_session_abandon(&session);
    assert_null(session);
    assert_int_equal(call_end(&c), FANIN_OK);
    fanin_session_abandon(&session);
    fanin_session_abandon(NULL);
}

CASE(test_killed_rank)
{
    begin_world(2, CUT_CHUNK0, FANIN_PATH_STREAM);
    open_session();
    assert_ok(read_from(0, 2), error);
    world_stop_rank(&w, 1);
    fanin_status status = read_from(2, 1);
    assert_true(status == FANIN_ERR_CLOSED || status == FANIN_ERR_UNREACHABLE);
    assert_non_null(strstr(error.message, "rank 1"));
    assert_int_equal(fanin_session_end(&session, NULL, &error), status);
    /* It comes back as another incarnation, to which an old lease says nothing. */
    world_restart_rank(&w, 1);
    world_commit_rank(&w, 1, 1);
    expect_session(1, FANIN_PATH_STREAM);
}

/* Also one whose bytes have all been read by then. */
CASE(test_killed_before_the_end)
{
    begin_world(2, CUT_CHUNK0, FANIN_PATH_STREAM);
    open_session();
    read_all(1);
    world_stop_rank(&w, 0);
    world_restart_rank(&w, 0);
    world_commit_rank(&w, 0, 1);
    fanin_status status = fanin_session_end(&session, NULL, &error);
    assert_true(status == FANIN_ERR_CLOSED || status == FANIN_ERR_UNREACHABLE);
    assert_non_null(strstr(error.message, "rank 0"));
    expect_session(1, FANIN_PATH_STREAM);
}

CASE(test_cancelled)
{
    begin_world(2, CUT_CHUNK0, FANIN_PATH_STREAM);
    open_session();
    assert_ok(read_from(0, 1), error);
    fanin_client_cancel(client);
    assert_int_equal(read_from(1, 1), FANIN_ERR_CANCELLED);
    assert_int_equal(fanin_session_end(&session, NULL, &error), FANIN_ERR_CANCELLED);
    expect_session(1, FANIN_PATH_STREAM);
    fanin_client_cancel(client);
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    assert_int_equal(open_with(&options), FANIN_ERR_CANCELLED);
    assert_null(session);
}

CASE(test_out_of_time)
{
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    fanin_status status = FANIN_OK;
    options.timeout_ms = 100;
    begin_world(2, CUT_CHUNK0, FANIN_PATH_STREAM);
    do /* until it takes long enough to be opened */
        options.timeout_ms *= 2;
    while (open_with(&options) == FANIN_ERR_TIMEOUT && options.timeout_ms < 60000);
    assert_non_null(session);
    while (status == FANIN_OK)
        status = read_from(0, w.n_tensors);
    assert_int_equal(status, FANIN_ERR_TIMEOUT);
    assert_int_equal(fanin_session_end(&session, NULL, &error), FANIN_ERR_TIMEOUT);
    expect_session(1, FANIN_PATH_STREAM);
}

/* ------------------------------------------------------------------- wrong use */

CASE(test_other_calls)
{
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    fanin_session *second = NULL;
    fanin_result_info info;
    begin_world(2, CUT_CHUNK0, FANIN_PATH_STREAM);
    open_session();
    assert_int_equal(world_pull(&w, client, NULL, NULL, &error), FANIN_ERR_STATE);
    assert_non_null(strstr(error.message, "session"));
    assert_int_equal(fanin_client_begin(client, &options, land.tensors, w.n_tensors,
                                        &second, &error),
                     FANIN_ERR_STATE);
    assert_null(second);
    assert_int_equal(fanin_client_wait(client, &options, NULL, &error),
                     FANIN_ERR_STATE);
    assert_int_equal(fanin_client_connect(client, w.address_list, w.size, 5000, &error),
                     FANIN_ERR_STATE);
    read_all(1);
    end_well(&info);
    assert_ok(world_pull(&w, client, NULL, NULL, &error), error);
}

CASE(test_wrong_arguments)
{
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    fanin_result_info info;
    begin_world(2, CUT_CHUNK0, FANIN_PATH_STREAM);
    assert_int_equal(
        fanin_client_begin(client, &options, land.tensors, 0, &session, &error),
        FANIN_ERR_ARGUMENT);
    assert_int_equal(
        fanin_client_begin(client, &options, land.tensors, w.n_tensors, NULL, &error),
        FANIN_ERR_ARGUMENT);
    options.timeout_ms = 0;
    assert_int_equal(open_with(&options), FANIN_ERR_ARGUMENT);
    assert_int_equal(fanin_session_read(NULL, 0, 1, &error), FANIN_ERR_ARGUMENT);
    assert_int_equal(fanin_session_end(NULL, NULL, &error), FANIN_ERR_ARGUMENT);
    assert_int_equal(fanin_session_end(&session, NULL, &error), FANIN_ERR_ARGUMENT);
    assert_int_equal(fanin_session_step(NULL), 0);
    open_session();
    assert_int_equal(read_from(w.n_tensors, 1), FANIN_ERR_ARGUMENT);
    assert_int_equal(read_from(1, SIZE_MAX), FANIN_ERR_ARGUMENT);
    assert_int_equal(read_runs((group_run[]){{0, 2}, {1, 1}}, 2), FANIN_ERR_ARGUMENT);
    assert_int_equal(read_runs((group_run[]){{1, 1}, {0, 1}}, 2), FANIN_ERR_ARGUMENT);
    assert_says(error.message, "number 0 is named twice, or out of order");
    assert_int_equal(read_runs((group_run[]){{0, 1}, {w.n_tensors, 1}}, 2),
                     FANIN_ERR_ARGUMENT);
    check_untouched(0, w.n_tensors);
    read_all(1); /* a wrong argument does the session nothing */
    end_well(&info);
}

CASE(test_two_clients)
{
    fanin_result_info info;
    begin_world(2, CUT_CHUNK0, FANIN_PATH_STREAM);
    open_session();
    assert_ok(read_from(0, 2), error);
    fanin_session *other_session = session;
    fanin_client *other = client;
    session = NULL;
    client = world_client(&w, FANIN_PATH_STREAM);
    expect_session(1, FANIN_PATH_STREAM);
    fanin_client_destroy(&client);
    client = other;
    session = other_session;
    clear_land();
    read_all(1);
    end_well(&info);
}

CASE(test_client_gone)
{
    begin_world(2, CUT_CHUNK0, FANIN_PATH_STREAM);
    open_session();
    assert_ok(read_from(0, 1), error);
    fanin_client_disconnect(client);
    assert_int_equal(read_from(1, 1), FANIN_ERR_STATE);
    assert_int_equal(fanin_session_end(&session, NULL, &error), FANIN_ERR_STATE);
    assert_ok(fanin_client_connect(client, w.address_list, w.size, 20000, &error),
              error);
    open_session();
    fanin_client_destroy(&client);
    assert_int_equal(read_from(0, 1), FANIN_ERR_STATE);
    assert_int_equal(fanin_session_end(&session, NULL, &error), FANIN_ERR_STATE);
    assert_null(session);
}

CASE(test_forked)
{
    fanin_result_info info;
    begin_world(1, CUT_CHUNK0, FANIN_PATH_STREAM);
    open_session();
    pid_t child = fork();
    if (child == 0) {
        bool ok = read_from(0, 1) == FANIN_ERR_FORKED;
        ok = ok && fanin_session_end(&session, NULL, &error) == FANIN_ERR_FORKED;
        _exit(ok && !session ? 0 : 1);
    }
    assert_int_equal(tests_await(child), 0);
    read_all(1);
    end_well(&info);
}
