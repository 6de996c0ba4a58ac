/* SPDX-License-Identifier: Apache-2.0 */
/* Pulling into memory: every path, every way to cut, caches; watching. */
#include "testing.h"
#include "ends.h"
#include "local_world.h"

/* What a test has, and what its client said last. */
static world w;
static fanin_client *client;
static fanin_error error = FANIN_ERROR_INIT;
static fanin_result_info info;

static int tear_down(void **state)
{
    fanin_client_destroy(&client);
    world_stop(&w);
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, tear_down)

static void begin(size_t size, world_cut cut, uint64_t step, fanin_path path)
{
    tear_down(NULL);
    world_begin(&w, size, cut, step);
    client = world_client(&w, path);
}

static void expect_pull(uint64_t step, fanin_path path)
{
    assert_ok(world_pull(&w, client, NULL, &info, &error), error);
    assert_int_equal(info.step, step);
    assert_int_equal(info.path, path);
}

CASE(test_stream_unix)
{
    static const struct {
        world_cut cut;
        size_t size;
    } cases[] = {{CUT_CHUNK0, 1},    {CUT_CHUNK0, 2}, {CUT_CHUNK0, 3}, {CUT_CHUNK0, 8},
                 {CUT_CHUNK0, 16},   {CUT_CHUNK1, 4}, {CUT_GRID, 4},   {CUT_STRIDED, 3},
                 {CUT_REPLICATE, 3}, {CUT_HSDP, 4}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        begin(cases[i].size, cases[i].cut, 1, FANIN_PATH_STREAM);
        expect_pull(1, FANIN_PATH_STREAM);
        world_commit(&w, 5);
        expect_pull(5, FANIN_PATH_STREAM);
    }
}

CASE(test_stream_tcp)
{
    fanin_client_config config;
    fanin_client_config_init(&config, sizeof config);
    config.no_unix = true;
    config.streams_per_rank = 3;
    config.max_inflight = 4096; /* less than one request: one at a time */
    world_begin(&w, 4, CUT_CHUNK0, 1);
    client = world_client_with(&w, &config);
    for (uint64_t step = 2; step < 6; step++) {
        world_commit(&w, step);
        expect_pull(step, FANIN_PATH_STREAM);
    }
}

/* Both arenas in turn, through one client that has planned once. */
static void pull_snapshots(fanin_path path)
{
    static const world_cut cuts[] = {CUT_CHUNK0, CUT_CHUNK1, CUT_STRIDED,
                                     CUT_REPLICATE};
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        w.snapshots = true;
        world_begin(&w, 3, cuts[i], 1);
        client = world_client(&w, path);
        for (uint64_t step = 1; step < 6; step++) {
            if (step > 1)
                world_commit(&w, step);
            expect_pull(step, path);
        }
        /* One rank is an arena ahead: it has committed twice as often. */
        world_commit_rank(&w, 0, 6);
        world_commit(&w, 7);
        expect_pull(7, path);
        tear_down(NULL);
    }
}

CASE(test_snapshots_stream)
{
    pull_snapshots(FANIN_PATH_STREAM);
}

CASE(test_snapshots_cma)
{
    if (!world_has_cma())
        skip();
    pull_snapshots(FANIN_PATH_CMA);
}

/* auto: cma where it can be, which needs no UCX; stream with a reason where it cannot. */
CASE(test_auto)
{
    fanin_client_config config = make_client_config();
    config.no_unix = true;
    w.flags = FANIN_SERVER_NO_UCX;
    config.path = FANIN_PATH_AUTO;
    world_begin(&w, 2, CUT_CHUNK0, 1);
    client = world_client_with(&w, &config);
    expect_pull(1, FANIN_PATH_STREAM);
    fanin_client_destroy(&client);
    config.path = FANIN_PATH_CMA;
    client = world_client_with(&w, &config);
    assert_int_equal(world_pull(&w, client, NULL, &info, &error),
                     FANIN_ERR_UNSUPPORTED);
    assert_non_null(strstr(error.message, "cma"));
    if (!world_has_cma())
        return;
    fanin_client_destroy(&client);
    config.no_unix = false;
    config.path = FANIN_PATH_AUTO;
    client = world_client_with(&w, &config);
    expect_pull(1, FANIN_PATH_CMA);
}

