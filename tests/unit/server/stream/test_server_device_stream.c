/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory by stream: layouts, order, bounded memory, epochs and faults of the device. The
   driver is a stand-in. */
#include "call.h"
#include "guests/peer.h"
#include "gpu.h"
#include "log_catcher.h"
#include "server_device.h"
#include "testing.h"

#include <cuda.h>

/* ------------------------------------------------------------------ stream */

/* Both of them by the thread that commits; a device that cannot run them serves other paths
   still. */
DEVICE_CLEAN_TEST(kernels_are_loaded_by_commits)
{
    static uint8_t got[4096];
    uint8_t *memory = device_alloc(1, sizeof got, FAKE_CUDA_MALLOC);
    read_entry all = {.box = 0, .count = 1};
    fanin_server *s = server_start_lease(1000);
    server_put(s, RUN, "t", memory, sizeof got);
    fake_cuda_fail("cuModuleLoadData", CUDA_ERROR_NO_BINARY_FOR_GPU, 0, 0);
    log_listen("no-stream");
    server_commit(s, 1);
    log_expect(1, RUN);
    log_await("device 1");
    puller l = puller_open_unix(s);
    puller_begin(&l);
    peer_request_read(&l.data, l.grant.token, sizeof got, &all, 1);
    assert_says(peer_expect_error(&l.data, FANIN_ERR_TRANSPORT).message, "device 1");
    server_tear_down(state);
    fake_cuda_fail("cuModuleLoadData", CUDA_SUCCESS, 0, 0);

    log_listen("no-stream");
    uint64_t before = fake_cuda_calls("cuModuleLoadData");
    l = device_serve_bytes(memory, sizeof got);
    assert_int_equal(fake_cuda_calls("cuModuleLoadData"), before + 2);
    peer_read(&l.data, &l.grant, &all, 1, got, sizeof got);
    assert_memory_equal(got, device_bytes(memory), sizeof got);
    assert_int_equal(fake_cuda_calls("cuModuleLoadData"), before + 2);
    log_expect(0, "");
}

/* Whose first read makes streams and pinned memory, and whose whole way is gone by ranks that end.
   */
DEVICE_CLEAN_TEST(a_graph_that_the_trainer_captures_stays_valid)
{
    static uint8_t got[4096];
    uint8_t *memory = device_alloc(0, sizeof got, FAKE_CUDA_MALLOC);
    read_entry all = {.box = 0, .count = 1};
    puller l = device_serve_bytes(memory, sizeof got);
    uint64_t before = fake_cuda_calls("cuMemHostAlloc");
    fake_cuda_begin_capture();
    peer_read(&l.data, &l.grant, &all, 1, got, sizeof got);
    assert_memory_equal(got, device_bytes(memory), sizeof got);
    assert_true(fake_cuda_calls("cuMemHostAlloc") > before);
    server_tear_down(state);
    assert_true(fake_cuda_end_capture());
}

DEVICE_CLEAN_TEST(every_layout_is_gathered)
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
        puller l = device_serve(&t, 1);
        puller_expect_box(&l, want, sizeof want);
        server_tear_down(state);
    }
}

/* Boxes of the host and of two devices, in one read and in one chunk. */
DEVICE_CLEAN_TEST(places_mix_in_one_read)
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
    puller l = device_serve(t, COUNT);
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
    server_tear_down(state);
    free(host);
}

DEVICE_CLEAN_TEST(reads_are_pipelined)
{
    uint8_t *memory = device_alloc(0, 6 * MIB, FAKE_CUDA_MALLOC);
    puller l = device_serve_bytes(memory, 6 * MIB);
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
    peer_await_count(&l.data, l.server, offsetof(fanin_server_stats, reads_streamed),
                     12);
}

/* More connections than chunks: they wait for each other, and memory stays bounded over all
   threads. */
static void share_chunks(uint32_t threads, uint64_t most)
{
    uint8_t *memory = device_alloc(0, 5 * MIB, FAKE_CUDA_MALLOC);
    fanin_server_config c = server_config();
    c.data_threads = threads;
    c.max_memory = threads * 8 * MIB;
    fanin_server *s = server_start(&c);
    server_put(s, RUN, "t", memory, 5 * MIB);
    server_commit(s, 1);
    puller l = puller_open_unix(s);
    puller_begin(&l);
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
    assert_in_range(counts.peak_pinned_bytes, threads * MIB, most);
}

