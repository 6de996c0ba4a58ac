/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory by stream: layouts, order, bounded memory, epochs and faults of the device. The
   driver is a stand-in. */
#include "clock.h"
#include "gpu.h"
#include "server_device.h"
#include "testing.h"

#include <cuda.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------ stream */

/* Both of them by the thread that commits; a device that cannot run them serves other paths
   still. */
static void kernels_are_loaded_by_commits(void **state)
{
    static uint8_t got[4096];
    uint8_t *memory = device_alloc(1, sizeof got, FAKE_CUDA_MALLOC);
    read_entry all = {.box = 0, .count = 1};
    fanin_server *s = device_start(1000);
    server_put(s, RUN, "t", memory, sizeof got);
    fake_cuda_fail("cuModuleLoadData", CUDA_ERROR_NO_BINARY_FOR_GPU, 0, 0);
    device_listen("no-stream");
    server_commit(s, 1);
    assert_int_equal(device_heard(), 1);
    assert_says(device_log_text, RUN);
    assert_says(device_log_text, "device 1");
    served l = {.server = s};
    device_peers(&l);
    peer_request_read(&l.data, l.grant.token, sizeof got, &all, 1);
    assert_says(peer_expect_error(&l.data, FANIN_ERR_TRANSPORT).message, "device 1");
    device_leave(&l);
    fake_cuda_fail("cuModuleLoadData", CUDA_SUCCESS, 0, 0);

    device_listen("no-stream");
    uint64_t before = fake_cuda_calls("cuModuleLoadData");
    l = device_serve_bytes(memory, sizeof got);
    assert_int_equal(fake_cuda_calls("cuModuleLoadData"), before + 2);
    peer_read(&l.data, &l.grant, &all, 1, got, sizeof got);
    assert_memory_equal(got, device_bytes(memory), sizeof got);
    assert_int_equal(fake_cuda_calls("cuModuleLoadData"), before + 2);
    assert_int_equal(device_heard(), 0);
    device_leave(&l);
    fake_cuda_free(memory);
    device_assert_clean();
}

static void check_reads(served *l, const uint8_t *want, size_t bytes)
{
    uint8_t *got = malloc(bytes);
    read_entry all = {.box = 0, .count = 1};
    memset(got, 0, bytes);
    peer_read(&l->data, &l->grant, &all, 1, got, bytes);
    assert_memory_equal(got, want, bytes);
    for (size_t at = 0, step = 1; at < bytes; at += step, step = step * 3 + 1) {
        size_t length = bytes - at < step ? bytes - at : step;
        read_entry part = {.box = 0, .offset = at, .length = length};
        peer_read(&l->data, &l->grant, &part, 1, got, length);
        assert_memory_equal(got, want + at, length);
    }
    free(got);
}

static void every_layout_is_gathered(void **state)
{
    static const int64_t strides[][3] = {
        {0, 0, 0},      {1300, 40, 2},  {1300, 42, 2}, {2, 80, 2400},
        {1200, 40, -2}, {-2000, 50, 2}, {1200, 0, 2},
    };
    uint8_t *memory = device_alloc(0, MIB, FAKE_CUDA_MALLOC);
    const uint8_t *alias = device_bytes(memory);
    static uint8_t want[40 * 30 * 20 * 2];
    for (size_t i = 0; i < sizeof strides / sizeof *strides; i++) {
        fanin_box box = {.extent = {40, 30, 20}, .address = memory + MIB / 2};
        memcpy(box.stride, strides[i], sizeof strides[i]);
        fanin_tensor t = {.struct_size = sizeof t,
                          .name = "t",
                          .dtype = FANIN_DTYPE_BF16,
                          .n_dims = 3,
                          .shape = {40, 30, 20},
                          .boxes = &box,
                          .n_boxes = 1};
        const int64_t *s = strides[i][1] ? strides[i] : (const int64_t[]){1200, 40, 2};
        s = i == 6 ? strides[i] : s;
        uint8_t *to = want;
        for (int64_t x = 0; x < 40; x++)
            for (int64_t y = 0; y < 30; y++)
                for (int64_t z = 0; z < 20; z++, to += 2)
                    memcpy(to, alias + MIB / 2 + x * s[0] + y * s[1] + z * s[2], 2);
        served l = device_serve(&t, 1);
        check_reads(&l, want, sizeof want);
        device_leave(&l);
    }
    fake_cuda_free(memory);
    device_assert_clean();
}

