/* SPDX-License-Identifier: Apache-2.0 */
/* Pulls that compare with the ranks' digests: every path and cut, and what is unequal. */
#include "local_world.h"
#include "rank_proxy.h"
#include "testing.h"
#include <stdlib.h>
#include <string.h>

static fanin_pull_options asked(void)
{
    fanin_pull_options options;
    fanin_pull_options_init(&options, sizeof(options));
    options.publication = "lora:0";
    options.verify = true;
    return options;
}

static void pull_every_cut(fanin_path path)
{
    static const struct {
        world_cut cut;
        size_t size;
    } cases[] = {{CUT_CHUNK0, 1},  {CUT_CHUNK0, 3},    {CUT_CHUNK1, 4}, {CUT_GRID, 4},
                 {CUT_STRIDED, 3}, {CUT_REPLICATE, 3}, {CUT_HSDP, 4}};
    fanin_pull_options options = asked();
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        fanin_error error = FANIN_ERROR_INIT;
        fanin_result_info info;
        world w = {0};
        world_start(&w, cases[i].size, cases[i].cut, world_lora, world_lora_count);
        fanin_client *client = world_client(&w, path);
        for (uint64_t step = 1; step <= 2; step++) {
            world_commit(&w, step);
            assert_ok(world_pull(&w, client, &options, &info, &error), error);
            assert_int_equal(info.step, step);
            assert_int_equal(info.path, path);
            assert_true(info.verified);
            assert_int_equal(info.restarts, 0);
        }
        assert_ok(world_pull(&w, client, NULL, &info, &error), error);
        assert_false(info.verified);
        fanin_client_destroy(&client);
        world_stop(&w);
    }
}

static void stream_is_verified(void **state)
{
    (void)state;
    pull_every_cut(FANIN_PATH_STREAM);
}

static void cma_is_verified(void **state)
{
    (void)state;
    if (!world_has_cma())
        skip();
    pull_every_cut(FANIN_PATH_CMA);
}

/* ------------------------------------------------- one rank behind a proxy */

#define ROWS 24
#define COLUMNS 700 /* rows are longer than a piece of the digest is as BF16 */

typedef struct scene {
    fanin_server *server;
    rank_proxy proxy;
    fanin_client *client;
    float published[ROWS][COLUMNS];
} scene;

static void publish(scene *s, uint64_t step)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_box box = {.extent = {ROWS, COLUMNS}, .address = s->published};
    fanin_tensor tensor = {.struct_size = sizeof(tensor),
                           .name = "matrix",
                           .dtype = FANIN_DTYPE_F32,
                           .n_dims = 2,
                           .shape = {ROWS, COLUMNS},
                           .boxes = &box,
                           .n_boxes = 1};
    if (step == 1)
        assert_ok(fanin_server_put(s->server, "lora:0", &tensor, 1, false, &error),
                  error);
    for (int i = 0; i < ROWS * COLUMNS; i++)
        s->published[i / COLUMNS][i % COLUMNS] = (float)i * 1.7F + (float)step;
    assert_ok(fanin_server_commit(s->server, "lora:0", step, NULL, &error), error);
}

/* A trainer that does not say that it writes. */
static void write_in_silence(void *cookie)
{
    scene *s = cookie;
    s->published[7][3] = -s->published[7][3];
}

static void update(void *cookie)
{
    scene *s = cookie;
    fanin_error error = FANIN_ERROR_INIT;
    assert_ok(fanin_server_begin_update(s->server, "lora:0", &error), error);
    publish(s, 2);
}

static void set_scene(scene *s, void (*trigger)(void *))
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_server_config config;
    fanin_server_config_init(&config, sizeof(config));
    memset(config.world_id, 9, sizeof(config.world_id));
    config.flags = FANIN_SERVER_NO_UCX;
    config.lease_ms = 1; /* an update in the middle of a pull does not wait */
    assert_ok(fanin_server_create(&config, &s->server, &error), error);
    publish(s, 1);
    rank_proxy_start(&s->proxy, fanin_server_port(s->server), MSG_DIGEST, trigger, s);
    fanin_client_config client;
    fanin_client_config_init(&client, sizeof(client));
    client.no_ucx = true;
    const char *address = s->proxy.address;
    assert_ok(fanin_client_create(&client, &s->client, &error), error);
    assert_ok(fanin_client_connect(s->client, &address, 1, 10000, &error), error);
}

