/* SPDX-License-Identifier: Apache-2.0 */
/* Readers that hand on what they have read: who brings what, and what they survive. */
#include "testing.h"
#include "call.h"
#include "ends.h"
#include "local_world.h"

#define READERS 3
#define UNIT 1024

static world w;

typedef struct reader {
    fanin_relay *relay;
    fanin_tensor *tensors;
    fanin_box *boxes;
    fanin_pull_options options;
    fanin_error error;
    fanin_result_info info;
    char how[160];
    call call;
} reader;

static reader readers[READERS];

static void reader_open(reader *r)
{
    fanin_client_config client;
    fanin_relay_config config;
    fanin_client_config_init(&client, sizeof client);
    client.lost_ms = 2000;
    client.path = FANIN_PATH_STREAM;
    fanin_relay_config_init(&config, sizeof config);
    config.client = &client;
    config.unit_bytes = UNIT;
    r->error = (fanin_error)FANIN_ERROR_INIT;
    assert_ok(fanin_relay_create(&config, w.address_list, w.size, &r->relay, &r->error),
              r->error);
    r->options = make_options(FANIN_STEP_NEWEST, 0);
    r->tensors = calloc(w.n_tensors, sizeof *r->tensors);
    r->boxes = calloc(w.n_tensors, sizeof *r->boxes);
    for (size_t i = 0; i < w.n_tensors; i++) {
        const world_tensor *t = &w.tensors[i];
        memcpy(r->boxes[i].extent, t->shape, sizeof r->boxes[i].extent);
        r->boxes[i].address = malloc(world_bytes(t) + 1);
        r->tensors[i] = world_boxes(t, &r->boxes[i], 1);
    }
}

static void reader_close(reader *r)
{
    fanin_relay_destroy(&r->relay);
    for (size_t i = 0; r->boxes && i < w.n_tensors; i++)
        free(r->boxes[i].address);
    free(r->boxes);
    free(r->tensors);
    *r = (reader){0};
}

static int tear_down(void **state)
{
    for (size_t i = 0; i < READERS; i++)
        reader_close(&readers[i]);
    world_stop(&w);
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, tear_down)

static void begin_readers(size_t n)
{
    world_begin(&w, 2, CUT_CHUNK0, 1);
    for (size_t i = 0; i < n; i++)
        reader_open(&readers[i]);
}

static fanin_status pull(void *cookie)
{
    reader *r = cookie;
    fanin_result *result = NULL;
    for (size_t i = 0; i < w.n_tensors; i++)
        memset(r->boxes[i].address, 0xcc, world_bytes(&w.tensors[i]) + 1);
    fanin_status status = fanin_relay_pull_into(r->relay, &r->options, r->tensors,
                                                w.n_tensors, &result, &r->error);
    r->info = (fanin_result_info){.struct_size = sizeof r->info};
    fanin_result_get(result, &r->info);
    snprintf(r->how, sizeof r->how, "%s",
             r->info.path_reason ? r->info.path_reason : "");
    fanin_result_free(&result);
    return status;
}

static void check_bytes(const reader *r, uint64_t step)
{
    assert_int_equal(r->info.step, step);
    assert_memory_equal(r->info.world_id, w.id, sizeof w.id);
    for (size_t i = 0; i < w.n_tensors; i++) {
        const uint8_t *bytes = r->boxes[i].address;
        world_check(&w, i, step, bytes);
        assert_int_equal(bytes[world_bytes(&w.tensors[i])], 0xcc);
    }
}

static void expect_pull(reader *r, uint64_t step)
{
    assert_ok(pull(r), r->error);
    check_bytes(r, step);
}

static fanin_relay_stats stats_of(const reader *r)
{
    fanin_relay_stats s = {.struct_size = sizeof s};
    fanin_relay_get_stats(r->relay, &s);
    return s;
}

static uint64_t all_bytes(void)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < w.n_tensors; i++)
        sum += world_bytes(&w.tensors[i]);
    return sum;
}

CASE(who_is_alone_reads_the_trainer)
{
    begin_readers(1);
    expect_pull(&readers[0], 1);
    fanin_relay_stats s = stats_of(&readers[0]);
    assert_int_equal(s.bytes_from_origin, all_bytes());
    assert_int_equal(s.landed, s.units);
    world_commit(&w, 2);
    expect_pull(&readers[0], 2);
    assert_int_equal(readers[0].info.bytes, all_bytes());
}

CASE(a_late_joiner_reads_the_others)
{
    begin_readers(3);
    expect_pull(&readers[0], 1);
    expect_pull(&readers[1], 1);
    expect_pull(&readers[2], 1);
    fanin_relay_stats s = stats_of(&readers[2]);
    assert_int_equal(s.bytes_from_origin + s.bytes_from_relays, all_bytes());
    assert_true(s.bytes_from_relays > all_bytes() / 3);
    assert_int_equal(s.holders, 2);
    assert_non_null(strstr(readers[2].how, "relays"));
}

CASE(all_at_once_share_each_step)
{
    begin_readers(3);
    for (uint64_t step = 1; step < 6; step++) {
        if (step > 1)
            world_commit(&w, step);
        for (size_t i = 0; i < READERS; i++)
            call_start(&readers[i].call, pull, &readers[i]);
        for (size_t i = 0; i < READERS; i++)
            assert_ok(call_end(&readers[i].call), readers[i].error);
        for (size_t i = 0; i < READERS; i++)
            check_bytes(&readers[i], step);
    }
}
