/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pulls between processes whose shards and destinations are device memory, with a driver that
 * needs no GPU: its kernels abort where a real one would fault or corrupt.
 */
#include "ends.h"
#include "fake_cuda.h"
#include "clock.h"
#include "lab.h"
#include "log_catcher.h"
#include "fetch/pattern.h"
#include "path/path.h"
#include "pull/choose_path.h"
#include "pull/pull_session.h"
#include "testing.h"
#include <cuda.h>
#include <fanin/safetensors.h>
#include <pthread.h>
#include <signal.h>

#define RANKS 3
#define HOST (-1)

typedef struct bench {
    lab lab;
    lab_order order;
    rank_world world;
    fanin_client *client;
} bench;

/* --------------------------------------------------------------------- set-up */

static lab the_lab;
static bench b; /* of the test that runs */

static lab_order order_of(uint32_t ranks, int first, int second)
{
    lab_order o = lab_order_of(ranks);
    o.devices[0] = first;
    o.devices[1] = second;
    o.n_devices = 2;
    return o;
}

static void connect_by(fanin_path path)
{
    fanin_client_config config = make_client_config();
    config.no_ucx = false;
    config.path = path;
    config.lost_ms = 2000;
    config.log = log_catch;
    b.client = connect_client(&config, b.world.address_list, b.order.world_size);
}

static void set_up(lab_order order, fanin_path path)
{
    b = (bench){.lab = the_lab, .order = order};
    lab_start(&b.lab, &b.order, &b.world);
    connect_by(path);
}

static fake_cuda_counts counts(void)
{
    fake_cuda_counts c;
    fake_cuda_count(&c);
    return c;
}

/* What a client had on devices goes with it, mappings above all. */
static int tear_down(void **state)
{
    if (!b.client)
        return 0; /* over already */
    fanin_client_destroy(&b.client);
    fake_cuda_counts c = counts();
    assert_int_equal(c.mappings, 0);
    assert_int_equal(c.allocations, 0);
    assert_int_equal(c.pinned, 0);
    assert_int_equal(c.events, 0);
    rank_world_free(&b.world);
    lab_stop(&b.lab);
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, tear_down)

/* --------------------------------------------------------------- destinations */

/* Room for everything in memory of a device, or of the host. */
typedef struct target {
    int device;
    uint8_t *memory, *bytes; /**< as the library and as the CPU sees it */
    landing places;
} target;

static void target_make(const rank_world *w, int device, fake_cuda_kind kind, target *t)
{
    *t = (target){.device = device};
    landing_make(w, &t->places);
    t->memory = t->bytes = t->places.arena;
    if (device != HOST) {
        t->memory = fake_cuda_alloc(device, t->places.size, kind);
        t->bytes = fake_cuda_alias(t->memory);
    }
    memset(t->bytes, 0xee, t->places.size);
    for (size_t i = 0; i < w->tensors.count; i++) {
        fanin_box *box = &t->places.boxes[i];
        box->address = t->memory + ((uint8_t *)box->address - t->places.arena);
        t->places.wanted[i].memory = (fanin_memory){FANIN_MEMORY_DETECT, -1};
    }
}

static void target_free(target *t)
{
    if (t->device != HOST)
        fake_cuda_free(t->memory);
    landing_free(&t->places);
}

static bool target_is_step(const rank_world *w, const target *t, uint64_t step)
{
    for (size_t i = 0; i < w->tensors.count; i++) {
        const tensor_spec *spec = &w->tensors.tensors[i];
        const uint8_t *at =
            t->bytes + ((uint8_t *)t->places.boxes[i].address - t->memory);
        if (pattern_compare(at, pattern_start(w->seeds[i], step), 0, spec->bytes) !=
            spec->bytes) {
            printf("# %s differs from step %llu\n", spec->name,
                   (unsigned long long)step);
            return false;
        }
    }
    return true;
}

/* One pull of everything; what it said is kept until the next. */
typedef struct outcome {
    fanin_status status;
    fanin_error error;
    fanin_path path;
    char reason[512], ranks[4096];
} outcome;

static bool in_parts;           /* pulls are sessions now */
static fanin_destination *into; /* and go there, if it is not NULL */

