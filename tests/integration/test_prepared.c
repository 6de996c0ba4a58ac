/* SPDX-License-Identifier: Apache-2.0 */
/* Destinations that are described once: what they outlive, who may use them, and what is refused.
   */
#include "testing.h"
#include "call.h"
#include "ends.h"
#include "local_world.h"

/* What a test has, and what was said last. */
static world w;
static fanin_client *client;
static fanin_destination *into;
static uint8_t **memory; /* of each tensor */
static fanin_error error = FANIN_ERROR_INIT;

/* The tensors as a caller has them, with whom they go: nothing of it is there afterwards. */
static fanin_status prepare_from(uint32_t odd_size)
{
    size_t n = w.n_tensors, step = sizeof(fanin_tensor) + odd_size;
    uint8_t *tensors = calloc(n, step);
    fanin_box *boxes = calloc(n, sizeof *boxes);
    char(*names)[64] = calloc(n, sizeof *names);
    for (size_t i = 0; i < n; i++) {
        fanin_tensor *t = (fanin_tensor *)(void *)(tensors + i * step);
        memcpy(boxes[i].extent, w.tensors[i].shape, sizeof boxes[i].extent);
        boxes[i].address = memory[i];
        snprintf(names[i], sizeof names[i], "%s", w.tensors[i].name);
        *t = world_boxes(&w.tensors[i], &boxes[i], 1);
        t->name = names[i];
        t->struct_size = step;
    }
    fanin_status status = fanin_destination_create((void *)tensors, n, &into, &error);
    memset(tensors, 0xab, n * step);
    memset(boxes, 0xab, n * sizeof *boxes);
    memset(names, 0xab, n * sizeof *names);
    free(tensors);
    free(boxes);
    free(names);
    return status;
}

static void make_memory(void)
{
    memory = calloc(w.n_tensors, sizeof *memory);
    for (size_t i = 0; i < w.n_tensors; i++)
        memory[i] = calloc(1, world_bytes(&w.tensors[i]) + 1);
}

static int tear_down(void **state)
{
    fanin_destination_free(&into);
    fanin_client_destroy(&client);
    for (size_t i = 0; memory && i < w.n_tensors; i++)
        free(memory[i]);
    free(memory);
    memory = NULL;
    world_stop(&w);
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, tear_down)

static void begin_world(size_t size, world_cut cut, fanin_path path)
{
    tear_down(NULL);
    world_begin(&w, size, cut, 1);
    client = world_client(&w, path);
    make_memory();
    assert_ok(prepare_from(0), error);
}

static void check_step(uint64_t step)
{
    for (size_t i = 0; i < w.n_tensors; i++) {
        world_check(&w, i, step, memory[i]);
        memset(memory[i], 0xcc, world_bytes(&w.tensors[i]));
    }
}

static fanin_status pull(fanin_client *by)
{
    const fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    return fanin_client_pull_into(by, &options, into, NULL, &error);
}

static void expect(uint64_t step)
{
    assert_ok(pull(client), error);
    check_step(step);
}

static fanin_status begin(fanin_session **session)
{
    const fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    return fanin_client_begin_into(client, &options, into, session, &error);
}

/* --------------------------------------------------------------- what it outlives */

CASE(test_steps_and_paths)
{
    static const world_cut cuts[] = {CUT_CHUNK0, CUT_STRIDED, CUT_HSDP};
    for (size_t i = 0; i < 2 * sizeof cuts / sizeof *cuts; i++) {
        if (i % 2 == 1 && !world_has_cma())
            continue;
        begin_world(4, cuts[i / 2], i % 2 ? FANIN_PATH_CMA : FANIN_PATH_STREAM);
        for (uint64_t step = 1; step < 4; step++) {
            if (step > 1)
                world_commit(&w, step);
            expect(step);
        }
    }
}

/* Tensors of a caller that was built with newer headers. */
CASE(test_larger_tensors)
{
    begin_world(2, CUT_CHUNK0, FANIN_PATH_STREAM);
    fanin_destination_free(&into);
    assert_ok(prepare_from(24), error);
    expect(1);
}

