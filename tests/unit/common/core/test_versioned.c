/* SPDX-License-Identifier: Apache-2.0 */
/* Programs that were built with older or newer headers than the library: what a pull needs and
   gives, as shorter and as longer structs. tests/python/test_abi.py has those of the first
   release. */
#include "testing.h"
#include "versioned.h"
#include <fanin/fanin.h>

#define MORE 24 /* bytes that a newer program has */
#define UNSET 0xa5

/* ------------------------------------------------------------- the functions */

typedef struct old_struct {
    size_t struct_size;
    int first;
} old_struct;

typedef struct new_struct {
    size_t struct_size;
    int first, second;
    uint64_t third;
} new_struct;

TEST(older_and_newer_callers_read_and_write)
{
    old_struct o = {sizeof o, 5};
    new_struct n = {.first = 1, .second = 2, .third = 3};
    assert_true(versioned_read(&n, sizeof n, &o, sizeof o));
    assert_int_equal(n.struct_size, sizeof n);
    assert_int_equal(n.first, 5);
    assert_int_equal(n.third, 3); /* a default */
    assert_false(versioned_read(&n, sizeof n, &o, sizeof o + 1));
    assert_false(versioned_read(&n, sizeof n, NULL, 0));
    assert_false(versioned_read(&n, sizeof n, &(old_struct){.struct_size = 0}, 0));
    n = (new_struct){sizeof n, 7, 8, 9};
    assert_true(
        versioned_read(&o, sizeof o, &n, 0)); /* this library is the older one */
    assert_int_equal(o.struct_size, sizeof o);
    assert_int_equal(o.first, 7);
    versioned_write(&n, &(old_struct){.first = 4}, sizeof(old_struct));
    assert_int_equal(n.struct_size, sizeof n);
    assert_int_equal(n.first, 4);
    assert_int_equal(n.third, 9);
    new_struct many[2] = {{sizeof *many, 1, 2, 3}, {sizeof *many, 4, 5, 6}};
    versioned_element(&o, sizeof o, many, 1);
    assert_int_equal(o.first, 4);
    versioned_init(&n, sizeof n, &(old_struct){.first = 6}, sizeof(old_struct));
    assert_int_equal(n.struct_size, sizeof n);
    assert_int_equal(n.first, 6);
    assert_int_equal(n.third, 0);
    o.struct_size = 1;
    versioned_write(&o, &n, sizeof n);
    assert_int_equal(o.struct_size, 1);
}

/* ------------------------------------------------------------ public structs */

/* What a program wrote that knows @p size bytes of a struct, in memory that ends there. */
static void *as_known(const void *from, size_t known, size_t size)
{
    uint8_t *s = malloc(size);
    assert_non_null(s);
    memset(s, UNSET, size);
    memcpy(s, from, size < known ? size : known);
    memcpy(s, &size, sizeof size);
    return s;
}

/* The last one that starts is the one that serves. */
static fanin_server *start_server(void)
{
    static const size_t sizes[] = {sizeof(fanin_server_config) + MORE,
                                   offsetof(fanin_server_config, lease_ms)};
    fanin_server_config config;
    fanin_server *server = NULL;
    fanin_server_config_init(&config, sizeof config);
    memset(config.world_id, 3, sizeof config.world_id);
    config.flags = FANIN_SERVER_NO_UCX;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        void *given = as_known(&config, sizeof config, sizes[i]);
        fanin_server_destroy(&server, 0);
        assert_int_equal(fanin_server_create(given, &server, NULL), FANIN_OK);
        free(given);
    }
    return server;
}

/* Two tensors of a program that knows MORE bytes of them. */
static uint8_t *two_tensors(fanin_box boxes[2], float *memory)
{
    const size_t step = sizeof(fanin_tensor) + MORE;
    uint8_t *array = malloc(2 * step);
    assert_non_null(array);
    memset(array, UNSET, 2 * step);
    for (size_t i = 0; i < 2; i++) {
        boxes[i] = (fanin_box){.extent = {10}, .address = memory + 10 * i};
        fanin_tensor t = {.struct_size = step,
                          .name = i ? "b" : "a",
                          .dtype = FANIN_DTYPE_F32,
                          .n_dims = 1,
                          .shape = {10},
                          .boxes = &boxes[i],
                          .n_boxes = 1};
        memcpy(array + i * step, &t, sizeof t);
    }
    return array;
}