/* Reads of every other tensor and of the others, and of some of them again. */
static fanin_status pull_in_parts(const fanin_pull_options *options, const target *t,
                                  fanin_result **result, fanin_error *error)
{
    fanin_session *session = NULL;
    size_t n = b.world.tensors.count, half = n / 2;
    group_run *even = calloc(n, sizeof *even), *odd = even + (n - half);
    assert_non_null(even);
    for (size_t i = 0; i < n; i++)
        (i % 2 ? odd : even)[i / 2] = (group_run){i, 1};
    fanin_status status =
        fanin_client_begin(b.client, options, t->places.wanted, n, &session, error);
    if (status == FANIN_OK)
        status = pull_session_read(session, odd, half, error);
    if (status == FANIN_OK)
        status = pull_session_read(session, even, n - half, error);
    if (status == FANIN_OK)
        status = fanin_session_read(session, half, n - half, error);
    if (status == FANIN_OK)
        status = fanin_session_end(&session, result, error);
    fanin_session_abandon(&session);
    free(even);
    return status;
}

static outcome pull_with(const fanin_pull_options *options, const target *t)
{
    outcome o = {.error = FANIN_ERROR_INIT};
    fanin_result *result = NULL;
    fanin_result_info info = {.struct_size = sizeof info};
    if (into)
        o.status = fanin_client_pull_into(b.client, options, into, &result, &o.error);
    else if (in_parts)
        o.status = pull_in_parts(options, t, &result, &o.error);
    else
        o.status = fanin_client_pull(b.client, options, t->places.wanted,
                                     b.world.tensors.count, &result, &o.error);
    if (o.status == FANIN_OK) {
        fanin_result_get(result, &info);
        o.path = info.path;
        assert_int_equal(info.verified, options->verify);
        snprintf(o.reason, sizeof o.reason, "%s", info.path_reason);
        snprintf(o.ranks, sizeof o.ranks, "%s", info.ranks_json);
    }
    fanin_result_free(&result);
    return o;
}

static bool verifies; /* what pulls do by default now */

static fanin_pull_options defaults(void)
{
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    options.verify = verifies;
    return options;
}

static outcome pull_once(const target *t)
{
    const fanin_pull_options options = defaults();
    return pull_with(&options, t);
}

static void expect(const target *t, fanin_path path)
{
    outcome o = pull_once(t);
    assert_ok(o.status, o.error);
    if (o.path != path)
        fail_msg("by %s instead of %s: %s", fanin_path_name(o.path),
                 fanin_path_name(path), o.reason);
    assert_true(target_is_step(&b.world, t, 1));
}

/* ------------------------------------------------------------- all that works */

/* Cold and warm, into a kind of memory; the warm one maps nothing new, and is verified. */
static void pull_twice(int device, fake_cuda_kind kind, fanin_path path)
{
    target t;
    target_make(&b.world, device, kind, &t);
    expect(&t, path);
    memset(t.bytes, 0xee, t.places.size);
    fake_cuda_counts before = counts();
    verifies = true;
    expect(&t, path);
    verifies = false;
    assert_int_equal(counts().opens, before.opens);
    assert_int_equal(counts().digests > before.digests, device != HOST);
    in_parts = true;
    for (int i = 0; i < 2; i++) {
        memset(t.bytes, 0xee, t.places.size);
        expect(&t, path);
    }
    in_parts = false;
    assert_int_equal(counts().opens, before.opens);
    target_free(&t);
}

static void pull_everywhere(lab_order order, fanin_path asked, fanin_path path)
{
    set_up(order, asked);
    for (int device = HOST; device < 2; device++)
        pull_twice(device, FAKE_CUDA_MALLOC, path);
    pull_twice(0, FAKE_CUDA_VIRTUAL, path);
    pull_twice(1, FAKE_CUDA_POOL, path);
    pull_twice(1, FAKE_CUDA_MANAGED, path);
    tear_down(NULL);
}

CASE(test_two_devices)
{
    pull_everywhere(order_of(RANKS, 0, 1), FANIN_PATH_AUTO, FANIN_PATH_CUDA_IPC);
    pull_everywhere(order_of(RANKS, 0, 1), FANIN_PATH_STREAM, FANIN_PATH_STREAM);
}

/* One GPU that all ranks share, with the worker too. */
CASE(test_one_device)
{
    pull_everywhere(order_of(LAB_RANKS, 1, 1), FANIN_PATH_CUDA_IPC,
                    FANIN_PATH_CUDA_IPC);
    pull_everywhere(order_of(LAB_RANKS, 1, 1), FANIN_PATH_STREAM, FANIN_PATH_STREAM);
}

CASE(test_host_ranks)
{
    pull_everywhere(order_of(RANKS, HOST, HOST), FANIN_PATH_STREAM, FANIN_PATH_STREAM);
    pull_everywhere(order_of(RANKS, HOST, HOST), FANIN_PATH_CMA, FANIN_PATH_CMA);
}