/* A slice of one tensor into strided memory; nothing beside it is written. */
CASE(test_slice)
{
    world_begin(&w, 3, CUT_CHUNK0, 1);
    const world_tensor *t = &world_lora[3]; /* [5000, 3] f32 */
    enum { FIRST = 1234, ROWS = 2000 };
    uint8_t *memory = malloc(ROWS * 16);
    memset(memory, 0xaa, ROWS * 16);
    fanin_box box = {.offset = {FIRST, 1},
                     .extent = {ROWS, 2},
                     .stride = {16, 4},
                     .address = memory + 4};
    fanin_tensor tensor = world_boxes(t, &box, 1);
    const fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    for (int path = FANIN_PATH_STREAM; path <= FANIN_PATH_CMA; path++) {
        if (path == FANIN_PATH_CMA && !world_has_cma())
            break;
        client = world_client(&w, path);
        assert_ok(fanin_client_pull(client, &options, &tensor, 1, NULL, &error), error);
        for (uint64_t r = 0; r < ROWS; r++) {
            for (uint64_t b = 0; b < 16; b++) {
                uint8_t expected = b < 4 || b >= 12
                                       ? 0xaa
                                       : world_byte(&w, 3, 1, (FIRST + r) * 12 + b);
                assert_int_equal(memory[r * 16 + b], expected);
            }
        }
        memset(memory, 0xaa, ROWS * 16);
        fanin_client_destroy(&client);
    }
    free(memory);
}

enum { SMALL_ROWS = 16, SMALL_COLUMNS = 4, SMALL_PITCH = 64 };
static const world_tensor small[] = {
    {"a.lora_A.weight", FANIN_DTYPE_F32, 2, {SMALL_ROWS, SMALL_COLUMNS}},
    {"b.lora_A.weight", FANIN_DTYPE_F32, 2, {SMALL_ROWS, SMALL_COLUMNS}},
};

/* Pulls the first @p n of them to the same memory each time; nothing beside them is written. */
static void expect_small(size_t n, const int64_t strides[][2], uint64_t step)
{
    static uint8_t landed[2][SMALL_ROWS * SMALL_PITCH],
        expected[2][SMALL_ROWS * SMALL_PITCH];
    const fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    fanin_box boxes[2];
    fanin_tensor wanted[2];
    memset(landed, 0xaa, sizeof landed);
    memset(expected, 0xaa, sizeof expected);
    for (size_t t = 0; t < n; t++) {
        boxes[t] = (fanin_box){.extent = {SMALL_ROWS, SMALL_COLUMNS},
                               .stride = {strides[t][0], strides[t][1]},
                               .address = landed[t]};
        wanted[t] = world_boxes(&small[t], &boxes[t], 1);
        for (uint64_t at = 0; at < world_bytes(&small[t]); at++) {
            uint64_t element = at / 4, row = element / SMALL_COLUMNS,
                     column = element % SMALL_COLUMNS;
            expected[t][row * (uint64_t)strides[t][0] +
                        column * (uint64_t)strides[t][1] + at % 4] =
                world_byte(&w, t, step, at);
        }
    }
    assert_ok(fanin_client_pull(client, &options, wanted, n, NULL, &error), error);
    assert_memory_equal(landed, expected, sizeof landed);
}

/* One client and one memory, of which each pull wants other columns to be written. */
static void pull_other_strides(fanin_path path)
{
    static const int64_t strides[][2][2] = {
        {{32, 4}, {32, 8}}, {{32, 8}, {32, 4}}, {{64, 8}, {64, 8}}, {{32, 4}, {32, 8}}};
    world_start(&w, 2, CUT_CHUNK0, small, 2);
    client = world_client(&w, path);
    for (uint64_t step = 1; step <= sizeof strides / sizeof *strides; step++) {
        world_commit(&w, step);
        expect_small(2, strides[step - 1], step);
    }
    tear_down(NULL);
}

