/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Worlds that must be refused. Every refusal has a status that says whose fault it is, and
 * words and fields that name the culprit (rank, address, key) and what to do. Of catalogs that
 * differ test_tables.c tells, of steps that do not come test_agree.c.
 */
#include "ends.h"
#include "testing.h"
#include <sys/fsuid.h>
#include <sys/stat.h>

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

static trainer t;
static fanin_error error = FANIN_ERROR_INIT;

static void start_rank(uint32_t slot, const twist *odd)
{
    static const twist even = {-1, 0, 0, NULL};
    const twist *w = odd ? odd : &even;
    fanin_server_config config = make_server_config();
    memset(config.world_id, w->world ? w->world : 0x11, sizeof config.world_id);
    config.rank = w->rank >= 0 ? (uint32_t)w->rank : slot;
    config.world_size = w->world_size ? (uint32_t)w->world_size : RANKS;
    if (w->name)
        config.name = w->name;
    t.servers[slot] = make_server(&config, t.addresses[slot], sizeof t.addresses[slot]);
    t.list[slot] = t.addresses[slot];
}

static void start_ranks(uint32_t odd_one, const twist *odd)
{
    for (uint32_t i = 0; i < RANKS; i++)
        start_rank(i, i == odd_one ? odd : NULL);
}

/* Rows first .. first + rows - 1 of a float matrix. */
static void put(uint32_t slot, const char *name, uint64_t all_rows, uint64_t first,
                uint64_t rows)
{
    fanin_box box;
    fanin_tensor tensor = make_tensor(name, FANIN_DTYPE_F32, all_rows, COLUMNS, &box,
                                      t.memory[slot][t.used[slot]]);
    box.offset[0] = first;
    box.extent[0] = rows;
    tensor.n_boxes = rows > 0;
    t.used[slot] += (unsigned)rows;
    assert_true(t.used[slot] <= 16);
    assert_ok(fanin_server_put(t.servers[slot], "lora:0", &tensor, 1, false, &error),
              error);
}

static void commit(uint32_t slot, uint64_t step)
{
    fanin_server *s = t.servers[slot];
    if (step > 1)
        assert_ok(fanin_server_begin_update(s, "lora:0", &error), error);
    assert_ok(fanin_server_commit(s, "lora:0", step, NULL, &error), error);
}

#define LAYER "base_model.model.layers.0.q_proj"
#define LORA_A LAYER ".lora_A.weight"
#define LORA_B LAYER ".lora_B.weight"

/* The shards of a good rank: lora_A [8, 8] as 3, 3, 2 rows, lora_B [10, 8] as 4, 4, 2. */
static void put_good(uint32_t slot)
{
    static const fanin_pair pairs[] = {
        {"base_model_name_or_path", "test/model"}, {"lora_alpha", "8"}, {"r", "8"}};
    put(slot, LORA_A, 8, slot * 3, slot < 2 ? 3 : 2);
    put(slot, LORA_B, 10, slot * 4, slot < 2 ? 4 : 2);
    assert_ok(fanin_server_set_metadata(t.servers[slot], "lora:0", pairs, 3, &error),
              error);
}

static void start_good(void)
{
    for (uint32_t i = 0; i < RANKS; i++) {
        start_rank(i, NULL);
        put_good(i);
        commit(i, 1);
    }
}

static void stop(void)
{
    for (uint32_t i = 0; i < RANKS; i++)
        fanin_server_destroy(&t.servers[i], 0);
    memset(t.used, 0, sizeof t.used);
}

static int tear_down(void **state)
{
    stop();
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, tear_down)

/* ------------------------------------------------------------------ client */

static fanin_status try_connect(size_t count, const fanin_client_config *config)
{
    fanin_client *client = make_client(config);
    error = (fanin_error)FANIN_ERROR_INIT;
    fanin_status status = fanin_client_connect(client, t.list, count, 5000, &error);
    fanin_client_destroy(&client);
    return status;
}

static fanin_client *connected(void)
{
    return connect_client(NULL, t.list, RANKS);
}

static fanin_pull_options any_step(void)
{
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    options.timeout_ms = 5000;
    return options;
}