CASE(test_snapshots)
{
    lab_order o = order_of(RANKS, 0, 1);
    o.snapshot = true;
    pull_everywhere(o, FANIN_PATH_AUTO, FANIN_PATH_CUDA_IPC);
    pull_everywhere(o, FANIN_PATH_STREAM, FANIN_PATH_STREAM);
}

/* Rank 0 on the host, the others on a device: each by what it can. */
CASE(test_mixed_ranks)
{
    lab_order o = order_of(RANKS, HOST, 1);
    o.flags = FANIN_SERVER_NO_UCX;
    set_up(o, FANIN_PATH_AUTO);
    for (int device = HOST; device < 2; device++) {
        target t;
        target_make(&b.world, device, FAKE_CUDA_MALLOC, &t);
        outcome r = pull_once(&t);
        assert_ok(r.status, r.error);
        assert_non_null(strstr(r.ranks, "\"cuda_ipc\""));
        assert_non_null(strstr(r.ranks, "\"cma\""));
        assert_true(target_is_step(&b.world, &t, 1));
        target_free(&t);
    }
}

/* Some tensors here, some there, in one call. */
CASE(test_mixed_destinations)
{
    static const fanin_path paths[] = {FANIN_PATH_AUTO, FANIN_PATH_STREAM};
    for (size_t p = 0; p < 2; p++) {
        target t[3];
        set_up(order_of(RANKS, 0, 1), paths[p]);
        for (int i = 0; i < 3; i++)
            target_make(&b.world, i - 1, FAKE_CUDA_MALLOC, &t[i]);
        size_t n = b.world.tensors.count;
        for (size_t i = 0; i < n; i++)
            t[0].places.wanted[i] = t[i % 3].places.wanted[i];
        outcome r = pull_once(&t[0]);
        assert_ok(r.status, r.error);
        for (size_t i = 0; i < n; i++) {
            const tensor_spec *spec = &b.world.tensors.tensors[i];
            const target *own = &t[i % 3];
            const uint8_t *at =
                own->bytes + ((uint8_t *)own->places.boxes[i].address - own->memory);
            assert_int_equal(
                pattern_compare(at, pattern_start(b.world.seeds[i], 1), 0, spec->bytes),
                spec->bytes);
        }
        for (int i = 0; i < 3; i++)
            target_free(&t[i]);
        tear_down(NULL);
    }
}

/* A tensor's bytes at step 1, as @p dtype. */
static void check_tensor(size_t index, fanin_dtype dtype, const uint8_t *bytes)
{
    const tensor_spec *t = &b.world.tensors.tensors[index];
    uint64_t start = pattern_start(b.world.seeds[index], 1), size = t->bytes;
    if (dtype == t->dtype) {
        assert_int_equal(pattern_compare(bytes, start, 0, size), size);
        return;
    }
    uint8_t *published = malloc(size), *wanted = malloc(size / 2);
    assert_true(published && wanted && half_converts(t->dtype, dtype));
    pattern_fill(published, start, 0, size);
    half_convert(dtype, wanted, published, size / 4);
    assert_memory_equal(bytes, wanted, size / 2);
    free(published);
    free(wanted);
}

static void check_directory(const char *directory, fanin_dtype dtype)
{
    char path[160];
    fanin_safetensors *file = NULL;
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", directory);
    assert_works(fanin_safetensors_open(path, &file, ERROR));
    for (size_t i = 0; i < b.world.tensors.count; i++) {
        const tensor_spec *t = &b.world.tensors.tensors[i];
        char name[FANIN_MAX_NAME + 32];
        fanin_safetensors_entry e = {.struct_size = sizeof e};
        assert_true(fanin_adapter_name(t->name, name, sizeof name));
        int64_t at = fanin_safetensors_find(file, name);
        assert_true(at >= 0 && fanin_safetensors_get(file, (size_t)at, &e));
        uint64_t size = t->bytes / fanin_dtype_bits(t->dtype) * fanin_dtype_bits(dtype);
        uint8_t *bytes = malloc(size);
        assert_non_null(bytes);
        assert_int_equal(e.dtype, dtype);
        assert_int_equal(
            pread(fanin_safetensors_descriptor(file), bytes, size, (off_t)e.offset),
            size);
        check_tensor(i, dtype, bytes);
        free(bytes);
    }
    fanin_safetensors_close(&file);
}