CASE(test_other_strides)
{
    pull_other_strides(FANIN_PATH_STREAM);
    if (world_has_cma())
        pull_other_strides(FANIN_PATH_CMA);
}

/* One rank's rows, [first, end), of step @p step in place of those before. */
static void hold_rows(size_t rank, uint64_t first, uint64_t end, uint64_t step)
{
    static uint8_t held[2][SMALL_ROWS * SMALL_COLUMNS * 4];
    enum { ROW = SMALL_COLUMNS * 4 };
    fanin_server *server = w.ranks[rank].server;
    fanin_box box = {.offset = {first, 0},
                     .extent = {end - first, SMALL_COLUMNS},
                     .address = held[rank]};
    fanin_tensor tensor = world_boxes(&small[0], &box, 1);
    assert_ok(fanin_server_begin_update(server, "lora:0", &error), error);
    for (uint64_t i = 0; i < (end - first) * ROW; i++)
        held[rank][i] = world_byte(&w, 0, step, first * ROW + i);
    assert_ok(fanin_server_put(server, "lora:0", &tensor, 1, true, &error), error);
    assert_ok(fanin_server_commit(server, "lora:0", step, NULL, &error), error);
}

/* Names, shapes and metadata stay, and with them the key table; the rows of each rank do not. */
static void pull_cut_anew(fanin_path path)
{
    static const uint64_t cuts[][2][2] = {{{0, 3}, {3, SMALL_ROWS}},
                                          {{8, SMALL_ROWS}, {0, 8}},
                                          {{0, 12}, {12, SMALL_ROWS}}};
    static const int64_t packed[][2] = {{SMALL_COLUMNS * 4, 4}};
    world_start(&w, 2, CUT_CHUNK0, small, 1);
    world_commit(&w, 1);
    client = world_client(&w, path);
    expect_small(1, packed, 1);
    for (uint64_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        for (size_t rank = 0; rank < 2; rank++)
            hold_rows(rank, cuts[i][rank][0], cuts[i][rank][1], 2 + i);
        expect_small(1, packed, 2 + i);
    }
    tear_down(NULL);
}

CASE(test_cut_anew)
{
    pull_cut_anew(FANIN_PATH_STREAM);
    if (world_has_cma())
        pull_cut_anew(FANIN_PATH_CMA);
}

/* Columns of every width at which a run is scattered or received in place, beside gaps that are
   read along and beside such that are not: what comes behind them on the connection must still be
   what it is taken for. */
CASE(test_columns)
{
    enum { ROWS = 600, COLUMNS = 2048, OTHERS = 5 };
    static const world_tensor tensors[] = {
        {"a.lora_A.weight", FANIN_DTYPE_U8, 2, {ROWS, COLUMNS}},
        {"b.lora_A.weight", FANIN_DTYPE_U8, 2, {ROWS, COLUMNS}},
    };
    static const uint64_t widths[] = {8, 255, 256, 257, 300, 511, 512, 513, 1500};
    static uint8_t memory[2][ROWS * COLUMNS];
    world_start(&w, 3, CUT_CHUNK0, tensors, 2);
    world_commit(&w, 1);
    const fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    client = world_client(&w, FANIN_PATH_STREAM);
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        uint64_t width = widths[i];
        fanin_box boxes[2] = {{.extent = {ROWS, width}, .address = memory[0]},
                              {.offset = {OTHERS, OTHERS},
                               .extent = {ROWS - OTHERS, COLUMNS - OTHERS},
                               .address = memory[1]}};
        fanin_tensor wanted[2];
        for (size_t t = 0; t < 2; t++) {
            wanted[t] = world_boxes(&tensors[t], &boxes[t], 1);
            memset(memory[t], 0xaa, sizeof memory[t]);
        }
        assert_ok(fanin_client_pull(client, &options, wanted, 2, NULL, &error), error);
        for (size_t t = 0; t < 2; t++) {
            const fanin_box *box = &boxes[t];
            for (uint64_t at = 0; at < box->extent[0] * box->extent[1]; at++) {
                uint64_t row = box->offset[0] + at / box->extent[1];
                uint64_t column = box->offset[1] + at % box->extent[1];
                if (memory[t][at] != world_byte(&w, t, 1, row * COLUMNS + column))
                    fail_msg("%llu columns: row %llu, column %llu is wrong",
                             (unsigned long long)width, (unsigned long long)row,
                             (unsigned long long)column);
            }
            assert_int_equal(memory[t][box->extent[0] * box->extent[1]], 0xaa);
        }
    }
}

