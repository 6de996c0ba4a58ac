/* SPDX-License-Identifier: Apache-2.0 */
/* Readers into device memory that hand it on. The driver is a stand-in. */
#include "clock.h"
#include "ends.h"
#include "fake_cuda.h"
#include "testing.h"

#define ROWS 64
#define COLUMNS 33
#define BYTES (ROWS * COLUMNS * sizeof(uint32_t))

typedef struct reader {
    fanin_relay *relay;
    void *memory; /* of a device */
} reader;

static void reader_start(reader *r, int device, const char *address)
{
    fanin_client_config client = make_client_config();
    fanin_relay_config config;
    fanin_relay_config_init(&config, sizeof config);
    config.client = &client;
    config.unit_bytes = 1024;
    r->memory = fake_cuda_alloc(device, BYTES, FAKE_CUDA_MALLOC);
    memset(fake_cuda_alias(r->memory), 0xcc, BYTES);
    assert_int_equal(fanin_relay_create(&config, &address, 1, &r->relay, NULL),
                     FANIN_OK);
}

static void expect_matrix(reader *r, const uint32_t *published, bool verify)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    fanin_box box = {.extent = {ROWS, COLUMNS}, .address = r->memory};
    fanin_tensor t =
        make_tensor("matrix", FANIN_DTYPE_U32, ROWS, COLUMNS, &box, r->memory);
    options.verify = verify;
    assert_ok(fanin_relay_pull_into(r->relay, &options, &t, 1, NULL, &error), error);
    assert_memory_equal(fake_cuda_alias(r->memory), published, BYTES);
}

static void reader_stop(reader *r)
{
    fanin_relay_destroy(&r->relay);
    fake_cuda_free(r->memory);
}

static uint64_t relayed_by(const reader *r)
{
    fanin_relay_stats s = {.struct_size = sizeof s};
    fanin_relay_get_stats(r->relay, &s);
    return s.bytes_from_relays;
}

TEST(device_memory_is_handed_on)
{
    static uint32_t matrix[ROWS * COLUMNS];
    char address[32];
    fanin_server_config config = make_server_config();
    fanin_server *server = make_server(&config, address, sizeof address);
    reader first, second;
    publish_matrix(server, matrix, ROWS, COLUMNS);
    reader_start(&first, 0, address);
    reader_start(&second, 1, address);
    expect_matrix(&first, matrix, false);
    deadline until = deadline_in_ms(20000);
    do /* who is slow to be reached is not read */
        expect_matrix(&second, matrix, true);
    while (relayed_by(&second) == 0 && !deadline_passed(until));
    assert_true(relayed_by(&second) > 0);
    reader_stop(&first);
    expect_matrix(&second, matrix, false);
    reader_stop(&second);
    fanin_server_destroy(&server, 0);
}