DEVICE_CLEAN_TEST(chunks_are_few)
{
    share_chunks(1, 4 * MIB);
    server_tear_down(state);
    share_chunks(4, 9 * MIB);
}

/* --------------------------------------------------------- whose turn it is */

enum {
    SMALL = 65536,
    STRANGERS = 3,
    MANY = 200
}; /* more turns than one look at a queue has */

/* One tensor on each device, and strangers who have both chunks there are, whose copies stand
   still, and wait for one more. */
typedef struct queue_scene {
    puller own, strangers[STRANGERS];
} queue_scene;

static void request_small(puller *l, uint64_t box)
{
    read_entry all = {.box = box, .count = 1};
    peer_request_read(&l->data, l->grant.token, SMALL, &all, 1);
}

static void ping_often(peer *p)
{
    for (int i = 0; i < MANY; i++)
        peer_ping(p);
}

/* Stranger i reads the box that is on device of[i]. */
static queue_scene chunks_are_out(const int of[STRANGERS])
{
    queue_scene q;
    fanin_server_config c = server_config();
    c.data_threads = 1;
    c.max_memory = 8 * MIB;
    c.stranger_cpu = 10;
    fanin_server *s = server_start(&c);
    server_put(s, RUN, "a", device_alloc(0, SMALL, FAKE_CUDA_MALLOC), SMALL);
    server_put(s, RUN, "b", device_alloc(1, SMALL, FAKE_CUDA_MALLOC), SMALL);
    server_commit(s, 1);
    q.own = puller_open_unix(s);
    puller_begin(&q.own);
    fake_cuda_hold(0);
    fake_cuda_hold(1);
    for (int i = 0; i < STRANGERS; i++) {
        q.strangers[i] = puller_open(s);
        puller_begin(&q.strangers[i]);
        request_small(&q.strangers[i], (uint64_t)of[i]);
        ping_often(&q.own.data); /* it has had its turn */
    }
    return q;
}

static void expect_small(puller *l)
{
    assert_int_equal(peer_expect(&l->data, MSG_READ_OK).size, SMALL);
}

/* It gets the next chunk, however many strangers were there before. */
DEVICE_CLEAN_TEST(the_own_user_waits_for_one_stranger)
{
    queue_scene q = chunks_are_out((int[]){1, 0, 0});
    request_small(&q.own, 1);
    peer more = peer_data_unix(q.own.server, &q.own.control);
    ping_often(&more);
    fake_cuda_release(1);
    expect_small(&q.own);
    expect_small(&q.strangers[0]);
    fake_cuda_release(0);
    expect_small(&q.strangers[1]);
    expect_small(&q.strangers[2]);
}

/* What strangers may have of CPU time is gone meanwhile: a chunk that they have, or get, they do
   not keep. */
DEVICE_CLEAN_TEST(who_has_to_rest_keeps_no_chunk)
{
    peer_share others = {.is_own = false};
    queue_scene q = chunks_are_out((int[]){0, 0, 0});
    peer_charge_send(q.own.server, &others, UINT64_C(100000000000));
    fake_cuda_release(0);
    for (int i = 0; i < STRANGERS; i++)
        expect_small(&q.strangers[i]);
    request_small(&q.strangers[0], 0);
    peer_await_count(&q.own.data, q.own.server,
                     offsetof(fanin_server_stats, requests_delayed), 1);
    fake_cuda_release(1);
    request_small(&q.own, 1);
    expect_small(&q.own);
}

/* Strangers have all that they may: the own user has a chunk of its quarter. */
DEVICE_CLEAN_TEST(strangers_leave_a_chunk_for_the_own_user)
{
    static uint8_t got[4096];
    uint8_t *memory = device_alloc(0, sizeof got, FAKE_CUDA_MALLOC);
    read_entry all = {.box = 0, .count = 1};
    fanin_server *s = server_start_lease(1000);
    server_put(s, RUN, "t", memory, sizeof got);
    server_commit(s, 1);
    puller stranger = puller_open(s), own = puller_open_unix(s);
    puller_begin(&stranger);
    puller_begin(&own);
    uint64_t taken = s->max_memory / 4 * 3;
    atomic_fetch_add(&s->memory, taken);
    atomic_fetch_add(&s->network_memory, taken);
    peer_request_read(&stranger.data, stranger.grant.token, sizeof got, &all, 1);
    (void)peer_expect_error(&stranger.data, FANIN_ERR_LIMIT);
    peer_read(&own.data, &own.grant, &all, 1, got, sizeof got);
    assert_memory_equal(got, device_bytes(memory), sizeof got);
    atomic_fetch_sub(&s->memory, taken);
    atomic_fetch_sub(&s->network_memory, taken);
}

