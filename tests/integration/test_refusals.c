/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Worlds that must be refused. Every refusal has a status that says whose fault it is, and
 * words and fields that name the culprit (rank, address, key) and what to do.
 */
#include "testing.h"
#include <fanin/fanin.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/stat.h>
#include <unistd.h>

#define RANKS 3
#define COLUMNS 8

/* Three ranks that a test makes as wrong as it needs them. */
typedef struct trainer {
    fanin_server *servers[RANKS];
    char addresses[RANKS][32];
    const char *list[RANKS];
    float memory[RANKS][16][COLUMNS];
    unsigned used[RANKS];
} trainer;

/* What differs from a rank of a good world; zero: nothing. */
typedef struct twist {
    int32_t rank, world_size;
    uint8_t world;
    const char *name;
} twist;

static void start_rank(trainer *t, uint32_t slot, const twist *odd)
{
    static const twist even = {-1, 0, 0, NULL};
    const twist *w = odd ? odd : &even;
    fanin_error error = FANIN_ERROR_INIT;
    fanin_server_config config;
    fanin_server_config_init(&config, sizeof(config));
    memset(config.world_id, w->world ? w->world : 0x11, sizeof(config.world_id));
    config.rank = w->rank >= 0 ? (uint32_t)w->rank : slot;
    config.world_size = w->world_size ? (uint32_t)w->world_size : RANKS;
    config.flags = FANIN_SERVER_NO_UCX;
    if (w->name)
        config.name = w->name;
    assert_ok(fanin_server_create(&config, &t->servers[slot], &error), error);
    snprintf(t->addresses[slot], sizeof(t->addresses[slot]), "127.0.0.1:%u",
             (unsigned)fanin_server_port(t->servers[slot]));
    t->list[slot] = t->addresses[slot];
}

/* Rows first .. first + rows - 1 of a float matrix. */
static void put(trainer *t, uint32_t slot, const char *name, uint64_t all_rows,
                uint64_t first, uint64_t rows)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_box box = {.offset = {first},
                     .extent = {rows, COLUMNS},
                     .address = t->memory[slot][t->used[slot]]};
    fanin_tensor tensor = {.struct_size = sizeof(tensor),
                           .name = name,
                           .dtype = FANIN_DTYPE_F32,
                           .n_dims = 2,
                           .shape = {all_rows, COLUMNS},
                           .boxes = &box,
                           .n_boxes = rows > 0};
    t->used[slot] += (unsigned)rows;
    assert_true(t->used[slot] <= 16);
    assert_ok(fanin_server_put(t->servers[slot], "lora:0", &tensor, 1, false, &error),
              error);
}

static void commit(trainer *t, uint32_t slot, uint64_t step)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_server *s = t->servers[slot];
    if (step > 1)
        assert_ok(fanin_server_begin_update(s, "lora:0", &error), error);
    assert_ok(fanin_server_commit(s, "lora:0", step, NULL, &error), error);
}

#define LAYER "base_model.model.layers.0.q_proj"
#define LORA_A LAYER ".lora_A.weight"
#define LORA_B LAYER ".lora_B.weight"

/* The shards of a good rank: lora_A [8, 8] as 3, 3, 2 rows, lora_B [10, 8] as 4, 4, 2. */
static void put_good(trainer *t, uint32_t slot)
{
    static const fanin_pair pairs[] = {
        {"base_model_name_or_path", "test/model"}, {"lora_alpha", "8"}, {"r", "8"}};
    fanin_error error = FANIN_ERROR_INIT;
    put(t, slot, LORA_A, 8, slot * 3, slot < 2 ? 3 : 2);
    put(t, slot, LORA_B, 10, slot * 4, slot < 2 ? 4 : 2);
    assert_ok(fanin_server_set_metadata(t->servers[slot], "lora:0", pairs, 3, &error),
              error);
}

static void start_good(trainer *t)
{
    for (uint32_t i = 0; i < RANKS; i++) {
        start_rank(t, i, NULL);
        put_good(t, i);
        commit(t, i, 1);
    }
}