/* Boxes of the host and of two devices, in one read and in one chunk. */
static void places_mix_in_one_read(void **state)
{
    enum { COUNT = 60, SIZE = 20000 };
    static fanin_tensor t[COUNT];
    static fanin_box boxes[COUNT];
    static char names[COUNT][8];
    static uint8_t want[COUNT * SIZE], got[COUNT * SIZE];
    uint8_t *host = malloc(COUNT * SIZE);
    uint8_t *zero = device_alloc(0, COUNT * SIZE, FAKE_CUDA_MALLOC);
    uint8_t *one = device_alloc(1, COUNT * SIZE, FAKE_CUDA_POOL);
    for (size_t i = 0; i < COUNT * SIZE; i++)
        host[i] = (uint8_t)(i * 7 + 3);
    for (size_t i = 0; i < COUNT; i++) {
        size_t at = (COUNT - 1 - i) * SIZE;
        uint8_t *from = i % 4 < 2 ? host : i % 8 < 4 ? zero : one;
        snprintf(names[i], sizeof names[i], "%04zu", i);
        t[i] = byte_tensor(names[i], &boxes[i], from + at, SIZE);
        memcpy(want + i * SIZE, (from == host ? host : device_bytes(from)) + at, SIZE);
    }
    served l = device_serve(t, COUNT);
    read_entry all = {.box = 0, .count = COUNT};
    peer_read(&l.data, &l.grant, &all, 1, got, sizeof got);
    assert_memory_equal(got, want, sizeof got);
    read_entry each[COUNT];
    for (size_t i = 0; i < COUNT; i++)
        each[i] = (read_entry){.box = COUNT - 1 - i, .offset = i, .length = 1000};
    peer_read(&l.data, &l.grant, each, COUNT, got, COUNT * 1000);
    for (size_t i = 0; i < COUNT; i++)
        assert_memory_equal(got + i * 1000, want + (COUNT - 1 - i) * SIZE + i, 1000);
    /* What is the host's alone is not copied by a device. */
    fake_cuda_counts before, after;
    fake_cuda_count(&before);
    read_entry one_box = {.box = 0, .count = 1};
    peer_read(&l.data, &l.grant, &one_box, 1, got, SIZE);
    fake_cuda_count(&after);
    assert_memory_equal(got, want, SIZE);
    assert_int_equal(before.kernels, after.kernels);
    device_leave(&l);
    free(host);
    fake_cuda_free(zero);
    fake_cuda_free(one);
    device_assert_clean();
}

static void reads_are_pipelined(void **state)
{
    uint8_t *memory = device_alloc(0, 6 * MIB, FAKE_CUDA_MALLOC);
    served l = device_serve_bytes(memory, 6 * MIB);
    uint64_t first = l.data.request + 1;
    for (size_t i = 0; i < 12; i++) {
        read_entry part = {.box = 0, .offset = i * 100000, .length = 4 * MIB + i};
        part.length = i % 2 ? 100 + i : 4 * MIB - i;
        peer_request_read(&l.data, l.grant.token, part.length, &part, 1);
    }
    for (size_t i = 0; i < 12; i++) {
        size_t length = i % 2 ? 100 + i : 4 * MIB - i;
        body in = peer_expect(&l.data, MSG_READ_OK);
        assert_int_equal(l.data.frame.request, first + i);
        assert_int_equal(in.size, length);
        assert_memory_equal(in.data, device_bytes(memory) + i * 100000, length);
    }
    /* The count follows the bytes. */
    deadline at = deadline_in_ms(PATIENCE_MS);
    while (server_stats(l.server).reads_streamed < 12 && !deadline_passed(at))
        ;
    assert_int_equal(server_stats(l.server).reads_streamed, 12);
    device_leave(&l);
    fake_cuda_free(memory);
    device_assert_clean();
}