CASE(test_directories)
{
    static const fanin_path paths[] = {FANIN_PATH_CUDA_IPC, FANIN_PATH_STREAM};
    for (size_t p = 0; p < 2; p++) {
        char scratch[] = "/tmp/fanin-device-XXXXXX", directory[64], command[96];
        fanin_error error = FANIN_ERROR_INIT;
        fanin_result *result = NULL;
        fanin_result_info info = {.struct_size = sizeof info};
        assert_non_null(mkdtemp(scratch));
        set_up(order_of(RANKS, 0, 1), paths[p]);
        fanin_pull_options options = defaults();
        options.spare_file = true;
        for (int i = 0; i < 2; i++) { /* the second finds a spare file */
            snprintf(directory, sizeof directory, "%s/%d", scratch, i);
            assert_ok(fanin_client_pull_adapter(b.client, &options, directory, &result,
                                                &error),
                      error);
            fanin_result_get(result, &info);
            assert_int_equal(info.path, paths[p]);
            assert_false(info.reused);
            fanin_result_free(&result);
            check_directory(directory, FANIN_DTYPE_BF16);
        }
        tear_down(NULL);
        snprintf(command, sizeof(command), "rm -r %s", scratch);
        assert_int_equal(system(command), 0);
    }
}

/* Everything in the halves of the places that would hold F32. */
static void pull_converted(int device, fanin_dtype asked, fanin_dtype dtype,
                           fanin_path path)
{
    target t;
    fanin_pull_options options = defaults();
    options.dtype = asked;
    target_make(&b.world, device, FAKE_CUDA_MALLOC, &t);
    for (size_t i = 0; i < b.world.tensors.count; i++)
        t.places.wanted[i].dtype = dtype;
    for (int again = 0; again < 2; again++) {
        memset(t.bytes, 0xee, t.places.size);
        outcome o = pull_with(&options, &t);
        assert_ok(o.status, o.error);
        assert_int_equal(o.path, path);
        for (size_t i = 0; i < b.world.tensors.count; i++)
            check_tensor(i, dtype,
                         t.bytes + ((uint8_t *)t.places.boxes[i].address - t.memory));
    }
    target_free(&t);
}

/* By the pull, and by the ranks' snapshots; what arrives as it was published in between. */
CASE(test_conversions)
{
    static const fanin_path paths[] = {FANIN_PATH_CUDA_IPC, FANIN_PATH_STREAM};
    verifies = true;
    for (size_t p = 0; p < 2; p++) {
        lab_order o = order_of(RANKS, 0, 1);
        o.dtype = FANIN_DTYPE_F32;
        set_up(o, paths[p]);
        for (int device = HOST; device < 2; device++) {
            pull_converted(device, FANIN_DTYPE_BF16, FANIN_DTYPE_BF16, paths[p]);
            pull_converted(device, 0, FANIN_DTYPE_F32, paths[p]);
            pull_converted(device, FANIN_DTYPE_F16, FANIN_DTYPE_F16, paths[p]);
        }
        tear_down(NULL);
        o.snapshot = true;
        o.cast = FANIN_DTYPE_BF16;
        set_up(o, paths[p]);
        for (int device = HOST; device < 2; device++)
            pull_converted(device, 0, FANIN_DTYPE_BF16, paths[p]);
        tear_down(NULL);
    }
    verifies = false;
}

/* A directory that holds another dtype of the same step is neither used again nor touched. */
static void pull_directories(const char *scratch)
{
    static const struct {
        const char *name;
        fanin_dtype asked, dtype; /* 0: refused */
        bool reused;
    } turns[] = {{"half", FANIN_DTYPE_BF16, FANIN_DTYPE_BF16, false},
                 {"half", FANIN_DTYPE_BF16, FANIN_DTYPE_BF16, true},
                 {"half", FANIN_DTYPE_F16, 0, false},
                 {"half", 0, 0, false},
                 {"whole", 0, FANIN_DTYPE_F32, false},
                 {"whole", FANIN_DTYPE_F32, FANIN_DTYPE_F32, true},
                 {"whole", FANIN_DTYPE_BF16, 0, false}};
    fanin_dtype holds = 0;
    for (size_t i = 0; i < sizeof turns / sizeof *turns; i++) {
        char directory[64];
        fanin_error error = FANIN_ERROR_INIT;
        fanin_result *result = NULL;
        fanin_result_info info = {.struct_size = sizeof info};
        fanin_pull_options options = defaults();
        options.dtype = turns[i].asked;
        snprintf(directory, sizeof directory, "%s/%s", scratch, turns[i].name);
        fanin_status status =
            fanin_client_pull_adapter(b.client, &options, directory, &result, &error);
        if (turns[i].dtype) {
            assert_ok(status, error);
            fanin_result_get(result, &info);
            assert_int_equal(info.reused, turns[i].reused);
            holds = turns[i].dtype;
        } else {
            assert_int_not_equal(status, FANIN_OK);
            assert_non_null(strstr(error.message, "another dtype"));
        }
        fanin_result_free(&result);
        check_directory(directory, holds);
    }
}