static void commit(fanin_server *server)
{
    static const size_t sizes[] = {sizeof(size_t), sizeof(fanin_commit_options),
                                   sizeof(fanin_commit_options) + MORE};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        fanin_commit_options options;
        fanin_commit_options_init(&options, sizeof options);
        void *given = as_known(&options, sizeof options, sizes[i]);
        assert_int_equal(fanin_server_commit(server, "lora:0", i + 1, given, NULL),
                         FANIN_OK);
        free(given);
        if (i + 1 < sizeof sizes / sizeof *sizes)
            assert_int_equal(fanin_server_begin_update(server, "lora:0", NULL),
                             FANIN_OK);
    }
}

static fanin_client *connect_client(fanin_server *server, size_t size)
{
    fanin_client_config config;
    fanin_client *client;
    char text[40];
    const char *address = text;
    snprintf(text, sizeof(text), "127.0.0.1:%d", fanin_server_port(server));
    fanin_client_config_init(&config, sizeof config);
    config.no_ucx = true;
    void *given = as_known(&config, sizeof config, size);
    assert_int_equal(fanin_client_create(given, &client, NULL), FANIN_OK);
    free(given);
    assert_int_equal(fanin_client_connect(client, &address, 1, 20000, NULL), FANIN_OK);
    return client;
}

/* The bytes that a shorter struct does not have stay as they are. */
static void get_result(const fanin_result *result)
{
    const size_t size = offsetof(fanin_result_info, path_reason);
    uint8_t room[sizeof(fanin_result_info) + MORE];
    for (int longer = 0; longer < 2; longer++) {
        fanin_result_info *info = (void *)room;
        size_t given = longer ? sizeof room : size;
        memset(room, UNSET, sizeof room);
        memcpy(room, &given, sizeof given);
        fanin_result_get(result, info);
        assert_int_equal(info->struct_size, given);
        assert_int_equal(info->step, 3);
        for (size_t i = longer ? sizeof *info : size; i < sizeof room; i++)
            assert_int_equal(room[i], UNSET);
    }
}

static float published[20] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, landed[20];

/* The same as a session, which needs neither options nor tensors once it has begun. */
static void read_in_parts(fanin_client *client, void *how, uint8_t *to)
{
    fanin_session *session = NULL;
    fanin_result *result;
    assert_int_equal(fanin_client_begin(client, how, (void *)to, 2, &session, NULL),
                     FANIN_OK);
    free(to);
    free(how);
    memset(landed, 0, sizeof landed);
    for (size_t i = 2; i-- > 0;)
        assert_int_equal(fanin_session_read(session, i, 1, NULL), FANIN_OK);
    assert_int_equal(fanin_session_end(&session, &result, NULL), FANIN_OK);
    assert_memory_equal(landed, published, sizeof landed);
    get_result(result);
    fanin_result_free(&result);
}

TEST(puts_commits_pulls_and_results)
{
    static const size_t sizes[] = {sizeof(fanin_client_config),
                                   sizeof(fanin_client_config) + MORE};
    fanin_box boxes[2];
    fanin_server *server = start_server();
    uint8_t *given = two_tensors(boxes, published);
    assert_int_equal(fanin_server_put(server, "lora:0", (void *)given, 2, false, NULL),
                     FANIN_OK);
    size_t less = TENSOR_LEAST - 1;
    memcpy(given, &less, sizeof less);
    assert_int_equal(fanin_server_put(server, "lora:1", (void *)given, 1, false, NULL),
                     FANIN_ERR_ARGUMENT);
    free(given);
    commit(server);
    for (size_t i = 0; i < 2; i++) {
        fanin_client *client = connect_client(server, sizes[i]);
        fanin_pull_options options;
        fanin_pull_options_init(&options, sizeof options);
        options.publication = "lora:0";
        void *how = as_known(&options, sizeof options, sizeof options + i * MORE);
        uint8_t *to = two_tensors(boxes, landed);
        fanin_result *result;
        memset(landed, 0, sizeof landed);
        assert_int_equal(fanin_client_pull(client, how, (void *)to, 2, &result, NULL),
                         FANIN_OK);
        assert_memory_equal(landed, published, sizeof landed);
        get_result(result);
        fanin_result_free(&result);
        read_in_parts(client, how, to);
        fanin_client_destroy(&client);
    }
    fanin_server_destroy(&server, 0);
}