/* More connections than chunks: they wait for each other, and memory stays bounded. */
static void chunks_are_few(void **state)
{
    uint8_t *memory = device_alloc(0, 5 * MIB, FAKE_CUDA_MALLOC);
    fanin_server_config c = server_config();
    c.max_memory = 8 * MIB;
    served l = {.server = server_start(&c)};
    server_put(l.server, RUN, "t", memory, 5 * MIB);
    server_commit(l.server, 1);
    device_peers(&l);
    fake_cuda_reset_peaks();
    fake_cuda_hold(0);
    enum { PEERS = 12 };
    peer more[PEERS];
    for (size_t i = 0; i < PEERS; i++) {
        more[i] = peer_data_unix(l.server, &l.control);
        read_entry part = {.box = 0, .offset = i, .length = 3 * MIB};
        peer_request_read(&more[i], l.grant.token, 3 * MIB, &part, 1);
    }
    assert_true(fake_cuda_wait_queued(0, 1));
    peer_ping(&l.data); /* nobody is blocked */
    peer_close(&more[PEERS - 1]);
    fake_cuda_release(0);
    for (size_t i = 0; i < PEERS - 1; i++) {
        body in = peer_expect(&more[i], MSG_READ_OK);
        assert_memory_equal(in.data, device_bytes(memory) + i, 3 * MIB);
        peer_close(&more[i]);
    }
    fake_cuda_counts counts;
    fake_cuda_count(&counts);
    assert_in_range(counts.peak_pinned_bytes, MIB, 4 * MIB);
    device_leave(&l);
    fake_cuda_free(memory);
    device_assert_clean();
}

/* ------------------------------------------------------------------ epochs */

typedef struct updater {
    fanin_server *server;
    atomic_bool released; /* what must have happened before begin_update returns */
    bool too_early;
    pthread_t thread;
} updater;

static void *update(void *cookie)
{
    updater *u = cookie;
    if (fanin_server_begin_update(u->server, RUN, NULL) != FANIN_OK)
        return u;
    u->too_early = !atomic_load(&u->released);
    return NULL;
}

static void begin_update_waits_for_copies(void **state)
{
    uint8_t *memory = device_alloc(0, 4 * MIB, FAKE_CUDA_MALLOC);
    served l = {.server = device_start(0)}; /* leases delay nothing */
    server_put(l.server, RUN, "t", memory, 4 * MIB);
    server_commit(l.server, 1);
    device_peers(&l);
    fake_cuda_hold(0);
    read_entry all = {.box = 0, .count = 1};
    peer_request_read(&l.data, l.grant.token, 4 * MIB, &all, 1);
    assert_true(fake_cuda_wait_queued(0, 2));
    updater u = {.server = l.server};
    assert_int_equal(pthread_create(&u.thread, NULL, update, &u), 0);
    /* The epoch has turned, and begin_update waits. */
    deadline at = deadline_in_ms(PATIENCE_MS);
    while (server_stats(l.server).drains_expired == 0 && !deadline_passed(at))
        ;
    peer_ping(&l.control);
    atomic_store(&u.released, true);
    fake_cuda_release(0);
    void *failed;
    pthread_join(u.thread, &failed);
    assert_null(failed);
    assert_false(u.too_early);
    memset(fake_cuda_alias(memory), 0xee, 4 * MIB); /* the trainer writes */
    body in = peer_expect(&l.data, MSG_READ_OK);
    const uint8_t *got = in.data;
    size_t read = 0;
    while (read < 4 * MIB && got[read] == device_byte(read))
        read++;
    assert_true(read >= MIB); /* the chunks under way, then padding */
    for (size_t i = read; i < 4 * MIB; i++)
        assert_int_equal(got[i], 0);
    assert_false(peer_end(&l.control, &l.grant, false).good);
    peer_request_read(&l.data, l.grant.token, 4 * MIB, &all, 1);
    peer_expect_error(&l.data, FANIN_ERR_STALE);
    device_leave(&l);
    fake_cuda_free(memory);
    device_assert_clean();
}

static void removal_while_copying(void **state)
{
    uint8_t *memory = device_alloc(0, 4 * MIB, FAKE_CUDA_MALLOC);
    served l = {.server = device_start(0)};
    server_put(l.server, RUN, "t", memory, 4 * MIB);
    server_commit(l.server, 1);
    device_peers(&l);
    fake_cuda_hold_kernel(0, 1); /* in the midst of the kernel */
    read_entry all = {.box = 0, .count = 1};
    peer_request_read(&l.data, l.grant.token, 4 * MIB, &all, 1);
    assert_true(fake_cuda_wait_kernel_held(0));
    peer_close(&l.data);
    fake_cuda_release(0);
    assert_int_equal(fanin_server_remove(l.server, RUN, NULL, NULL), FANIN_OK);
    fake_cuda_free(memory); /* aborts if a kernel still reads it */
    l.data = peer_data_unix(l.server, &l.control);
    device_leave(&l);
    device_assert_clean();
}