CASE(test_converted_directories)
{
    static const fanin_path paths[] = {FANIN_PATH_CUDA_IPC, FANIN_PATH_STREAM};
    for (size_t p = 0; p < 2; p++) {
        char scratch[] = "/tmp/fanin-device-XXXXXX", command[96];
        lab_order o = order_of(RANKS, 0, 1);
        o.dtype = FANIN_DTYPE_F32;
        assert_non_null(mkdtemp(scratch));
        set_up(o, paths[p]);
        pull_directories(scratch);
        tear_down(NULL);
        snprintf(command, sizeof(command), "rm -r %s", scratch);
        assert_int_equal(system(command), 0);
    }
}

/* A part of the first matrix, to places that are not neighbours: its rows downwards or upwards. */
static void pull_rows(const target *whole, int device, bool upwards)
{
    target part;
    target_make(&b.world, device, FAKE_CUDA_MALLOC, &part);
    const tensor_spec *t = &b.world.tensors.tensors[0];
    uint64_t rows = t->shape[0] - 2, columns = t->shape[1] / 2 - 3;
    int64_t pitch = (int64_t)t->shape[1] * 2;
    fanin_tensor wanted = part.places.wanted[0];
    fanin_box box = {.offset = {1, 3},
                     .extent = {rows, columns},
                     .stride = {upwards ? -pitch : pitch, 4},
                     .address =
                         part.memory + (upwards ? (rows - 1) * (uint64_t)pitch : 0)};
    wanted.boxes = &box;
    const fanin_pull_options options = defaults();
    assert_works(fanin_client_pull(b.client, &options, &wanted, 1, NULL, ERROR));
    for (uint64_t i = 0; i < rows * t->shape[1]; i++) {
        uint64_t row = i / t->shape[1], place = i % t->shape[1];
        const uint8_t none[2] = {0xee, 0xee};
        uint64_t published = 1 + (upwards ? rows - 1 - row : row);
        const uint8_t *from =
            whole->bytes + 2 * (published * t->shape[1] + 3 + place / 2);
        bool inside = place % 2 == 0 && place / 2 < columns;
        assert_memory_equal(part.bytes + 2 * i, inside ? from : none, 2);
    }
    target_free(&part);
}

CASE(test_parts)
{
    static const fanin_path paths[] = {FANIN_PATH_CUDA_IPC, FANIN_PATH_STREAM};
    for (size_t p = 0; p < 2; p++) {
        target whole;
        set_up(order_of(RANKS, 0, 1), paths[p]);
        target_make(&b.world, HOST, FAKE_CUDA_MALLOC, &whole);
        expect(&whole, paths[p]);
        for (int i = 0; i < 4; i++)
            pull_rows(&whole, i / 2 ? 1 : HOST, i % 2);
        target_free(&whole);
        tear_down(NULL);
    }
}

/* A region table that was fetched anew is not the one that the copies were made from: nothing is
   read beyond what it says. */
CASE(test_regions_that_have_become_shorter)
{
    target t;
    set_up(order_of(RANKS, 0, 1), FANIN_PATH_CUDA_IPC);
    target_make(&b.world, 1, FAKE_CUDA_MALLOC, &t);
    expect(&t, FANIN_PATH_CUDA_IPC);
    region_table *known = path_state_of(b.client, b.client->publications, 1)->regions;
    known->entries[0].length--;
    memset(t.bytes, 0xee, t.places.size);
    uint64_t kernels = counts().kernels;
    outcome o = pull_once(&t);
    assert_int_equal(o.status, FANIN_ERR_PROTOCOL);
    assert_says(o.error.message, "rank 1's region 0");
    assert_int_equal(counts().kernels, kernels);
    known->entries[0].length++;
    expect(&t, FANIN_PATH_CUDA_IPC);
    target_free(&t);
}

/* What nobody has read for long is unmapped, and mapped anew by who reads it again. */
CASE(test_idle_memory_is_unmapped)
{
    target t;
    set_up(order_of(RANKS, 0, 1), FANIN_PATH_CUDA_IPC);
    target_make(&b.world, 1, FAKE_CUDA_MALLOC, &t);
    expect(&t, FANIN_PATH_CUDA_IPC);
    uint64_t used = b.client->publications->used_ns, mapped = counts().mappings;
    path_unmap_idle(b.client, used);
    assert_int_equal(counts().mappings, mapped);
    path_unmap_idle(b.client, used + 1);
    assert_int_equal(counts().mappings, 0);
    memset(t.bytes, 0xee, t.places.size);
    expect(&t, FANIN_PATH_CUDA_IPC);
    assert_int_equal(counts().mappings, mapped);
    target_free(&t);
}