/* A rank's next life has another catalog, and the client's next connections forget all of them. */
CASE(test_restarts_and_connections)
{
    begin_world(2, CUT_CHUNK0, FANIN_PATH_STREAM);
    expect(1);
    world_stop_rank(&w, 1);
    world_restart_rank(&w, 1);
    world_commit(&w, 2);
    expect(2);
    fanin_client_disconnect(client);
    assert_ok(fanin_client_connect(client, w.address_list, w.size, 20000, &error),
              error);
    expect(2);
}

/* The same names in another launch, cut otherwise; the client is another one, too. */
CASE(test_another_trainer)
{
    begin_world(2, CUT_CHUNK0, FANIN_PATH_STREAM);
    expect(1);
    fanin_client_destroy(&client);
    world_stop(&w);
    world_begin(&w, 4, CUT_GRID, 7);
    client = world_client(&w, FANIN_PATH_STREAM);
    expect(7);
}

/* What the trainer publishes has changed its shape: that is told, and ends when it is as it was. */
CASE(test_another_shape)
{
    begin_world(1, CUT_CHUNK0, FANIN_PATH_STREAM);
    expect(1);
    uint8_t bytes[16] = {0};
    uint64_t n = sizeof bytes;
    fanin_box box = {.extent = {n}, .address = bytes};
    fanin_tensor odd = {.struct_size = sizeof odd,
                        .name = w.tensors[0].name,
                        .dtype = FANIN_DTYPE_U8,
                        .n_dims = 1,
                        .shape = {n},
                        .boxes = &box,
                        .n_boxes = 1,
                        .memory = {FANIN_MEMORY_DETECT, -1}};
    fanin_server *server = w.ranks[0].server;
    assert_ok(fanin_server_begin_update(server, "lora:0", &error), error);
    assert_ok(fanin_server_put(server, "lora:0", &odd, 1, true, &error), error);
    assert_ok(fanin_server_commit(server, "lora:0", 2, NULL, &error), error);
    assert_int_equal(pull(client), FANIN_ERR_MISMATCH);
    assert_non_null(strstr(error.key, w.tensors[0].name));
    world_stop(&w);
    world_begin(&w, 1, CUT_CHUNK0, 3);
    fanin_client_destroy(&client);
    client = world_client(&w, FANIN_PATH_STREAM);
    expect(3);
}

/* Described for one call and prepared, in turns: one layout, one plan. */
CASE(test_beside_descriptions)
{
    begin_world(3, CUT_CHUNK0, FANIN_PATH_STREAM);
    for (int i = 0; i < 2; i++) {
        expect(1);
        assert_ok(world_pull(&w, client, NULL, NULL, &error), error);
    }
}

/* --------------------------------------------------------------------- sessions */

CASE(test_session)
{
    fanin_session *session = NULL;
    begin_world(2, CUT_CHUNK0, FANIN_PATH_STREAM);
    assert_ok(begin(&session), error);
    fanin_destination_free(&into); /* a session does without */
    for (size_t i = w.n_tensors; i-- > 0;)
        assert_ok(fanin_session_read(session, i, 1, &error), error);
    assert_ok(fanin_session_end(&session, NULL, &error), error);
    check_step(1);
}

/* ------------------------------------------------------------------------ users */

/* By a client of its own, in a thread of its own. */
static fanin_status pull_often(void *cookie)
{
    const fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    fanin_status status = FANIN_OK;
    for (int i = 0; i < 50 && status == FANIN_OK; i++)
        status = fanin_client_pull_into(cookie, &options, into, NULL, NULL);
    return status;
}

CASE(test_two_clients_at_once)
{
    call calls[2];
    fanin_client *clients[2];
    begin_world(2, CUT_CHUNK0, FANIN_PATH_STREAM);
    for (int i = 0; i < 2; i++) {
        clients[i] = world_client(&w, FANIN_PATH_STREAM);
        call_start(&calls[i], pull_often, clients[i]);
    }
    for (int i = 0; i < 2; i++) {
        assert_int_equal(call_end(&calls[i]), FANIN_OK);
        fanin_client_destroy(&clients[i]);
    }
    check_step(1); /* both wrote the same */
}