static void stop(trainer *t)
{
    for (uint32_t i = 0; i < RANKS; i++)
        fanin_server_destroy(&t->servers[i], 0);
}

/* ------------------------------------------------------------------ client */

static fanin_client *make_client(const fanin_client_config *given)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_client_config config;
    fanin_client_config_init(&config, sizeof(config));
    config.no_ucx = true;
    fanin_client *client = NULL;
    assert_ok(fanin_client_create(given ? given : &config, &client, &error), error);
    return client;
}

static fanin_status try_connect(const trainer *t, size_t count,
                                const fanin_client_config *config, fanin_error *error)
{
    fanin_client *client = make_client(config);
    *error = (fanin_error)FANIN_ERROR_INIT;
    fanin_status status = fanin_client_connect(client, t->list, count, 5000, error);
    fanin_client_destroy(&client);
    return status;
}

static fanin_client *connected(const trainer *t)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_client *client = make_client(NULL);
    assert_ok(fanin_client_connect(client, t->list, RANKS, 5000, &error), error);
    return client;
}

static fanin_pull_options any_step(void)
{
    fanin_pull_options options;
    fanin_pull_options_init(&options, sizeof(options));
    options.publication = "lora:0";
    options.timeout_ms = 5000;
    return options;
}

/* Pulls one whole matrix, described by the caller. */
static fanin_status pull_as(fanin_client *client, const fanin_pull_options *options,
                            const char *name, fanin_dtype dtype, uint64_t rows,
                            fanin_error *error)
{
    static double memory[32][COLUMNS];
    fanin_box box = {.extent = {rows, COLUMNS}, .address = memory};
    fanin_tensor tensor = {.struct_size = sizeof(tensor),
                           .name = name,
                           .dtype = dtype,
                           .n_dims = 2,
                           .shape = {rows, COLUMNS},
                           .boxes = &box,
                           .n_boxes = 1};
    fanin_pull_options defaults = any_step();
    *error = (fanin_error)FANIN_ERROR_INIT;
    return fanin_client_pull(client, options ? options : &defaults, &tensor, 1, NULL,
                             error);
}

/* Pulls lora_B from ranks that connected without complaint. */
static fanin_status pull_from(const trainer *t, fanin_error *error)
{
    fanin_client *client = connected(t);
    fanin_status status = pull_as(client, NULL, LORA_B, FANIN_DTYPE_F32, 10, error);
    fanin_client_destroy(&client);
    return status;
}

static void expect_words(const char *text, const char *words)
{
    if (!strstr(text, words))
        fail_msg("\"%s\" does not say \"%s\"", text, words);
}

/* Whatever is refused, the error says what to do about it. */
static void expect(fanin_status got, fanin_status wanted, const fanin_error *error,
                   const char *words)
{
    if (got != wanted)
        fail_msg("%s instead of %s: %s", fanin_status_name(got),
                 fanin_status_name(wanted), error->message);
    assert_int_equal(error->status, wanted);
    expect_words(error->message, words);
    assert_true(error->remedy[0]);
}

/* ------------------------------------------------------------ the worlds */

/* The control: nothing wrong, nothing refused. */
static void test_good(void **state)
{
    trainer t = {0};
    fanin_error error;
    start_good(&t);
    assert_ok(pull_from(&t, &error), error);
    stop(&t);
}

static void test_rank_missing(void **state)
{
    trainer t = {0};
    fanin_error error;
    start_good(&t);
    fanin_client *client = connected(&t);
    fanin_server_destroy(&t.servers[1], 0);

    /* known from before: by its rank */
    expect(pull_as(client, NULL, LORA_B, FANIN_DTYPE_F32, 10, &error),
           FANIN_ERR_UNREACHABLE, &error, "rank 1");
    assert_int_equal(error.rank, 1);
    assert_string_equal(error.address, t.addresses[1]);
    assert_string_equal(error.key, LORA_A); /* the first that lacks something */
    fanin_client_destroy(&client);

    /* never seen: by its address */
    expect(pull_from(&t, &error), FANIN_ERR_UNREACHABLE, &error, t.addresses[1]);
    assert_string_equal(error.address, t.addresses[1]);
    assert_string_equal(error.key, LORA_A);

    /* all missing: connect itself fails */
    stop(&t);
    expect(try_connect(&t, RANKS, NULL, &error), FANIN_ERR_UNREACHABLE, &error,
           t.addresses[0]);
    assert_string_equal(error.address, t.addresses[0]);
}