/* ----------------------------------------------------------- what cannot work */

/* Memory without a handle goes by stream, and the reason is told; asked for, it is refused. */
static void check_fallback(lab_order order, const char *word)
{
    target t;
    set_up(order, FANIN_PATH_AUTO);
    target_make(&b.world, 0, FAKE_CUDA_MALLOC, &t);
    outcome o = pull_once(&t);
    assert_ok(o.status, o.error);
    assert_int_equal(o.path, FANIN_PATH_STREAM);
    assert_says(o.reason, word);
    assert_true(target_is_step(&b.world, &t, 1));
    fanin_client_destroy(&b.client);
    connect_by(FANIN_PATH_CUDA_IPC);
    o = pull_once(&t);
    assert_int_equal(o.status, FANIN_ERR_UNSUPPORTED);
    assert_says(o.error.message, word);
    target_free(&t);
    tear_down(NULL);
}

CASE(test_memory_without_handle)
{
    static const char *const kinds[] = {"virtual", "pool", "managed"};
    for (size_t i = 0; i < 3; i++) {
        lab_order o = order_of(RANKS, 0, 0);
        snprintf(o.environment[0], sizeof o.environment[0], "FAKE_CUDA_KIND=%s",
                 kinds[i]);
        check_fallback(o, "no IPC handle");
    }
}

/* The ranks use the machine's third GPU, of which this process knows nothing. */
CASE(test_invisible_device)
{
    lab_order o = order_of(RANKS, 0, 0);
    snprintf(o.environment[0], sizeof o.environment[0], "FAKE_CUDA_DEVICES=3");
    snprintf(o.environment[1], sizeof o.environment[1], "CUDA_VISIBLE_DEVICES=2");
    check_fallback(o, "not visible");
}

static void expect_refused(const target *t, size_t index, const char *words)
{
    outcome o = pull_once(t);
    assert_int_equal(o.status, FANIN_ERR_ARGUMENT);
    assert_says(o.error.message, words);
    assert_non_null(strstr(o.error.key, t->places.wanted[index].name));
    assert_true(o.error.remedy[0] != '\0');
}

CASE(test_contradictions)
{
    target t;
    set_up(order_of(RANKS, 0, 1), FANIN_PATH_AUTO);
    static const fanin_memory wrong[] = {
        {FANIN_MEMORY_CUDA, 1}, {FANIN_MEMORY_CUDA, 7}, {FANIN_MEMORY_HOST, -1}};
    static const char *const words[] = {"device 1, a box is on device 0",
                                        "device 7, a box is on device 0",
                                        "host memory, a box is on CUDA device 0"};
    for (size_t i = 0; i < 3; i++) {
        target_make(&b.world, 0, FAKE_CUDA_MALLOC, &t);
        t.places.wanted[3].memory = wrong[i];
        expect_refused(&t, 3, words[i]);
        t.places.wanted[3].memory = (fanin_memory){FANIN_MEMORY_CUDA, 0};
        expect(&t, FANIN_PATH_CUDA_IPC);
        target_free(&t);
    }
    target_make(&b.world, HOST, FAKE_CUDA_MALLOC, &t);
    t.places.wanted[3].memory = (fanin_memory){FANIN_MEMORY_CUDA, 0};
    expect_refused(&t, 3, "a box is in host memory");
    target_free(&t);
}

static void prepare(const target *t)
{
    assert_works(fanin_destination_create(t->places.wanted, b.world.tensors.count,
                                          &into, ERROR));
}

/* Prepared once: memory that was freed, and allocated again at the same address, also by another
   device, is found anew; memory that is not there is refused. */
CASE(test_prepared_memory_moves)
{
    target t;
    set_up(order_of(RANKS, 0, 1), FANIN_PATH_AUTO);
    target_make(&b.world, 0, FAKE_CUDA_MALLOC, &t);
    for (size_t i = 0; i < b.world.tensors.count; i++)
        t.places.wanted[i].memory = (fanin_memory){FANIN_MEMORY_CUDA, -1};
    prepare(&t);
    for (int device = 0; device < 2; device++) {
        expect(&t, FANIN_PATH_CUDA_IPC);
        expect(&t, FANIN_PATH_CUDA_IPC);
        fake_cuda_free(t.memory);
        outcome o = pull_once(&t);
        assert_int_equal(o.status, FANIN_ERR_ARGUMENT);
        uint8_t *again = fake_cuda_alloc(!device, t.places.size, FAKE_CUDA_MALLOC);
        assert_ptr_equal(again, t.memory);
        t.bytes = fake_cuda_alias(again);
        memset(t.bytes, 0xee, t.places.size);
    }
    expect(&t, FANIN_PATH_CUDA_IPC);
    fanin_destination_free(&into);
    target_free(&t);
}