/* Pulls one whole matrix, described by the caller. */
static fanin_status pull_as(fanin_client *client, const fanin_pull_options *options,
                            const char *name, fanin_dtype dtype, uint64_t rows)
{
    static double memory[32][COLUMNS];
    fanin_box box;
    fanin_tensor tensor = make_tensor(name, dtype, rows, COLUMNS, &box, memory);
    fanin_pull_options defaults = any_step();
    error = (fanin_error)FANIN_ERROR_INIT;
    return fanin_client_pull(client, options ? options : &defaults, &tensor, 1, NULL,
                             &error);
}

static fanin_status pull_b(fanin_client *client, const fanin_pull_options *options)
{
    return pull_as(client, options, LORA_B, FANIN_DTYPE_F32, 10);
}

/* Pulls lora_B from ranks that connected without complaint. */
static fanin_status pull_from(void)
{
    fanin_client *client = connected();
    fanin_status status = pull_b(client, NULL);
    fanin_client_destroy(&client);
    return status;
}

/* Whatever is refused, the error says what to do about it. */
static void expect(fanin_status got, fanin_status wanted, const char *words)
{
    if (got != wanted)
        fail_msg("%s instead of %s: %s", fanin_status_name(got),
                 fanin_status_name(wanted), error.message);
    assert_int_equal(error.status, wanted);
    assert_says(error.message, words);
    assert_true(error.remedy[0]);
}

/* It is this rank's. */
static void expect_of(fanin_status got, fanin_status wanted, const char *words,
                      int32_t rank)
{
    expect(got, wanted, words);
    assert_int_equal(error.rank, rank);
    assert_string_equal(error.address, t.addresses[rank]);
}

/* ------------------------------------------------------------ the worlds */

CASE(test_rank_missing)
{
    start_good();
    fanin_client *client = connected();
    fanin_server_destroy(&t.servers[1], 0);

    /* known from before: by its rank */
    expect_of(pull_b(client, NULL), FANIN_ERR_UNREACHABLE, "rank 1", 1);
    assert_string_equal(error.key, LORA_A); /* the first that lacks something */
    fanin_client_destroy(&client);

    /* never seen: by its address */
    expect(pull_from(), FANIN_ERR_UNREACHABLE, t.addresses[1]);
    assert_string_equal(error.address, t.addresses[1]);
    assert_string_equal(error.key, LORA_A);

    /* all missing: connect itself fails */
    stop();
    expect(try_connect(RANKS, NULL), FANIN_ERR_UNREACHABLE, t.addresses[0]);
    assert_string_equal(error.address, t.addresses[0]);
}

CASE(test_too_few_addresses)
{
    start_good();
    expect(try_connect(2, NULL), FANIN_ERR_WORLD, "3, but 2 addresses");
}

CASE(test_world_size)
{
    start_ranks(1, &(twist){.rank = -1, .world_size = 4});
    expect_of(try_connect(RANKS, NULL), FANIN_ERR_WORLD, "world size is 4", 1);
}

CASE(test_world_id)
{
    start_ranks(2, &(twist){.rank = -1, .world = 0x22});
    expect_of(try_connect(RANKS, NULL), FANIN_ERR_WORLD, "rank 2", 2);
    assert_says(error.message, "another world (launch) than ranks 0-1 "
                               "(1111111111111111)");
    assert_says(error.message, "(2222222222222222)");

    /* One whole world that is not the one that was demanded. */
    fanin_server_destroy(&t.servers[2], 0);
    start_rank(2, NULL);
    fanin_client_config config = make_client_config();
    memset(config.world_id, 0x33, sizeof config.world_id);
    expect(try_connect(RANKS, &config), FANIN_ERR_WORLD, "demanded");
    memset(config.world_id, 0x11, sizeof config.world_id);
    assert_ok(try_connect(RANKS, &config), error);
}

CASE(test_rank_twice)
{
    start_ranks(2, &(twist){.rank = 0});
    expect(try_connect(RANKS, NULL), FANIN_ERR_WORLD, "twice");
    assert_int_equal(error.rank, 0);
    assert_says(error.message, t.addresses[0]);
    assert_says(error.message, t.addresses[2]);

    t.list[2] = t.addresses[1];
    expect(try_connect(RANKS, NULL), FANIN_ERR_ARGUMENT, "given twice");
    assert_string_equal(error.address, t.addresses[1]);
}