/* ---------------------------------------------------------------------- refusals */

static void expect_wrong(const fanin_tensor *tensors, size_t count)
{
    fanin_destination *none = NULL;
    assert_int_equal(fanin_destination_create(tensors, count, &none, &error),
                     FANIN_ERR_ARGUMENT);
    assert_null(none);
}

CASE(test_wrong_arguments)
{
    fanin_session *session = NULL;
    begin_world(1, CUT_CHUNK0, FANIN_PATH_STREAM);
    uint8_t byte = 0;
    fanin_box box = {.extent = {1}, .address = &byte};
    fanin_tensor good = {.struct_size = sizeof good,
                         .name = "x",
                         .dtype = FANIN_DTYPE_U8,
                         .n_dims = 1,
                         .shape = {1},
                         .boxes = &box,
                         .n_boxes = 1};
    fanin_tensor bad = good;
    expect_wrong(NULL, 1);
    expect_wrong(&good, 0);
    bad.name = NULL;
    expect_wrong(&bad, 1);
    bad = good, bad.n_dims = FANIN_MAX_DIMS + 1;
    expect_wrong(&bad, 1);
    bad = good, bad.memory.kind = 9;
    expect_wrong(&bad, 1);
    assert_int_equal(fanin_destination_create(&good, 1, NULL, &error),
                     FANIN_ERR_ARGUMENT);
    fanin_destination_free(NULL);
    fanin_destination_free(&into);
    assert_null(into);
    fanin_destination_free(&into);
    assert_int_equal(pull(client), FANIN_ERR_ARGUMENT); /* it is gone */
    assert_int_equal(begin(&session), FANIN_ERR_ARGUMENT);
    assert_int_equal(pull(NULL), FANIN_ERR_ARGUMENT);
    assert_ok(fanin_destination_create(&good, 1, &into, &error), error);
    assert_int_equal(pull(client), FANIN_ERR_NOT_FOUND);
    const fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    assert_int_equal(fanin_client_begin_into(client, &options, into, NULL, &error),
                     FANIN_ERR_ARGUMENT);
}

/* A tensor without memory is found when a pull would write it. */
CASE(test_no_address)
{
    begin_world(1, CUT_CHUNK0, FANIN_PATH_STREAM);
    fanin_destination_free(&into);
    uint8_t *first = memory[0];
    memory[0] = NULL;
    assert_ok(prepare_from(0), error);
    assert_int_equal(pull(client), FANIN_ERR_ARGUMENT);
    assert_non_null(strstr(error.key, w.tensors[0].name));
    memory[0] = first;
}

/* Strides that lead around the end of the addresses are found before anything is written: in both
   ways of describing. */
CASE(test_strides_that_wrap)
{
    static const int64_t wide[] = {INT64_MIN, INT64_MAX, INT64_MIN / 9, INT64_MAX / 8};
    const fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    begin_world(2, CUT_CHUNK0, FANIN_PATH_STREAM);
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++) {
        fanin_box box = {.address = memory[0]};
        memcpy(box.extent, w.tensors[0].shape, sizeof box.extent);
        box.stride[0] = wide[i];
        box.stride[1] = 2;
        fanin_tensor t = world_boxes(&w.tensors[0], &box, 1);
        assert_int_equal(fanin_client_pull(client, &options, &t, 1, NULL, &error),
                         FANIN_ERR_ARGUMENT);
        assert_says(error.message, "address space");
        assert_says(error.remedy, "strides");
        assert_string_equal(error.key, t.name);
        fanin_destination_free(&into);
        assert_ok(fanin_destination_create(&t, 1, &into, &error), error);
        assert_int_equal(pull(client), FANIN_ERR_ARGUMENT);
        assert_string_equal(error.key, t.name);
    }
}