/* Both halves of a matrix, on two devices: not as one tensor, but as two of one name. */
CASE(test_halves_on_two_devices)
{
    target t[2];
    set_up(order_of(RANKS, 0, 1), FANIN_PATH_AUTO);
    for (int i = 0; i < 2; i++)
        target_make(&b.world, i, FAKE_CUDA_MALLOC, &t[i]);
    const tensor_spec *spec = &b.world.tensors.tensors[0];
    uint64_t rows = spec->shape[0] / 2, half = spec->bytes / 2;
    fanin_box halves[2] = {
        {.extent = {rows, spec->shape[1]}, .address = t[0].memory},
        {.offset = {rows}, .extent = {rows, spec->shape[1]}, .address = t[1].memory}};
    fanin_tensor *wanted = t[0].places.wanted;
    assert_int_equal(spec->shape[0] % 2, 0);
    wanted[0].boxes = halves;
    wanted[0].n_boxes = 2;
    expect_refused(&t[0], 0, "CUDA devices 0 and 1");
    wanted[0].n_boxes = 1;
    wanted[1] = wanted[0];
    wanted[1].boxes = &halves[1];
    const fanin_pull_options options = defaults();
    assert_works(fanin_client_pull(b.client, &options, wanted, 2, NULL, ERROR));
    for (int i = 0; i < 2; i++) {
        uint64_t start = pattern_start(b.world.seeds[0], 1);
        assert_int_equal(pattern_compare(t[i].bytes, start, (uint64_t)i * half, half),
                         half);
        target_free(&t[i]);
    }
}

static uint64_t count_opens(void)
{
    fake_cuda_counts counts;
    fake_cuda_count(&counts);
    return counts.opens;
}

/* Host memory is looked at by the stretch, managed memory may be called the host's; each mapping is
   asked for its length. */
CASE(test_host_destinations)
{
    static const fanin_path paths[] = {FANIN_PATH_CUDA_IPC, FANIN_PATH_STREAM};
    for (size_t p = 0; p < 2; p++) {
        target t;
        set_up(order_of(RANKS, 0, 1), paths[p]);
        for (int device = HOST; device < 1; device++) {
            target_make(&b.world, device, FAKE_CUDA_MANAGED, &t);
            for (size_t i = 0; i < b.world.tensors.count; i++)
                t.places.wanted[i].memory = (fanin_memory){FANIN_MEMORY_HOST, -1};
            uint64_t opens = count_opens(),
                     before = fake_cuda_calls("cuPointerGetAttributes");
            expect(&t, paths[p]);
            assert_true(fake_cuda_calls("cuPointerGetAttributes") - before <=
                        t.places.size / (2 << 20) + 2 + count_opens() - opens);
            target_free(&t);
        }
        tear_down(NULL);
    }
}

/* A box that ends outside of the allocation it begins in. */
CASE(test_too_small_destination)
{
    target t;
    set_up(order_of(RANKS, 0, 1), FANIN_PATH_AUTO);
    target_make(&b.world, 0, FAKE_CUDA_MALLOC, &t);
    size_t last = b.world.tensors.count - 1;
    t.places.boxes[last].address = (uint8_t *)t.places.boxes[last].address + 2;
    expect_refused(&t, last, "beyond its allocation");
    target_free(&t);
}

/* ------------------------------------------------------------------ in the middle */

typedef struct puller {
    const target *target;
    fanin_stream stream;
    outcome outcome;
    pthread_t thread;
} puller;

static void *pull_main(void *cookie)
{
    puller *p = cookie;
    fanin_pull_options options = defaults();
    options.stream = p->stream;
    p->outcome = pull_with(&options, p->target);
    return NULL;
}

static void pull_start(puller *p)
{
    assert_int_equal(pthread_create(&p->thread, NULL, pull_main, p), 0);
}