/* ------------------------------------------------------------------ epochs */

/* 4 MiB at @p memory of a server whose leases delay nothing. */
static puller serve_without_lease(uint8_t *memory)
{
    fanin_server *s = server_start_lease(0);
    server_put(s, RUN, "t", memory, 4 * MIB);
    server_commit(s, 1);
    puller l = puller_open_unix(s);
    puller_begin(&l);
    return l;
}

DEVICE_CLEAN_TEST(begin_update_waits_for_copies)
{
    uint8_t *memory = device_alloc(0, 4 * MIB, FAKE_CUDA_MALLOC);
    puller l = serve_without_lease(memory);
    fake_cuda_hold(0);
    read_entry all = {.box = 0, .count = 1};
    peer_request_read(&l.data, l.grant.token, 4 * MIB, &all, 1);
    assert_true(fake_cuda_wait_queued(0, 2));
    call update;
    call_start(&update, server_begin_run, l.server);
    /* The epoch has turned, and begin_update waits. */
    peer_await_count(&l.control, l.server, offsetof(fanin_server_stats, drains_expired),
                     1);
    assert_false(call_returns(&update, 50));
    fake_cuda_release(0);
    assert_int_equal(call_end(&update), FANIN_OK);
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
}

DEVICE_CLEAN_TEST(removal_while_copying)
{
    uint8_t *memory = device_alloc(0, 4 * MIB, FAKE_CUDA_MALLOC);
    puller l = serve_without_lease(memory);
    fake_cuda_hold_kernel(0, 1); /* in the midst of the kernel */
    read_entry all = {.box = 0, .count = 1};
    peer_request_read(&l.data, l.grant.token, 4 * MIB, &all, 1);
    assert_true(fake_cuda_wait_kernel_held(0));
    peer_close(&l.data);
    fake_cuda_release(0);
    assert_int_equal(fanin_server_remove(l.server, RUN, NULL, NULL), FANIN_OK);
    device_free(memory); /* aborts if a kernel still reads it */
}

/* A connection, then the server, end while a copy is under way. */
DEVICE_CLEAN_TEST(ends_while_copying)
{
    uint8_t *memory = device_alloc(0, 4 * MIB, FAKE_CUDA_MALLOC);
    for (int round = 0; round < 2; round++) {
        puller l = device_serve_bytes(memory, 4 * MIB);
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
            puller_expect_box(&l, device_bytes(memory), 4 * MIB);
        }
        fake_cuda_release(0);
        server_tear_down(state);
    }
}

/* ------------------------------------------------------------------ faults */

/* Reads that fail are a stranger's lines, of which there are few; the device's is there. */
DEVICE_CLEAN_TEST(failing_reads_do_not_flood_the_log)
{
    static uint8_t got[1];
    read_entry all = {.box = 0, .count = 1};
    fanin_box box;
    fanin_tensor t = byte_tensor(
        "t", &box, device_alloc(0, sizeof got, FAKE_CUDA_MALLOC), sizeof got);
    puller l = puller_serve(puller_open, &t, 1);
    log_listen("device-failed");
    fake_cuda_fail("cuLaunchKernel", CUDA_ERROR_OUT_OF_MEMORY, 0, 0);
    for (int i = 0; i < MANY; i++) {
        peer_request_read(&l.data, l.grant.token, sizeof got, &all, 1);
        peer_expect_error(&l.data, FANIN_ERR_TRANSPORT);
    }
    fake_cuda_fail("cuLaunchKernel", CUDA_SUCCESS, 0, 0);
    log_expect(1, "CUDA device 0 of rank 0");
    assert_in_range(server_stats(l.server).log_lines_left_out, 1, MANY - 1);
}