static void test_too_few_addresses(void **state)
{
    trainer t = {0};
    fanin_error error;
    start_good(&t);
    expect(try_connect(&t, 2, NULL, &error), FANIN_ERR_WORLD, &error,
           "3, but 2 addresses");
    stop(&t);
}

static void test_world_size(void **state)
{
    static const twist odd = {.rank = -1, .world_size = 4};
    trainer t = {0};
    fanin_error error;
    start_rank(&t, 0, NULL);
    start_rank(&t, 1, &odd);
    start_rank(&t, 2, NULL);
    expect(try_connect(&t, RANKS, NULL, &error), FANIN_ERR_WORLD, &error,
           "world size is 4");
    assert_int_equal(error.rank, 1);
    assert_string_equal(error.address, t.addresses[1]);
    stop(&t);
}

static void test_world_id(void **state)
{
    static const twist odd = {.rank = -1, .world = 0x22};
    trainer t = {0};
    fanin_error error;
    start_rank(&t, 0, NULL);
    start_rank(&t, 1, NULL);
    start_rank(&t, 2, &odd);
    expect(try_connect(&t, RANKS, NULL, &error), FANIN_ERR_WORLD, &error, "rank 2");
    expect_words(error.message, "another world (launch) than ranks 0-1 "
                                "(1111111111111111)");
    expect_words(error.message, "(2222222222222222)");
    assert_int_equal(error.rank, 2);
    assert_string_equal(error.address, t.addresses[2]);

    /* One whole world that is not the one that was demanded. */
    fanin_server_destroy(&t.servers[2], 0);
    start_rank(&t, 2, NULL);
    fanin_client_config config;
    fanin_client_config_init(&config, sizeof(config));
    memset(config.world_id, 0x33, sizeof(config.world_id));
    expect(try_connect(&t, RANKS, &config, &error), FANIN_ERR_WORLD, &error,
           "demanded");
    memset(config.world_id, 0x11, sizeof(config.world_id));
    assert_ok(try_connect(&t, RANKS, &config, &error), error);
    stop(&t);
}

static void test_rank_twice(void **state)
{
    static const twist odd = {.rank = 0};
    trainer t = {0};
    fanin_error error;
    start_rank(&t, 0, NULL);
    start_rank(&t, 1, NULL);
    start_rank(&t, 2, &odd);
    expect(try_connect(&t, RANKS, NULL, &error), FANIN_ERR_WORLD, &error, "twice");
    assert_int_equal(error.rank, 0);
    expect_words(error.message, t.addresses[0]);
    expect_words(error.message, t.addresses[2]);

    t.list[2] = t.addresses[1];
    expect(try_connect(&t, RANKS, NULL, &error), FANIN_ERR_ARGUMENT, &error,
           "given twice");
    assert_string_equal(error.address, t.addresses[1]);
    stop(&t);
}

static void test_server_name(void **state)
{
    static const twist odd = {.rank = -1, .name = "other_job"};
    trainer t = {0};
    fanin_error error;
    start_rank(&t, 0, NULL);
    start_rank(&t, 1, &odd);
    start_rank(&t, 2, NULL);
    fanin_client_config config;
    fanin_client_config_init(&config, sizeof(config));
    config.server_name = "lora_param_server";
    expect(try_connect(&t, RANKS, &config, &error), FANIN_ERR_WORLD, &error,
           "other_job_1");
    assert_int_equal(error.rank, 1);
    assert_string_equal(error.address, t.addresses[1]);
    stop(&t);
}

/* ------------------------------------------------------------- the catalogs */