/* What a pull waits for is the caller's stream, and no rank is said to be late. */
CASE(test_a_busy_stream)
{
    static const fanin_path paths[] = {FANIN_PATH_STREAM, FANIN_PATH_CUDA_IPC};
    for (int i = 0; i < 2; i++) {
        target t;
        CUcontext context;
        CUstream stream;
        set_up(order_of(RANKS, 1, 1), paths[i]);
        target_make(&b.world, 1, FAKE_CUDA_MALLOC, &t);
        assert_int_equal(cuDevicePrimaryCtxRetain(&context, 1), CUDA_SUCCESS);
        assert_int_equal(cuCtxPushCurrent(context), CUDA_SUCCESS);
        assert_int_equal(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
        fanin_pull_options options = defaults();
        options.stream = (fanin_stream){.handle = stream, .device = 1};
        options.timeout_ms = 3000;
        expect(&t, paths[i]); /* connected and planned: what is left is to read */
        fake_cuda_hold_stream(stream);
        outcome late = pull_with(&options, &t);
        assert_int_equal(late.status, FANIN_ERR_TIMEOUT);
        assert_says(late.error.message, "caller's stream of device 1");
        fake_cuda_release(1);
        expect(&t, paths[i]);
        assert_int_equal(cuStreamDestroy(stream), CUDA_SUCCESS);
        assert_int_equal(cuCtxPopCurrent(NULL), CUDA_SUCCESS);
        target_free(&t);
        tear_down(NULL);
    }
}

/* The kernel of a pull stands still while a rank dies. The rank is named, nothing is written
   after the return, and the rank's next life is mapped anew. */
CASE(test_rank_dies)
{
    for (int device = HOST; device < 2; device++) {
        target t;
        set_up(order_of(RANKS, 1, 1), FANIN_PATH_CUDA_IPC);
        target_make(&b.world, device, FAKE_CUDA_MALLOC, &t);
        expect(&t, FANIN_PATH_CUDA_IPC);
        int reader =
            device == HOST ? 1 : device; /* the device that has most of it gathers */
        fake_cuda_hold_kernel(reader, 3);
        puller p = {.target = &t};
        pull_start(&p);
        assert_true(fake_cuda_wait_kernel_held(reader));
        lab_signal(&b.lab, 1, SIGKILL);
        fake_cuda_release(reader);
        assert_int_equal(pthread_join(p.thread, NULL), 0);
        assert_int_not_equal(p.outcome.status, FANIN_OK);
        assert_int_equal(p.outcome.error.rank, 1);
        memset(t.bytes, 0xab, t.places.size);
        assert_true(fake_cuda_wait_idle(0) && fake_cuda_wait_idle(1));
        for (size_t i = 0; i < t.places.size; i++)
            assert_int_equal(t.bytes[i], 0xab);
        lab_stop(&b.lab);
        lab_restart(&b.lab, &b.order);
        uint64_t mapped = counts().mappings;
        expect(&t, FANIN_PATH_CUDA_IPC);
        assert_int_equal(counts().mappings, mapped); /* as many as before, not more */
        target_free(&t);
        tear_down(NULL);
    }
}

/* A device fails in the middle of a pull. One by cuda_ipc is tried again by a stream, one by a
   stream no more. The other device works. */
static void device_fails(fanin_path asked, fanin_path path)
{
    target t, other;
    set_up(order_of(RANKS, 0, 0), asked);
    target_make(&b.world, 1, FAKE_CUDA_MALLOC, &t);
    target_make(&b.world, 0, FAKE_CUDA_MALLOC, &other);
    expect(&t, path);
    expect(&other, path);
    log_listen("restart");
    fake_cuda_hold_kernel(1, 3);
    puller p = {.target = &t};
    pull_start(&p);
    assert_true(fake_cuda_wait_kernel_held(1));
    fake_cuda_break(1);
    assert_int_equal(pthread_join(p.thread, NULL), 0);
    assert_int_equal(p.outcome.status, FANIN_ERR_TRANSPORT);
    assert_says(p.outcome.error.message, "CUDA_ERROR_LAUNCH_FAILED");
    log_expect(path == FANIN_PATH_CUDA_IPC, "");
    memset(other.bytes, 0, other.places.size);
    outcome o = pull_once(&other);
    assert_ok(o.status, o.error);
    assert_true(target_is_step(&b.world, &other, 1));
    fanin_client_destroy(&b.client);
    fake_cuda_repair(1);
    fake_cuda_release(1);
    target_free(&t);
    target_free(&other);
    rank_world_free(&b.world);
    lab_stop(&b.lab);
}

/* The last test. */
CASE(test_device_fails)
{
    device_fails(FANIN_PATH_AUTO, FANIN_PATH_CUDA_IPC);
    device_fails(FANIN_PATH_STREAM, FANIN_PATH_STREAM);
}

static int open_lab(void **state)
{
    unsetenv("CUDA_VISIBLE_DEVICES");
    lab_open(&the_lab, false);
    return 0;
}

static int close_lab(void **state)
{
    lab_close(&the_lab);
    return 0;
}

TESTS_BETWEEN(open_lab, close_lab)
