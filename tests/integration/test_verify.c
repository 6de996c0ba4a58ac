/* SPDX-License-Identifier: Apache-2.0 */
/* Pulls that compare with the ranks' digests: every path and cut, and what is unequal. */
#include "ends.h"
#include "local_world.h"
#include "rank_proxy.h"
#include "testing.h"
#include "verify_scene.h"
#include <dirent.h>
#include <jansson.h>
#include <sys/stat.h>

static fanin_pull_options asked(void)
{
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
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
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
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

TEST(stream_is_verified)
{
    pull_every_cut(FANIN_PATH_STREAM);
}

TEST(cma_is_verified)
{
    if (!world_has_cma())
        skip();
    pull_every_cut(FANIN_PATH_CMA);
}

/* ------------------------------------------------- one rank behind a proxy */

static float published[2 * SCENE_FLOATS];

static void set_scene(verify_scene *s, void (*trigger)(void *))
{
    scene_start(s, published, published, trigger);
}

TEST(conversions_are_verified)
{
    static const fanin_dtype dtypes[] = {0, FANIN_DTYPE_BF16, FANIN_DTYPE_F16};
    static uint8_t landed[SCENE_BYTES];
    verify_scene s;
    set_scene(&s, scene_leave_alone);
    for (int i = 0; i < 6; i++) {
        fanin_error error = FANIN_ERROR_INIT;
        fanin_result_info info;
        int64_t row = SCENE_COLUMNS * (dtypes[i / 2] ? 2 : 4);
        /* packed, and with gaps between the rows */
        assert_ok(
            scene_pull(&s, dtypes[i / 2], landed, i % 2 ? 2 * row : row, &info, &error),
            error);
        assert_true(info.verified);
    }
    scene_stop(&s);
}

TEST(unequal_bytes_are_named)
{
    static float landed[SCENE_FLOATS];
    for (int i = 0; i < 2; i++) {
        verify_scene s;
        fanin_error error = FANIN_ERROR_INIT;
        fanin_result_info info;
        set_scene(&s, scene_write_in_silence);
        fanin_status status = scene_pull(&s, i ? FANIN_DTYPE_BF16 : 0, landed,
                                         SCENE_COLUMNS * (i ? 2 : 4), &info, &error);
        scene_assert_unequal(&s, status, SCENE_A, &error);
        assert_true(atomic_load(&s.proxy.triggered));
        scene_stop(&s);
    }
}

static void write_the_last(void *scene)
{
    verify_scene *s = scene;
    float *last = &s->floats[2 * SCENE_FLOATS - 1];
    *last = -*last;
}

static void want_both(fanin_tensor wanted[2], fanin_box boxes[2],
                      uint8_t landed[SCENE_BYTES])
{
    wanted[0] = make_tensor(SCENE_A, FANIN_DTYPE_F32, SCENE_ROWS, SCENE_COLUMNS,
                            &boxes[0], landed);
    wanted[1] = make_tensor(SCENE_B, FANIN_DTYPE_F32, SCENE_COLUMNS, SCENE_ROWS,
                            &boxes[1], landed + SCENE_BYTES / 2);
}

/* The last of those that are asked for at once. */
TEST(the_last_tensor_is_compared_too)
{
    static uint8_t landed[SCENE_BYTES];
    fanin_error error = FANIN_ERROR_INIT;
    fanin_pull_options options = asked();
    fanin_box boxes[2];
    fanin_tensor wanted[2];
    verify_scene s;
    want_both(wanted, boxes, landed);
    set_scene(&s, write_the_last);
    fanin_status status =
        fanin_client_pull(s.client, &options, wanted, 2, NULL, &error);
    scene_assert_unequal(&s, status, SCENE_B, &error);
    scene_stop(&s);
}

TEST(an_update_is_only_stale)
{
    static float landed[SCENE_FLOATS];
    verify_scene s;
    fanin_result_info info;
    set_scene(&s, scene_update);
    assert_works(scene_pull(&s, 0, landed, SCENE_COLUMNS * 4, &info, ERROR));
    assert_int_equal(info.step, 2);
    assert_int_equal(info.stale, 1);
    assert_true(info.verified);
    assert_memory_equal(landed, published, sizeof landed);
    scene_stop(&s);
}

typedef struct beginning {
    rank_proxy proxy;
    unsigned connections; /* that were made by then */
} beginning;

static unsigned count_connections(const rank_proxy *p)
{
    return atomic_load(&p->accepted[0]) + atomic_load(&p->accepted[1]);
}

static void note_connections(void *cookie)
{
    beginning *b = cookie;
    b->connections = count_connections(&b->proxy);
}

/* Digests come by data connections, whatever the bytes come by. */
TEST(connections_are_made_before_leases)
{
    fanin_pull_options options = asked();
    fanin_client_config config;
    fanin_client_config_init(&config, sizeof config);
    config.no_ucx = true;
    for (int i = world_has_cma() ? 0 : 1; i < 2; i++) {
        fanin_error error = FANIN_ERROR_INIT;
        fanin_result_info info;
        world w = {0};
        beginning b = {.connections = 0};
        world_begin(&w, 1, CUT_CHUNK0, 1);
        rank_proxy_start(&b.proxy, fanin_server_port(w.ranks[0].server), MSG_BEGIN,
                         note_connections, &b);
        w.address_list[0] = b.proxy.address;
        config.path = i == 0 ? FANIN_PATH_CMA : FANIN_PATH_STREAM;
        fanin_client *client = world_client_with(&w, &config);
        assert_ok(world_pull(&w, client, &options, &info, &error), error);
        assert_true(info.verified);
        assert_int_equal(info.path, config.path);
        assert_true(b.connections >= 2); /* control and data */
        assert_int_equal(b.connections, count_connections(&b.proxy));
        fanin_client_destroy(&client);
        rank_proxy_stop(&b.proxy);
        world_stop(&w);
    }
}

/* ------------------------------------------------------------- directories */

static const char *const files[] = {"adapter_model.safetensors", "adapter_config.json",
                                    "fanin.json"};

static void make_scratch(char path[64])
{
    const char *root = getenv("TMPDIR");
    snprintf(path, 64, "%.40s/fanin-verify-XXXXXX", root && root[0] ? root : "/tmp");
    assert_non_null(mkdtemp(path));
}

/* Entries of the directory, hidden ones too: locks and temporary files are found. */
static unsigned entries_of(const char *directory)
{
    unsigned n = 0;
    DIR *dir = opendir(directory);
    assert_non_null(dir);
    while (readdir(dir))
        n++;
    closedir(dir);
    return n - 2; /* . and .. */
}

static void remove_adapter(const char *directory)
{
    char path[128];
    for (size_t i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", directory, files[i]);
        assert_int_equal(unlink(path), 0);
    }
    assert_int_equal(rmdir(directory), 0);
}

/* fanin.json's. */
static bool says_verified(const char *directory)
{
    char path[128];
    snprintf(path, sizeof path, "%s/fanin.json", directory);
    json_t *root = json_load_file(path, 0, NULL);
    const json_t *verified = json_object_get(root, "verified");
    assert_true(json_is_boolean(verified));
    bool says = json_is_true(verified);
    json_decref(root);
    return says;
}

TEST(directories_say_what_was_done)
{
    char scratch[64], directory[96];
    verify_scene s;
    make_scratch(scratch);
    set_scene(&s, scene_leave_alone);
    for (int verify = 0; verify < 2; verify++) {
        fanin_error error = FANIN_ERROR_INIT;
        fanin_result_info info;
        snprintf(directory, sizeof directory, "%s/%d", scratch, verify);
        assert_ok(scene_pull_directory(&s, directory, verify, &info, &error), error);
        assert_int_equal(info.verified, verify);
        assert_int_equal(says_verified(directory), verify);
        remove_adapter(directory);
    }
    scene_stop(&s);
    assert_int_equal(rmdir(scratch), 0);
}

/* Nothing of it is left, and the directory of an earlier step is as it was. */
TEST(unequal_directories_are_not_published)
{
    char scratch[64], older[96], newer[96], file[128];
    struct stat before[3], after;
    fanin_error error = FANIN_ERROR_INIT;
    fanin_result_info info;
    verify_scene s;
    make_scratch(scratch);
    snprintf(older, sizeof older, "%s/older", scratch);
    snprintf(newer, sizeof newer, "%s/newer", scratch);
    set_scene(&s, scene_write_in_silence);
    assert_ok(scene_pull_directory(&s, older, false, &info, &error), error);
    for (size_t i = 0; i < 3; i++) {
        snprintf(file, sizeof file, "%s/%s", older, files[i]);
        assert_int_equal(stat(file, &before[i]), 0);
    }
    fanin_status status = scene_pull_directory(&s, newer, true, &info, &error);
    scene_assert_unequal(&s, status, SCENE_A, &error);
    assert_int_equal(entries_of(scratch), 1);
    for (size_t i = 0; i < 3; i++) {
        snprintf(file, sizeof file, "%s/%s", older, files[i]);
        assert_int_equal(stat(file, &after), 0);
        assert_int_equal(after.st_ino, before[i].st_ino);
        assert_int_equal(after.st_mtim.tv_sec, before[i].st_mtim.tv_sec);
        assert_int_equal(after.st_mtim.tv_nsec, before[i].st_mtim.tv_nsec);
    }
    assert_false(says_verified(older));
    /* Nothing writes any more, so the next pull is good. */
    assert_ok(scene_pull_directory(&s, newer, true, &info, &error), error);
    assert_true(info.verified && says_verified(newer));
    scene_stop(&s);
    remove_adapter(older);
    remove_adapter(newer);
    assert_int_equal(rmdir(scratch), 0);
}

/* The part that is unequal is named by the read that brought it, and the session is over. */
TEST(parts_of_sessions_are_verified)
{
    static uint8_t landed[SCENE_BYTES];
    fanin_error error = FANIN_ERROR_INIT;
    fanin_pull_options options = asked();
    fanin_session *session = NULL;
    fanin_box boxes[2];
    fanin_tensor wanted[2];
    verify_scene s;
    want_both(wanted, boxes, landed);
    set_scene(&s, scene_write_in_silence);
    assert_ok(fanin_client_begin(s.client, &options, wanted, 2, &session, &error),
              error);
    fanin_status status = fanin_session_read(session, 0, 1, &error);
    scene_assert_unequal(&s, status, SCENE_A, &error);
    assert_int_equal(fanin_session_read(session, 1, 1, &error), FANIN_ERR_TRANSPORT);
    assert_int_equal(fanin_session_end(&session, NULL, &error), FANIN_ERR_TRANSPORT);
    assert_string_equal(error.key, SCENE_A);
    scene_stop(&s);
}