static void test_hole(void **state)
{
    trainer t = {0};
    fanin_error error;
    for (uint32_t i = 0; i < RANKS; i++) {
        start_rank(&t, i, NULL);
        put(&t, i, LORA_B, 10, i * 4, i == 1 ? 3 : i < 2 ? 4 : 2); /* not row 7 */
        commit(&t, i, 1);
    }
    expect(pull_from(&t, &error), FANIN_ERR_INCOMPLETE, &error, "row 7 of 10");
    expect_words(error.message, "held by no connected rank");
    assert_string_equal(error.key, LORA_B);
    stop(&t);
}

static void test_overlap(void **state)
{
    trainer t = {0};
    fanin_error error;
    for (uint32_t i = 0; i < RANKS; i++) {
        start_rank(&t, i, NULL);
        put(&t, i, LORA_B, 10, i * 4, i == 1 ? 5 : i < 2 ? 4 : 2); /* row 8 twice */
        commit(&t, i, 1);
    }
    expect(pull_from(&t, &error), FANIN_ERR_INCOMPLETE, &error, "row 8 of 10");
    expect_words(error.message, "ranks 1 and 2 differently");
    assert_string_equal(error.key, LORA_B);
    stop(&t);
}

static void test_key_absent(void **state)
{
    trainer t = {0};
    fanin_error error;
    for (uint32_t i = 0; i < RANKS; i++) {
        start_rank(&t, i, NULL);
        put(&t, i, LORA_B, 10, i * 4, i < 2 ? 4 : 2);
        if (i != 1)
            put(&t, i, LORA_A, 8, i * 3, i < 2 ? 3 : 2);
        commit(&t, i, 1);
    }
    expect(pull_from(&t, &error), FANIN_ERR_MISMATCH, &error,
           "on rank 0 but not on rank 1");
    assert_int_equal(error.rank, 1);
    assert_string_equal(error.key, LORA_A);
    stop(&t);
}

static void test_metadata(void **state)
{
    static const fanin_pair other[] = {
        {"base_model_name_or_path", "test/model"}, {"lora_alpha", "16"}, {"r", "8"}};
    trainer t = {0};
    fanin_error error = FANIN_ERROR_INIT;
    for (uint32_t i = 0; i < RANKS; i++) {
        start_rank(&t, i, NULL);
        put_good(&t, i);
        if (i == 2)
            assert_ok(
                fanin_server_set_metadata(t.servers[i], "lora:0", other, 3, &error),
                error);
        commit(&t, i, 1);
    }
    expect(pull_from(&t, &error), FANIN_ERR_MISMATCH, &error, "lora_alpha");
    expect_words(error.message, "ranks 0 and 2");
    assert_int_equal(error.rank, 2);
    stop(&t);
}

static void put_typed(trainer *t, uint32_t slot, fanin_dtype dtype, uint64_t rows)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_box box = {.offset = {slot}, .extent = {1, 4}, .address = t->memory[slot]};
    fanin_tensor tensor = {.struct_size = sizeof(tensor),
                           .name = LORA_B,
                           .dtype = dtype,
                           .n_dims = 2,
                           .shape = {rows, 4},
                           .boxes = &box,
                           .n_boxes = 1};
    assert_ok(fanin_server_put(t->servers[slot], "lora:0", &tensor, 1, false, &error),
              error);
    commit(t, slot, 1);
}

static void test_tensors_differ(void **state)
{
    fanin_error error;
    trainer t = {0};
    for (uint32_t i = 0; i < RANKS; i++) {
        start_rank(&t, i, NULL);
        put_typed(&t, i, i == 1 ? FANIN_DTYPE_F16 : FANIN_DTYPE_F32, RANKS);
    }
    expect(pull_from(&t, &error), FANIN_ERR_MISMATCH, &error,
           "F32 on rank 0 but F16 on rank 1");
    assert_int_equal(error.rank, 1);
    assert_string_equal(error.key, LORA_B);
    stop(&t);

    trainer u = {0};
    for (uint32_t i = 0; i < RANKS; i++) {
        start_rank(&u, i, NULL);
        put_typed(&u, i, FANIN_DTYPE_F32, i == 2 ? 9 : RANKS);
    }
    expect(pull_from(&u, &error), FANIN_ERR_MISMATCH, &error, "ranks 0 and 2");
    expect_words(error.message, "global shape");
    assert_int_equal(error.rank, 2);
    assert_string_equal(error.key, LORA_B);
    stop(&u);
}