/* A connection, then the server, end while a copy is under way. */
static void ends_while_copying(void **state)
{
    uint8_t *memory = device_alloc(0, 4 * MIB, FAKE_CUDA_MALLOC);
    for (int round = 0; round < 2; round++) {
        served l = device_serve_bytes(memory, 4 * MIB);
        fake_cuda_hold(0);
        read_entry all = {.box = 0, .count = 1};
        peer_request_read(&l.data, l.grant.token, 4 * MIB, &all, 1);
        assert_true(fake_cuda_wait_queued(0, 1));
        peer_close(&l.control);
        peer_expect_closed(&l.data); /* the session's end closes it, chunks or not */
        l.control = peer_open_unix(l.server);
        if (round == 0) {
            peer_close(&l.data);
            l.data = peer_data_unix(l.server, &l.control);
            l.grant = peer_lease(&l.control);
            fake_cuda_release(0);
            uint8_t *got = malloc(4 * MIB);
            peer_read(&l.data, &l.grant, &all, 1, got, 4 * MIB);
            assert_memory_equal(got, device_bytes(memory), 4 * MIB);
            free(got);
        }
        fake_cuda_release(0);
        device_leave(&l);
    }
    fake_cuda_free(memory);
    device_assert_clean();
}

/* ------------------------------------------------------------------ faults */

/* A broken device's streams cannot be destroyed. */
static void broken_devices_are_errors(void **state)
{
    uint8_t *memory = device_alloc(1, 4 * MIB, FAKE_CUDA_MALLOC);
    served l = device_serve_bytes(memory, 4 * MIB);
    uint8_t *got = malloc(4 * MIB);
    read_entry all = {.box = 0, .count = 1};
    fake_cuda_hold(1);
    peer_request_read(&l.data, l.grant.token, 4 * MIB, &all, 1);
    assert_true(fake_cuda_wait_queued(1, 1));
    device_listen("device-failed");
    fake_cuda_break(1); /* under a copy */
    fake_cuda_release(1);
    assert_says(peer_expect_error(&l.data, FANIN_ERR_TRANSPORT).message,
                "CUDA device 1");
    assert_true(device_heard() > 0);
    peer_request_read(&l.data, l.grant.token, 4 * MIB, &all, 1); /* before one */
    assert_says(peer_expect_error(&l.data, FANIN_ERR_TRANSPORT).message,
                "CUDA device 1");
    server_begin(l.server); /* does not hang */
    device_leave(&l);
    fake_cuda_repair(1);
    free(got);
    fake_cuda_free(memory);
}

/* The second half of a reply fails: it cannot become an error any more. */
static void late_failures_void_the_lease(void **state)
{
    uint8_t *memory = device_alloc(0, 4 * MIB, FAKE_CUDA_MALLOC);
    served l = device_serve_bytes(memory, 4 * MIB);
    read_entry all = {.box = 0, .count = 1};
    fake_cuda_fail("cuLaunchKernel", CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, 2, 1);
    peer_request_read(&l.data, l.grant.token, 4 * MIB, &all, 1);
    body in = peer_expect(&l.data, MSG_READ_OK);
    fake_cuda_fail("cuLaunchKernel", CUDA_SUCCESS, 0, 0);
    assert_int_equal(in.size, 4 * MIB);
    assert_memory_equal(in.data, device_bytes(memory), MIB);
    for (size_t i = 2 * MIB; i < 4 * MIB; i++)
        assert_int_equal(in.data[i], 0);
    assert_false(peer_end(&l.control, &l.grant, false).good);
    uint8_t *got = malloc(4 * MIB);
    l.grant = peer_lease(&l.control);
    peer_read(&l.data, &l.grant, &all, 1, got, 4 * MIB);
    assert_memory_equal(got, device_bytes(memory), 4 * MIB);
    assert_true(peer_end(&l.control, &l.grant, false).good);
    free(got);
    device_leave(&l);
    fake_cuda_free(memory);
    device_assert_clean();
}

