/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Directories that several devices gather, each over its own link: what they bring, and what
 * becomes of a pull when one of them does not take part, stands still or fails. With a driver that
 * needs no GPU.
 */
#include "device/devices.h"
#include "ends.h"
#include "fake_cuda.h"
#include "fetch/check.h"
#include "lab.h"
#include "path/path.h"
#include "testing.h"
#include <cuda.h>
#include <dirent.h>
#include <pthread.h>
#include <sched.h>

#define RANKS 3
#define GIVE_UP_MS 2000
#define DEVICE_BYTES ((uint64_t)1 << 30) /* of each */

typedef struct bench {
    lab_order order;
    rank_world world;
    fanin_client *client;
    char scratch[40];
    unsigned pulls;
    bool failed; /* a device has */
} bench;

static lab the_lab;
static bench b;             /* of the test that runs */
static bool without_kernel; /* devices have no kernel that digests */

/* -------------------------------------------------------------------- set-up */

/* Two ranks on one device, one on another; a device more gathers for every byte. */
static void set_up_on(int first, int second)
{
    b = (bench){.order = lab_order_of(RANKS), .scratch = "/tmp/gather-fanin-XXXXXX"};
    b.order.devices[0] = first;
    b.order.devices[1] = second;
    b.order.n_devices = 2;
    assert_non_null(mkdtemp(b.scratch));
    lab_start(&the_lab, &b.order, &b.world);
    fanin_client_config config = make_client_config();
    config.path = FANIN_PATH_AUTO;
    b.client = connect_client(&config, b.world.address_list, RANKS);
    b.client->devices->gather_bytes = 1;
}

static void set_up(void)
{
    set_up_on(0, 1);
}

/* Directories that are there, hidden ones too. */
static unsigned count_entries(void)
{
    unsigned n = 0;
    DIR *all = opendir(b.scratch);
    assert_non_null(all);
    for (const struct dirent *e; (e = readdir(all));)
        n += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    closedir(all);
    return n;
}

static int tear_down(void **state)
{
    char command[64];
    fake_cuda_counts c;
    fanin_client_destroy(&b.client);
    fake_cuda_count(&c);
    if (!b.failed) /* a device that has failed unmaps nothing */
        assert_int_equal(c.mappings, 0);
    assert_int_equal(c.allocations, 0);
    assert_int_equal(c.pinned, 0);
    rank_world_free(&b.world);
    lab_stop(&the_lab);
    snprintf(command, sizeof command, "rm -r %s", b.scratch);
    assert_int_equal(system(command), 0);
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, tear_down)

/* --------------------------------------------------------------------- pulls */

typedef struct puller {
    bool spare;
    uint32_t timeout_ms;
    char directory[64];
    fanin_status status;
    fanin_error error;
    fanin_path path;
    pthread_t thread;
} puller;

static void *pull_main(void *cookie)
{
    puller *p = cookie;
    fanin_result *result = NULL;
    fanin_result_info info = {.struct_size = sizeof info};
    fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    options.spare_file = p->spare;
    if (p->timeout_ms)
        options.timeout_ms = p->timeout_ms;
    p->error = (fanin_error)FANIN_ERROR_INIT;
    snprintf(p->directory, sizeof p->directory, "%s/%u", b.scratch, b.pulls++);
    p->status =
        fanin_client_pull_adapter(b.client, &options, p->directory, &result, &p->error);
    if (p->status == FANIN_OK) {
        fanin_result_get(result, &info);
        p->path = info.path;
    }
    fanin_result_free(&result);
    return NULL;
}

/* A pull that finds a directory reads its files and compares them with their digests. */
static void check_digests(const puller *p)
{
    fanin_result *result = NULL;
    fanin_result_info info = {.struct_size = sizeof info};
    const fanin_pull_options options = make_options(FANIN_STEP_NEWEST, 0);
    assert_works(
        fanin_client_pull_adapter(b.client, &options, p->directory, &result, ERROR));
    fanin_result_get(result, &info);
    assert_true(info.reused);
    fanin_result_free(&result);
}

/* What it brought is the pattern's. */
static void check_pulled(const puller *p)
{
    const check_pattern pattern = {.follows = true};
    uint64_t bytes;
    fanin_error error = FANIN_ERROR_INIT;
    assert_ok(p->status, p->error);
    assert_ok(check_directory(&pattern, p->directory, "lora:0", 1, &bytes, &error),
              error);
    assert_true(bytes > 0);
    check_digests(p);
}

/* By cuda_ipc, and the devices digest what lies in whole pieces of the file. */
static void pull_well(bool spare)
{
    puller p = {.spare = spare};
    fake_cuda_counts before, after;
    fake_cuda_count(&before);
    pull_main(&p);
    fake_cuda_count(&after);
    check_pulled(&p);
    assert_int_equal(p.path, FANIN_PATH_CUDA_IPC);
    assert_int_equal(after.digests > before.digests, !without_kernel);
}

static size_t gatherers(void)
{
    return b.client->publications->paths->gather.n;
}

