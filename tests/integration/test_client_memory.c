/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A client's allocations fail, the first, the second, ... of a call, and all behind it: the call
 * says that this process has no memory and blames nobody else, and the next call of the same client
 * works. Linked with --wrap; under AddressSanitizer nothing leaks either.
 */
#include "ends.h"
#include "failing_memory.h"
#include "local_world.h"
#include "testing.h"

#include <jansson.h>

#define RANKS 3
#define CALLS_MOST 20000
#define TENSOR 0 /* of world_lora */
#define ANOTHER 1

static world served;
static char root[] = "/tmp/fanin-memory-XXXXXX";

typedef fanin_status (*call_fn)(fanin_client *client, fanin_error *error);

static fanin_status pull_tensor(fanin_client *client, unsigned index,
                                fanin_error *error)
{
    static uint8_t bytes[1 << 16];
    const world_tensor *t = &served.tensors[index];
    fanin_box box = {.address = bytes};
    fanin_tensor tensor = world_boxes(t, &box, 1);
    assert_true(world_bytes(t) <= sizeof bytes);
    memcpy(box.extent, t->shape, sizeof box.extent);
    const fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    memset(bytes, 0xee, sizeof bytes);
    fanin_status status = fanin_client_pull(client, &options, &tensor, 1, NULL, error);
    if (status == FANIN_OK)
        world_check(&served, index, served.ranks[0].step, bytes);
    return status;
}

static fanin_status pull_memory(fanin_client *client, fanin_error *error)
{
    return pull_tensor(client, TENSOR, error);
}

/* Two tensors, a read each. */
static fanin_status pull_session(fanin_client *client, fanin_error *error)
{
    static uint8_t bytes[2][1 << 16];
    fanin_tensor tensors[2];
    fanin_box boxes[2] = {{.address = bytes[0]}, {.address = bytes[1]}};
    const fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    fanin_session *session = NULL;
    for (unsigned i = 0; i < 2; i++) {
        const world_tensor *t = &served.tensors[TENSOR + i];
        assert_true(world_bytes(t) <= sizeof bytes[i]);
        memcpy(boxes[i].extent, t->shape, sizeof boxes[i].extent);
        tensors[i] = world_boxes(t, &boxes[i], 1);
    }
    memset(bytes, 0xee, sizeof bytes);
    fanin_status status =
        fanin_client_begin(client, &options, tensors, 2, &session, error);
    for (size_t i = 0; i < 2 && status == FANIN_OK; i++)
        status = fanin_session_read(session, i, 1, error);
    if (status == FANIN_OK)
        status = fanin_session_end(&session, NULL, error);
    for (unsigned i = 0; i < 2 && status == FANIN_OK; i++)
        world_check(&served, TENSOR + i, served.ranks[0].step, bytes[i]);
    fanin_session_abandon(&session);
    return status;
}

/* Described once, pulled twice. */
static fanin_status pull_prepared(fanin_client *client, fanin_error *error)
{
    static uint8_t bytes[1 << 16];
    const world_tensor *t = &served.tensors[TENSOR];
    fanin_box box = {.address = bytes};
    fanin_tensor tensor = world_boxes(t, &box, 1);
    fanin_destination *into = NULL;
    assert_true(world_bytes(t) <= sizeof bytes);
    memcpy(box.extent, t->shape, sizeof box.extent);
    const fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    fanin_status status = fanin_destination_create(&tensor, 1, &into, error);
    for (int i = 0; i < 2 && status == FANIN_OK; i++) {
        memset(bytes, 0xee, sizeof bytes);
        status = fanin_client_pull_into(client, &options, into, NULL, error);
        if (status == FANIN_OK)
            world_check(&served, TENSOR, served.ranks[0].step, bytes);
    }
    fanin_destination_free(&into);
    return status;
}

static void remove_directory(const char *directory)
{
    static const char *const files[] = {"adapter_model.safetensors",
                                        "adapter_config.json", "fanin.json"};
    char path[128];
    for (size_t i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", directory, files[i]);
        (void)unlink(path);
    }
    assert_int_equal(rmdir(directory), 0);
}

static fanin_status pull_directory(fanin_client *client, fanin_error *error)
{
    char directory[64];
    snprintf(directory, sizeof directory, "%s/adapter", root);
    const fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    fanin_status status =
        fanin_client_pull_adapter(client, &options, directory, NULL, error);
    if (status == FANIN_OK)
        remove_directory(directory);
    assert_int_equal(access(directory, F_OK),
                     -1); /* what failed has published nothing */
    return status;
}

static bool next_rank(void *cookie, const fanin_publication_info *info)
{
    ++*(unsigned *)cookie;
    return true;
}

static fanin_status list_all(fanin_client *client, fanin_error *error)
{
    unsigned ranks = 0;
    return fanin_client_list(client, 20000, next_rank, &ranks, error);
}

static fanin_status connect_again(fanin_client *client, fanin_error *error)
{
    return fanin_client_connect(client, served.address_list, served.size, 20000, error);
}

static void check_good(call_fn call, fanin_client *client, long calls)
{
    fanin_error error = FANIN_ERROR_INIT;
    if (call(client, &error) != FANIN_OK)
        fail_msg("after allocation %ld had failed: %s", calls, error.message);
}