static void strike(scene *s)
{
    fanin_client_destroy(&s->client);
    rank_proxy_stop(&s->proxy);
    fanin_server_destroy(&s->server, 0);
    free(s);
}

static fanin_status pull(scene *s, fanin_dtype dtype, void *to, int64_t row_stride,
                         fanin_result_info *info, fanin_error *error)
{
    fanin_pull_options options = asked();
    fanin_result *result = NULL;
    options.dtype = dtype;
    int64_t element = dtype ? 2 : 4;
    fanin_box box = {
        .extent = {ROWS, COLUMNS}, .address = to, .stride = {row_stride, element}};
    fanin_tensor tensor = {.struct_size = sizeof(tensor),
                           .name = "matrix",
                           .dtype = dtype ? dtype : FANIN_DTYPE_F32,
                           .n_dims = 2,
                           .shape = {ROWS, COLUMNS},
                           .boxes = &box,
                           .n_boxes = 1};
    fanin_status status =
        fanin_client_pull(s->client, &options, &tensor, 1, &result, error);
    *info = (fanin_result_info){.struct_size = sizeof(*info)};
    fanin_result_get(result, info);
    fanin_result_free(&result);
    return status;
}

static void conversions_are_verified(void **state)
{
    (void)state;
    static const fanin_dtype dtypes[] = {0, FANIN_DTYPE_BF16, FANIN_DTYPE_F16};
    static uint8_t landed[2 * ROWS * COLUMNS * 4];
    scene *s = calloc(1, sizeof(*s));
    set_scene(s, write_in_silence);
    atomic_store(&s->proxy.triggered, true); /* nothing is written */
    for (int i = 0; i < 6; i++) {
        fanin_error error = FANIN_ERROR_INIT;
        fanin_result_info info;
        int64_t row = COLUMNS * (dtypes[i / 2] ? 2 : 4);
        /* packed, and with gaps between the rows */
        assert_ok(pull(s, dtypes[i / 2], landed, i % 2 ? 2 * row : row, &info, &error),
                  error);
        assert_true(info.verified);
    }
    strike(s);
}

static void unequal_bytes_are_named(void **state)
{
    (void)state;
    static float landed[ROWS][COLUMNS];
    for (int i = 0; i < 2; i++) {
        scene *s = calloc(1, sizeof(*s));
        fanin_error error = FANIN_ERROR_INIT;
        fanin_result_info info;
        set_scene(s, write_in_silence);
        assert_int_equal(pull(s, i ? FANIN_DTYPE_BF16 : 0, landed,
                              COLUMNS * (i ? 2 : 4), &info, &error),
                         FANIN_ERR_TRANSPORT);
        assert_int_equal(error.rank, 0);
        assert_string_equal(error.key, "matrix");
        assert_string_equal(error.address, s->proxy.address);
        assert_non_null(strstr(error.message, "matrix"));
        assert_true(atomic_load(&s->proxy.triggered));
        strike(s);
    }
}

static void an_update_is_only_stale(void **state)
{
    (void)state;
    static float landed[ROWS][COLUMNS];
    scene *s = calloc(1, sizeof(*s));
    fanin_error error = FANIN_ERROR_INIT;
    fanin_result_info info;
    set_scene(s, update);
    assert_ok(pull(s, 0, landed, COLUMNS * 4, &info, &error), error);
    assert_int_equal(info.step, 2);
    assert_int_equal(info.stale, 1);
    assert_true(info.verified);
    assert_memory_equal(landed, s->published, sizeof(landed));
    strike(s);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(stream_is_verified),
        cmocka_unit_test(cma_is_verified),
        cmocka_unit_test(conversions_are_verified),
        cmocka_unit_test(unequal_bytes_are_named),
        cmocka_unit_test(an_update_is_only_stale),
    };
    return cmocka_run_group_tests_name("verify", tests, NULL, NULL);
}