/* A device that does not get on keeps the trainer waiting for 10 s, no longer. */
static void hung_devices_are_given_up(void **state)
{
    uint8_t *memory = device_alloc(0, 4 * MIB, FAKE_CUDA_MALLOC);
    served l = device_serve_bytes(memory, 4 * MIB);
    read_entry all = {.box = 0, .count = 1};
    fake_cuda_hold(0);
    device_listen("device-stalled");
    peer_request_read(&l.data, l.grant.token, 4 * MIB, &all, 1);
    assert_true(fake_cuda_wait_queued(0, 2));
    peer_end(&l.control, &l.grant, true);
    deadline latest = deadline_in_ms(PATIENCE_MS);
    server_begin(l.server);
    assert_false(deadline_passed(latest));
    assert_true(device_heard() > 0);
    assert_says(peer_expect_error(&l.data, FANIN_ERR_TRANSPORT).message,
                "CUDA device 0");
    /* Then it gets on after all: nothing of the past reaches a later reply. */
    fake_cuda_release(0);
    assert_true(fake_cuda_wait_idle(0));
    server_commit(l.server, 2);
    l.grant = peer_lease(&l.control);
    uint8_t *got = malloc(4 * MIB);
    peer_read(&l.data, &l.grant, &all, 1, got, 4 * MIB);
    assert_memory_equal(got, device_bytes(memory), 4 * MIB);
    free(got);
    device_leave(&l);
    fake_cuda_free(memory);
    device_assert_clean();
}

/* Whatever function of the driver fails first, a read gives an error or the bytes, and the
   trainer goes on. */
static void any_failure_is_survived(void **state)
{
    static const char *const functions[] = {"cuMemHostAlloc", "cuStreamCreate",
                                            "cuLaunchKernel", "cuStreamAddCallback",
                                            "cuCtxPushCurrent_v2"};
    uint8_t *memory = device_alloc(0, 2 * MIB, FAKE_CUDA_MALLOC);
    uint8_t *got = malloc(2 * MIB);
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        for (unsigned after = 0; after < 3; after++) {
            served l = device_serve_bytes(memory, 2 * MIB);
            read_entry all = {.box = 0, .count = 1};
            fake_cuda_fail(functions[i], CUDA_ERROR_OUT_OF_MEMORY, after, 1);
            peer_request_read(&l.data, l.grant.token, 2 * MIB, &all, 1);
            peer_receive(&l.data);
            fake_cuda_fail(functions[i], CUDA_SUCCESS, 0, 0);
            assert_true(l.data.frame.type == MSG_ERROR ||
                        l.data.frame.type == MSG_READ_OK);
            bool good = l.data.frame.type == MSG_READ_OK &&
                        memcmp(l.data.body, device_bytes(memory), 2 * MIB) == 0;
            if (l.data.frame.type == MSG_READ_OK)
                assert_int_equal(peer_end(&l.control, &l.grant, false).good, good);
            else
                peer_end(&l.control, &l.grant, true);
            server_begin(l.server);
            server_commit(l.server, 2);
            l.grant = peer_lease(&l.control);
            peer_read(&l.data, &l.grant, &all, 1, got, 2 * MIB);
            assert_memory_equal(got, device_bytes(memory), 2 * MIB);
            device_leave(&l);
        }
    }
    free(got);
    fake_cuda_free(memory);
    device_assert_clean();
}

/* The trainer has started CUDA. */
static int set_up(void **state)
{
    logger none = {0};
    gpu *driver;
    return device_set_up(state) == 0 && gpu_load(&none, &driver, NULL) == FANIN_OK ? 0
                                                                                   : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(kernels_are_loaded_by_commits), /* before any other does it */
        cmocka_unit_test(every_layout_is_gathered),
        cmocka_unit_test(places_mix_in_one_read),
        cmocka_unit_test(reads_are_pipelined),
        cmocka_unit_test(chunks_are_few),
        cmocka_unit_test(begin_update_waits_for_copies),
        cmocka_unit_test(removal_while_copying),
        cmocka_unit_test(ends_while_copying),
        cmocka_unit_test(late_failures_void_the_lease),
        cmocka_unit_test(hung_devices_are_given_up),
        cmocka_unit_test(any_failure_is_survived),
        cmocka_unit_test(
            broken_devices_are_errors), /* leaves what cannot be given back */
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