CASE(test_server_name)
{
    start_ranks(1, &(twist){.rank = -1, .name = "other_job"});
    fanin_client_config config = make_client_config();
    config.server_name = "lora_param_server";
    expect_of(try_connect(RANKS, &config), FANIN_ERR_WORLD, "other_job_1", 1);
}

/* ---------------------------------------------------- what the caller asks for */

CASE(test_wrong_wishes)
{
    start_good();
    fanin_client *client = connected();
    expect(pull_as(client, NULL, LORA_B, FANIN_DTYPE_F16, 10), FANIN_ERR_MISMATCH,
           "F32, not as F16");
    assert_string_equal(error.key, LORA_B);
    expect(pull_as(client, NULL, LORA_B, FANIN_DTYPE_F32, 11), FANIN_ERR_MISMATCH,
           "another global shape: as [");
    assert_string_equal(error.key, LORA_B);
    expect(pull_as(client, NULL, "nonsense", FANIN_DTYPE_F32, 10), FANIN_ERR_NOT_FOUND,
           "name");
    assert_string_equal(error.key, "nonsense");

    fanin_pull_options options = any_step();
    options.publication = "lora:7";
    expect(pull_b(client, &options), FANIN_ERR_NOT_FOUND, "lora:7");
    assert_says(error.message, "lora:0"); /* what there is instead */
    assert_true(error.rank >= 0);

    /* and after all of that the client still works */
    assert_ok(pull_b(client, NULL), error);
    fanin_client_destroy(&client);
}

/* A directory of this test's own below $TMPDIR; removed with what tests leave in it. */
static void make_scratch(char path[64])
{
    const char *root = getenv("TMPDIR");
    snprintf(path, 64, "%.40s/fanin-refuse-XXXXXX", root && root[0] ? root : "/tmp");
    assert_non_null(mkdtemp(path));
}

static fanin_status pull_directory(const char *directory)
{
    fanin_client *client = connected();
    fanin_pull_options options = any_step();
    error = (fanin_error)FANIN_ERROR_INIT;
    fanin_status status =
        fanin_client_pull_adapter(client, &options, directory, NULL, &error);
    fanin_client_destroy(&client);
    return status;
}

/* As by a mount that gives files to others than who makes them. */
CASE(test_directory_of_other_owners)
{
    char scratch[64], path[128];
    if (geteuid() != 0)
        skip();
    start_good();
    make_scratch(scratch);
    snprintf(path, sizeof path, "%s/adapter", scratch);
    assert_int_equal(chmod(scratch, 01777), 0);
    setfsuid(65534);
    fanin_status status = pull_directory(path);
    setfsuid(0);
    expect(status, FANIN_ERR_IO, "a file that was just made beside");
    assert_says(error.message, "65534");
    assert_says(error.remedy, "root_squash");
    assert_int_equal(rmdir(scratch), 0); /* nothing was left behind */
}

CASE(test_callbacks_absent)
{
    start_good();
    fanin_client *client = connect_client(NULL, t.list, RANKS);
    const fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    const fanin_status all[] = {
        fanin_client_ranks(client, NULL, NULL, &error),
        fanin_client_list(client, 1000, NULL, NULL, &error),
        fanin_client_ping(client, 1000, NULL, NULL, &error),
        fanin_client_stats(client, NULL, 1000, NULL, NULL, &error),
        fanin_client_catalog(client, "lora:0", NULL, 1000, NULL, NULL, &error),
        fanin_client_metadata(client, "lora:0", 1000, NULL, NULL, &error),
        fanin_client_adapter_config(client, &options, NULL, NULL, &error),
        fanin_client_watch(client, "lora:0", 1000, NULL, NULL, &error),
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        assert_int_equal(all[i], FANIN_ERR_ARGUMENT);
    assert_says(error.message, "there is no callback");
    fanin_client_destroy(&client);
}