/* The second half of a reply fails: it cannot become an error any more. */
DEVICE_CLEAN_TEST(late_failures_void_the_lease)
{
    uint8_t *memory = device_alloc(0, 4 * MIB, FAKE_CUDA_MALLOC);
    puller l = device_serve_bytes(memory, 4 * MIB);
    read_entry all = {.box = 0, .count = 1};
    fake_cuda_fail("cuLaunchKernel", CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, 2, 1);
    peer_request_read(&l.data, l.grant.token, 4 * MIB, &all, 1);
    body in = peer_expect(&l.data, MSG_READ_OK);
    fake_cuda_fail("cuLaunchKernel", CUDA_SUCCESS, 0, 0);
    assert_int_equal(in.size, 4 * MIB);
    assert_memory_equal(in.data, device_bytes(memory), MIB);
    for (size_t i = 2 * MIB; i < 4 * MIB; i++)
        assert_int_equal(in.data[i], 0);
    peer_request_end(&l.control, &l.grant, false);
    assert_says(peer_expect_error(&l.control, FANIN_ERR_TRANSPORT).message,
                "CUDA device 0");
    puller_begin(&l);
    puller_expect_box(&l, device_bytes(memory), 4 * MIB);
    puller_end(&l);
}

/* A device that does not get on keeps the trainer waiting for 10 s, no longer. */
DEVICE_CLEAN_TEST(hung_devices_are_given_up)
{
    uint8_t *memory = device_alloc(0, 4 * MIB, FAKE_CUDA_MALLOC);
    puller l = device_serve_bytes(memory, 4 * MIB);
    read_entry all = {.box = 0, .count = 1};
    fake_cuda_hold(0);
    log_listen("device-stalled");
    peer_request_read(&l.data, l.grant.token, 4 * MIB, &all, 1);
    assert_true(fake_cuda_wait_queued(0, 2));
    peer_end(&l.control, &l.grant, true);
    server_begin(l.server);
    log_await("");
    assert_says(peer_expect_error(&l.data, FANIN_ERR_TRANSPORT).message,
                "CUDA device 0");
    /* Then it gets on after all: nothing of the past reaches a later reply. */
    fake_cuda_release(0);
    assert_true(fake_cuda_wait_idle(0));
    server_commit(l.server, 2);
    puller_begin(&l);
    puller_expect_box(&l, device_bytes(memory), 4 * MIB);
}

/* Whatever function of the driver fails first, a read gives an error or the bytes, and the
   trainer goes on. */
DEVICE_CLEAN_TEST(any_failure_is_survived)
{
    static const char *const functions[] = {"cuMemHostAlloc", "cuStreamCreate",
                                            "cuLaunchKernel", "cuStreamAddCallback",
                                            "cuCtxPushCurrent_v2"};
    uint8_t *memory = device_alloc(0, 2 * MIB, FAKE_CUDA_MALLOC);
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        for (unsigned after = 0; after < 3; after++) {
            puller l = device_serve_bytes(memory, 2 * MIB);
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
            puller_begin(&l);
            puller_expect_box(&l, device_bytes(memory), 2 * MIB);
            server_tear_down(state);
        }
    }
}

/* The last: a broken device's streams cannot be destroyed, nor can what it leaves be given back. */
DEVICE_TEST(broken_devices_are_errors)
{
    uint8_t *memory = device_alloc(1, 4 * MIB, FAKE_CUDA_MALLOC);
    puller l = device_serve_bytes(memory, 4 * MIB);
    read_entry all = {.box = 0, .count = 1};
    fake_cuda_hold(1);
    peer_request_read(&l.data, l.grant.token, 4 * MIB, &all, 1);
    assert_true(fake_cuda_wait_queued(1, 1));
    log_listen("device-failed");
    fake_cuda_break(1); /* under a copy */
    fake_cuda_release(1);
    assert_says(peer_expect_error(&l.data, FANIN_ERR_TRANSPORT).message,
                "CUDA device 1");
    log_await("");
    peer_request_read(&l.data, l.grant.token, 4 * MIB, &all, 1); /* before one */
    assert_says(peer_expect_error(&l.data, FANIN_ERR_TRANSPORT).message,
                "CUDA device 1");
    server_begin(l.server); /* does not hang */
    server_tear_down(state);
    fake_cuda_repair(1);
}

/* The trainer has started CUDA. */
static int set_up(void **state)
{
    logger none = {0};
    gpu *driver;
    return gpu_load(&none, &driver, NULL) == FANIN_OK ? 0 : -1;
}

TESTS_BETWEEN(set_up, NULL)