/* A pull whose kernel on device 1 stands still. */
static void start_and_hold(puller *p)
{
    fake_cuda_hold_kernel(1, 1);
    assert_int_equal(pthread_create(&p->thread, NULL, pull_main, p), 0);
    assert_true(fake_cuda_wait_kernel_held(1));
}

/* --------------------------------------------------------------------- tests */

/* By pinned chunks, and straight into a file that was pinned before. */
CASE(both_devices_gather)
{
    set_up();
    pull_well(false);
    assert_int_equal(gatherers(), 2);
    for (int spare = 0; spare < 2; spare++) {
        puller p = {.spare = spare};
        pull_well(spare);
        start_and_hold(&p);
        fake_cuda_release(1);
        assert_int_equal(pthread_join(p.thread, NULL), 0);
        check_pulled(&p);
    }
}

/* Devices that cannot load it: threads digest what has landed. */
CASE(without_the_digest_kernel)
{
    fanin_error error = FANIN_ERROR_INIT;
    set_up_on(2, 3);
    gpu *g = client_gpu(b.client);
    fake_cuda_fail("cuModuleGetFunction", CUDA_ERROR_NOT_FOUND, 0, 0);
    for (int device = 2; device < 4; device++)
        assert_int_not_equal(gpu_prepare(g, device, GPU_FILE_DIGEST, &error), FANIN_OK);
    fake_cuda_fail("cuModuleGetFunction", CUDA_SUCCESS, 0, 0);
    without_kernel = true;
    for (int spare = 0; spare < 2; spare++)
        pull_well(spare);
    without_kernel = false;
}

/* Few bytes are not worth a second device. */
CASE(one_device_gathers_little)
{
    set_up();
    b.client->devices->gather_bytes = (uint64_t)1 << 40;
    pull_well(false);
    assert_int_equal(gatherers(), 1);
}

/* A device whose memory is full leaves it to the other one, and says so once. */
CASE(a_full_device_does_not_gather)
{
    void *filler = NULL;
    set_up();
    for (uint64_t size = DEVICE_BYTES; !filler; size -= (uint64_t)1 << 20) {
        CUdeviceptr at;
        assert_true(size > DEVICE_BYTES / 2);
        assert_int_equal(gpu_context_enter(client_gpu(b.client), 1, NULL), FANIN_OK);
        if (cuMemAlloc(&at, size) == CUDA_SUCCESS)
            filler = (void *)at;
        gpu_context_leave(client_gpu(b.client));
    }
    pull_well(false);
    assert_int_equal(gatherers(), 1);
    pull_well(true);
    pull_well(true);
    assert_int_equal(gatherers(), 1);
    fake_cuda_free(filler);
}

/* Devices that cannot reach each other: what the one that gathers cannot read comes by stream. */
CASE(without_peer_access_one_gathers)
{
    puller p = {.spare = true};
    set_up();
    fake_cuda_fail("cuDeviceCanAccessPeer", CUDA_ERROR_UNKNOWN, 0, 0);
    pull_main(&p);
    check_pulled(&p);
    assert_int_equal(gatherers(), 1);
    pull_main(&p);
    check_pulled(&p);
    fake_cuda_fail("cuDeviceCanAccessPeer", CUDA_SUCCESS, 0, 0);
}

/* Neither cancel nor a deadline leaves anything behind, and the next pull is whole. */
CASE(a_pull_that_is_given_up_leaves_nothing)
{
    set_up();
    pull_well(true);
    for (int by_deadline = 0; by_deadline < 2; by_deadline++) {
        puller p = {.spare = true, .timeout_ms = by_deadline ? GIVE_UP_MS : 0};
        unsigned before = count_entries();
        start_and_hold(&p);
        deadline passed = deadline_in_ms(GIVE_UP_MS); /* later than the pull's */
        if (!by_deadline)
            fanin_client_cancel(b.client);
        while (by_deadline && !deadline_passed(passed))
            sched_yield();
        fake_cuda_release(1); /* a kernel that runs is waited for */
        assert_int_equal(pthread_join(p.thread, NULL), 0);
        assert_int_equal(p.status,
                         by_deadline ? FANIN_ERR_TIMEOUT : FANIN_ERR_CANCELLED);
        assert_int_equal(count_entries(), before);
        pull_well(true);
    }
}

/* One of them fails in the middle: the rest of the pull's time is for another path. */
CASE(a_device_fails_in_the_middle)
{
    puller p = {.spare = true};
    set_up();
    pull_well(true);
    start_and_hold(&p);
    b.failed = true;
    fake_cuda_break(1);
    fake_cuda_release(1);
    assert_int_equal(pthread_join(p.thread, NULL), 0);
    check_pulled(&p);
    assert_int_equal(p.path, FANIN_PATH_STREAM);
    assert_int_equal(count_entries(), 2);
    fake_cuda_repair(1);
    puller again = {.spare = true};
    pull_main(&again);
    check_pulled(&again);
}

static int open_lab(void **state)
{
    char memory[32];
    snprintf(memory, sizeof memory, "%llu", (unsigned long long)DEVICE_BYTES);
    setenv("FAKE_CUDA_MEMORY", memory, 1);
    setenv("FAKE_CUDA_DEVICES", "4", 1);
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