/* Enough of them over TCP that threads check the checksums: runs that are received in place, with
   room between them. */
CASE(test_columns_tcp)
{
    enum { ROWS = 3000, COLUMNS = 8192, FIRST = 4000, WIDTH = 4001, PITCH = 4100 };
    static const world_tensor tensors[] = {
        {"a.lora_A.weight", FANIN_DTYPE_U8, 2, {ROWS, COLUMNS}}};
    uint8_t *memory = malloc((size_t)ROWS * PITCH);
    fanin_client_config config;
    fanin_client_config_init(&config, sizeof config);
    config.no_unix = true;
    world_start(&w, 2, CUT_CHUNK0, tensors, 1);
    world_commit(&w, 1);
    client = world_client_with(&w, &config);
    fanin_box box = {.offset = {0, FIRST},
                     .extent = {ROWS, WIDTH},
                     .stride = {PITCH, 1},
                     .address = memory};
    fanin_tensor wanted = world_boxes(&tensors[0], &box, 1);
    const fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    fanin_result *result = NULL;
    memset(memory, 0xaa, (size_t)ROWS * PITCH);
    assert_ok(fanin_client_pull(client, &options, &wanted, 1, &result, &error), error);
    info = (fanin_result_info){.struct_size = sizeof info};
    fanin_result_get(result, &info);
    assert_true(info.transport_checksums);
    assert_int_equal(info.bytes, (uint64_t)ROWS * WIDTH);
    fanin_result_free(&result);
    for (uint64_t row = 0; row < ROWS; row++) {
        for (uint64_t i = 0; i < PITCH; i += i < 16 || i > WIDTH - 16 ? 1 : 97) {
            uint8_t expected =
                i < WIDTH ? world_byte(&w, 0, 1, row * COLUMNS + FIRST + i) : 0xaa;
            if (memory[row * PITCH + i] != expected)
                fail_msg("row %llu, byte %llu is wrong", (unsigned long long)row,
                         (unsigned long long)i);
        }
    }
    free(memory);
}

/* ------------------------------------------------------------------- watching */

static bool see_quiet(void *cookie, uint64_t quiet_ms, const fanin_rank_state *ranks,
                      size_t count)
{
    bool *seen = cookie;
    assert_true(quiet_ms >= 50);
    assert_int_equal(count, 3);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(ranks[i].rank, i);
        assert_int_equal(ranks[i].state,
                         i == 2 ? FANIN_PUBLICATION_WRITING : FANIN_PUBLICATION_STABLE);
        assert_int_equal(ranks[i].step, 1);
        assert_true(ranks[i].state_age_ms >= 50); /* it was so before the watch */
    }
    *seen = true;
    return false;
}

static bool see_step(void *cookie, const fanin_watch_event *event)
{
    return true;
}

/* A watch speaks while nothing happens, and is refused for a run that is not there. */
CASE(test_quiet_watch)
{
    bool seen = false;
    begin(3, CUT_CHUNK0, 1, FANIN_PATH_STREAM);
    assert_ok(fanin_server_begin_update(w.ranks[2].server, "lora:0", &error), error);
    assert_ok(fanin_client_follow(client, "lora:0", 20000, see_step, 50, see_quiet,
                                  &seen, &error),
              error);
    assert_true(seen);
    assert_int_equal(
        fanin_client_watch(client, "lora:9", 20000, see_step, NULL, &error),
        FANIN_ERR_NOT_FOUND);
    assert_non_null(strstr(error.message, "lora:0"));
}
