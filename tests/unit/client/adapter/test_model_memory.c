/* SPDX-License-Identifier: Apache-2.0 */
/* Each allocation of a model's directory fails once, from its lock to its publication:
   FANIN_ERR_MEMORY, nothing is left behind, nothing leaks (run under AddressSanitizer or valgrind
   for that). Linked with --wrap. */
#include "adapter/adapter.h"
#include "failing_memory.h"
#include "testing.h"

#include <dirent.h>

enum { KEYS = 3, BYTES = 100, CALLS_MOST = 1000 };

static key_entry entries[KEYS] = {
    {.name = "model.a", .dtype = FANIN_DTYPE_U8, .n_dims = 1, .shape = {BYTES}},
    {.name = "model.b", .dtype = FANIN_DTYPE_U8, .n_dims = 1, .shape = {BYTES}},
    {.name = "model.c", .dtype = FANIN_DTYPE_U8, .n_dims = 1, .shape = {BYTES}},
};
static fanin_pair pairs[] = {
    {"config", "{\"model_type\": \"m\", \"auto_map\": {\"AutoConfig\": \"x.Y\"}}"}};
static const key_table keys = {
    .entries = entries, .count = KEYS, .pairs = pairs, .n_pairs = 1};
static const adapter_identity identity = {
    .world_id = {1}, .publication = "full:0", .step = 1};

static char root[] = "/tmp/model-memory-XXXXXX", place[64];

static int count_entries(const char *path)
{
    DIR *dir = opendir(path);
    int count = 0;
    while (dir && readdir(dir))
        count++;
    if (dir)
        closedir(dir);
    return count - 2;
}

static void remove_all(void)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", place);
    assert_int_equal(system(command), 0);
}

static fanin_status fill(adapter *a, const uint64_t *to, fanin_error *error)
{
    uint8_t *base;
    fanin_status status = adapter_map(a, &base, error);
    for (uint32_t i = 0; i < KEYS && status == FANIN_OK; i++) {
        status = adapter_need(a, to[i], BYTES, error);
        if (status != FANIN_OK)
            break;
        memset(base + to[i], (int)i, BYTES);
        adapter_landed(a, to[i], BYTES);
    }
    return status != FANIN_OK ? status : adapter_publish(a, &identity, error);
}

static fanin_status make(bool *reused, fanin_error *error)
{
    adapter *a = NULL;
    const uint64_t *to;
    uint64_t span;
    fanin_status status = adapter_open(&(adapter_terms){.directory = place,
                                                        .at = deadline_in_ms(10000),
                                                        .is_model = true,
                                                        .max_file_bytes = BYTES},
                                       &a, error);
    if (status != FANIN_OK)
        return status;
    status = adapter_prepare(a, &keys, "full:0", &to, &span, error);
    if (status == FANIN_OK)
        status = adapter_reusable(a, &identity, reused, error);
    if (status == FANIN_OK && !*reused)
        status = fill(a, to, error);
    adapter_close(&a);
    return status;
}

/* Until no allocation is left that could fail; some of them are done without. @p left: entries of
   the parent after a failure. */
static void fail_each(bool reuse, int left)
{
    bool failed = true;
    long calls = 0;
    for (; failed; calls++) {
        fanin_error error = FANIN_ERROR_INIT;
        bool reused = false;
        assert_true(calls < CALLS_MOST);
        failing_memory_start(calls, false);
        fanin_status status = make(&reused, &error);
        failed = failing_memory_stop();
        if (status != FANIN_OK) {
            assert_true(failed);
            assert_int_equal(status, FANIN_ERR_MEMORY);
            assert_int_equal(count_entries(root), left);
            continue;
        }
        assert_int_equal(reused, reuse);
        assert_int_equal(count_entries(root), 1);
        if (failed && !reuse)
            remove_all();
    }
    assert_true(calls > 10);
}

static int setup(void **state)
{
    for (int i = 0; i < KEYS; i++)
        entries[i].bytes = BYTES;
    if (!mkdtemp(root))
        return -1;
    snprintf(place, sizeof place, "%s/step", root);
    return 0;
}

static int teardown(void **state)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", root);
    return system(command);
}

TEST_WITH(every_allocation_may_fail, setup, teardown)
{
    fail_each(false, 0);
    assert_int_equal(count_entries(place), 6);
    fail_each(true, 1);
}