/* ---------------------------------------------------- what the caller asks for */

static void test_wrong_wishes(void **state)
{
    trainer t = {0};
    fanin_error error;
    start_good(&t);
    fanin_client *client = connected(&t);
    expect(pull_as(client, NULL, LORA_B, FANIN_DTYPE_F16, 10, &error),
           FANIN_ERR_MISMATCH, &error, "F32, not as F16");
    assert_string_equal(error.key, LORA_B);
    expect(pull_as(client, NULL, LORA_B, FANIN_DTYPE_F32, 11, &error),
           FANIN_ERR_MISMATCH, &error, "another global shape");
    assert_string_equal(error.key, LORA_B);
    expect(pull_as(client, NULL, "nonsense", FANIN_DTYPE_F32, 10, &error),
           FANIN_ERR_NOT_FOUND, &error, "name");
    assert_string_equal(error.key, "nonsense");

    fanin_pull_options options = any_step();
    options.publication = "lora:7";
    expect(pull_as(client, &options, LORA_B, FANIN_DTYPE_F32, 10, &error),
           FANIN_ERR_NOT_FOUND, &error, "lora:7");
    expect_words(error.message, "lora:0"); /* what there is instead */
    assert_true(error.rank >= 0);

    /* and after all of that the client still works */
    assert_ok(pull_as(client, NULL, LORA_B, FANIN_DTYPE_F32, 10, &error), error);
    fanin_client_destroy(&client);
    stop(&t);
}

static void test_steps(void **state)
{
    trainer t = {0};
    fanin_error error;
    start_good(&t);
    for (uint32_t i = 0; i < RANKS; i++)
        commit(&t, i, 5);
    fanin_client *client = connected(&t);
    fanin_pull_options options = any_step();
    options.rule = FANIN_STEP_EXACT;
    options.step = 3;
    expect(pull_as(client, &options, LORA_B, FANIN_DTYPE_F32, 10, &error),
           FANIN_ERR_SUPERSEDED, &error, "step 3");
    expect_words(error.message, "step 5");

    options.step = 6;
    options.timeout_ms = 200;
    expect(pull_as(client, &options, LORA_B, FANIN_DTYPE_F32, 10, &error),
           FANIN_ERR_TIMEOUT, &error, "step 6");
    expect_words(error.message, "step 5");
    assert_true(error.rank >= 0);

    /* One rank that does not follow is named, not one of those that did. */
    commit(&t, 0, 6);
    commit(&t, 2, 6);
    options.rule = FANIN_STEP_AT_LEAST;
    expect(pull_as(client, &options, LORA_B, FANIN_DTYPE_F32, 10, &error),
           FANIN_ERR_TIMEOUT, &error, "rank 1");
    assert_int_equal(error.rank, 1);
    assert_string_equal(error.address, t.addresses[1]);
    commit(&t, 1, 6);
    options.timeout_ms = 5000;
    assert_ok(pull_as(client, &options, LORA_B, FANIN_DTYPE_F32, 10, &error), error);
    fanin_client_destroy(&client);
    stop(&t);
}

/* ------------------------------------------------------------- directories */

/* A directory of this test's own below $TMPDIR; removed with what tests leave in it. */
static void make_scratch(char path[64])
{
    const char *root = getenv("TMPDIR");
    snprintf(path, 64, "%.40s/fanin-refuse-XXXXXX", root && root[0] ? root : "/tmp");
    assert_non_null(mkdtemp(path));
}

static fanin_status pull_directory(const trainer *t, const char *directory,
                                   fanin_error *error)
{
    fanin_client *client = connected(t);
    fanin_pull_options options = any_step();
    *error = (fanin_error)FANIN_ERROR_INIT;
    fanin_status status =
        fanin_client_pull_adapter(client, &options, directory, NULL, error);
    fanin_client_destroy(&client);
    return status;
}