static void check(call_fn call)
{
    bool failed = true;
    long calls = 0;
    for (; failed; calls++) {
        fanin_client *client = world_client(&served, FANIN_PATH_STREAM);
        fanin_error error = FANIN_ERROR_INIT;
        assert_true(calls < CALLS_MOST);
        failing_memory_start(calls, true);
        fanin_status status = call(client, &error);
        failed = failing_memory_stop();
        if (status != FANIN_OK &&
            (status != FANIN_ERR_MEMORY || error.rank != -1 || !failed))
            fail_msg("allocation %ld: %s (rank %d): %s", calls,
                     fanin_status_name(status), (int)error.rank, error.message);
        if (call == connect_again && status != FANIN_OK)
            check_good(connect_again, client, calls);
        check_good(pull_memory, client, calls);
        fanin_client_destroy(&client);
    }
    assert_true(calls > 3);
}

TEST(pulls_recover)
{
    check(pull_memory);
}

/* One allocation fails and all behind it succeed: what was left out for want of memory must not be
   missed later, as a silence of the rank or as other bytes. */
TEST(single_failures_blame_nobody)
{
    fanin_client *client = world_client(&served, FANIN_PATH_STREAM);
    bool failed = true;
    check_good(pull_memory, client, 0);
    for (long calls = 0; failed; calls++) {
        assert_true(calls < CALLS_MOST);
        for (unsigned index = TENSOR; index <= ANOTHER; index++) {
            fanin_error error = FANIN_ERROR_INIT;
            failing_memory_start(calls, false);
            fanin_status status = pull_tensor(client, index, &error);
            failed = failing_memory_stop();
            if (status != FANIN_OK && (status != FANIN_ERR_MEMORY || !failed))
                fail_msg("allocation %ld: %s: %s", calls, fanin_status_name(status),
                         error.message);
        }
    }
    fanin_client_destroy(&client);
}

TEST(directories_recover)
{
    check(pull_directory);
}

TEST(sessions_recover)
{
    check(pull_session);
}

TEST(prepared_destinations_recover)
{
    check(pull_prepared);
}

/* ------------------------------------------------------------------ by patches */

#define PATCHED 3 /* of world_lora: 60 KB */

/* A trainer that keeps patches, and a destination that holds a step of it. */
typedef struct patched {
    world w;
    uint64_t step;
    uint8_t bytes[1 << 16];
    fanin_client *client;
    fanin_destination *into;
} patched;

static bool holds_step(const patched *p, uint64_t step)
{
    for (uint64_t i = 0; i < world_bytes(&p->w.tensors[PATCHED]); i++) {
        if (p->bytes[i] != world_byte(&p->w, PATCHED, step, i))
            return false;
    }
    return true;
}

static fanin_status pull_patches(patched *p, uint64_t *base, fanin_error *error)
{
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    fanin_result_info info = {.struct_size = sizeof info};
    fanin_result *result = NULL;
    options.deltas = options.verify = true;
    fanin_status status =
        fanin_client_pull_into(p->client, &options, p->into, &result, error);
    fanin_result_get(result, &info);
    fanin_result_free(&result);
    *base = info.base_step;
    return status;
}

static void commit_patch(patched *p)
{
    world_commit(&p->w, ++p->step);
}

static void patched_start(patched *p)
{
    uint64_t base;
    *p = (patched){.w = {.snapshots = true, .deltas = 4, .flags = FANIN_SERVER_NO_UCX}};
    world_begin(&p->w, 2, CUT_CHUNK0, p->step = 1);
    const world_tensor *t = &p->w.tensors[PATCHED];
    fanin_box box = {.extent = {t->shape[0], t->shape[1]}, .address = p->bytes};
    fanin_tensor tensor = world_boxes(t, &box, 1);
    p->client = world_client(&p->w, FANIN_PATH_STREAM);
    assert_works(fanin_destination_create(&tensor, 1, &p->into, ERROR));
    assert_works(pull_patches(p, &base, ERROR));
    commit_patch(p);
    assert_works(pull_patches(p, &base, ERROR));
    assert_int_equal(base, 1);
}

static void patched_stop(patched *p)
{
    fanin_destination_free(&p->into);
    fanin_client_destroy(&p->client);
    world_stop(&p->w);
}

/* The destination holds one step or the next, whichever allocation fails, and the next pull mends
   the rest. */
static void check_patches(bool all_after)
{
    static patched p;
    bool failed = true;
    patched_start(&p);
    for (long calls = 0; failed; calls++) {
        fanin_error error = FANIN_ERROR_INIT;
        uint64_t base;
        assert_true(calls < CALLS_MOST);
        commit_patch(&p);
        failing_memory_start(calls, all_after);
        fanin_status status = pull_patches(&p, &base, &error);
        failed = failing_memory_stop();
        if (status != FANIN_OK && (status != FANIN_ERR_MEMORY || !failed))
            fail_msg("allocation %ld: %s: %s", calls, fanin_status_name(status),
                     error.message);
        if (!holds_step(&p, p.step) &&
            (status == FANIN_OK || !holds_step(&p, p.step - 1)))
            fail_msg("allocation %ld: the destination holds no step", calls);
        if (status != FANIN_OK)
            assert_works(pull_patches(&p, &base, ERROR));
        assert_true(holds_step(&p, p.step));
    }
    patched_stop(&p);
}

TEST(patches_recover)
{
    check_patches(true);
}

TEST(patches_of_single_failures)
{
    check_patches(false);
}

TEST(listing_recovers)
{
    check(list_all);
}

TEST(connecting_recovers)
{
    check(connect_again);
}

static int set_up(void **state)
{
    served.flags = FANIN_SERVER_NO_UCX;
    json_set_alloc_funcs(malloc, free); /* the wrapped ones, for JSON as well */
    world_begin(&served, RANKS, CUT_CHUNK0, 7);
    return mkdtemp(root) ? 0 : -1;
}

static int tear_down(void **state)
{
    world_stop(&served);
    return rmdir(root);
}

TESTS_BETWEEN(set_up, tear_down)