static void test_directory_unwritable(void **state)
{
    trainer t = {0};
    fanin_error error;
    char scratch[64], path[128];
    start_good(&t);
    make_scratch(scratch);
    snprintf(path, sizeof(path), "%s/nowhere/adapter", scratch);
    expect(pull_directory(&t, path, &error), FANIN_ERR_IO, &error, path);
    assert_int_equal(error.sys_errno, ENOENT);

    /* Permissions hold for root too, once its file operations are another user's. */
    snprintf(path, sizeof(path), "%s/adapter", scratch);
    assert_int_equal(chmod(scratch, 0555), 0);
    if (geteuid() == 0)
        setfsuid(65534);
    fanin_status status = pull_directory(&t, path, &error);
    if (geteuid() == 0)
        setfsuid(0);
    assert_int_equal(status, FANIN_ERR_IO);
    assert_int_equal(error.sys_errno, EACCES);
    expect(status, FANIN_ERR_IO, &error, path);
    assert_int_equal(chmod(scratch, 0755), 0);
    assert_int_equal(rmdir(scratch), 0); /* nothing was left behind */
    stop(&t);
}

static void test_directory_occupied(void **state)
{
    trainer t = {0};
    fanin_error error;
    char scratch[64], path[128], file[160];
    start_good(&t);
    make_scratch(scratch);
    snprintf(path, sizeof(path), "%s/adapter", scratch);
    snprintf(file, sizeof(file), "%s/thesis.tex", path);
    assert_int_equal(mkdir(path, 0755), 0);
    FILE *f = fopen(file, "w");
    assert_non_null(f);
    assert_true(fputs("do not lose me", f) >= 0);
    assert_int_equal(fclose(f), 0);
    expect(pull_directory(&t, path, &error), FANIN_ERR_EXISTS, &error, "thesis.tex");
    expect_words(error.message, path);
    assert_int_equal(access(file, R_OK), 0);

    expect(pull_directory(&t, file, &error), FANIN_ERR_EXISTS, &error, "no directory");
    assert_int_equal(access(file, R_OK), 0);
    assert_int_equal(unlink(file), 0);

    /* An empty one is taken. */
    assert_ok(pull_directory(&t, path, &error), error);
    stop(&t);
    static const char *const made[] = {"adapter_model.safetensors",
                                       "adapter_config.json", "fanin.json"};
    for (size_t i = 0; i < 3; i++) {
        snprintf(file, sizeof(file), "%s/%s", path, made[i]);
        assert_int_equal(unlink(file), 0);
    }
    assert_int_equal(rmdir(path), 0);
    assert_int_equal(rmdir(scratch), 0);
}

static void test_port_in_use(void **state)
{
    trainer t = {0};
    start_rank(&t, 0, NULL);
    fanin_error error = FANIN_ERROR_INIT;
    fanin_server_config config;
    fanin_server_config_init(&config, sizeof(config));
    memset(config.world_id, 0x11, sizeof(config.world_id));
    config.rank = 1;
    config.world_size = 2;
    config.base_port = (uint16_t)(fanin_server_port(t.servers[0]) - 1);
    fanin_server *second = NULL;
    fanin_status status = fanin_server_create(&config, &second, &error);
    assert_null(second);
    const char *port = strrchr(t.addresses[0], ':') + 1;
    expect(status, FANIN_ERR_EXISTS, &error, port);
    stop(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good),
        cmocka_unit_test(test_rank_missing),
        cmocka_unit_test(test_too_few_addresses),
        cmocka_unit_test(test_world_size),
        cmocka_unit_test(test_world_id),
        cmocka_unit_test(test_rank_twice),
        cmocka_unit_test(test_server_name),
        cmocka_unit_test(test_hole),
        cmocka_unit_test(test_overlap),
        cmocka_unit_test(test_key_absent),
        cmocka_unit_test(test_metadata),
        cmocka_unit_test(test_tensors_differ),
        cmocka_unit_test(test_wrong_wishes),
        cmocka_unit_test(test_steps),
        cmocka_unit_test(test_directory_unwritable),
        cmocka_unit_test(test_directory_occupied),
        cmocka_unit_test(test_port_in_use),
    };
    return cmocka_run_group_tests_name("refusals", tests, NULL, NULL);
}
