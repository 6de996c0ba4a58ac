/* SPDX-License-Identifier: Apache-2.0 */
/* Device memory on a server: what put finds out, who gets keys, and who is told to map what. The
   driver is a stand-in. */
#include "gpu.h"
#include "ipc_key.h"
#include "log_catcher.h"
#include "server_device.h"
#include "testing.h"

#include <cuda.h>

static gpu *driver;

/* --------------------------------------------------------------------- put */

/* Before anything in this process has started CUDA. */
DEVICE_CLEAN_TEST(host_memory_starts_no_cuda)
{
    static uint8_t memory[1000];
    puller l = device_serve_bytes(memory, sizeof memory);
    uint8_t got[1000];
    read_entry all = {.box = 0, .count = 1};
    peer_read(&l.data, &l.grant, &all, 1, got, sizeof got);
    server_tear_down(state);
    assert_int_equal(fake_cuda_calls("cuInit"), 0);
    logger none = {0};
    assert_works(gpu_load(&none, &driver, ERROR)); /* as the trainer does */
}

DEVICE_CLEAN_TEST(kind_and_device_are_found_out)
{
    static uint8_t memory[100];
    /* Neighbouring allocations touch each other. */
    uint8_t *a = device_alloc(0, 2 * MIB, FAKE_CUDA_MALLOC);
    uint8_t *b = device_alloc(0, 2 * MIB, FAKE_CUDA_MALLOC);
    uint8_t *c = device_alloc(1, 2 * MIB, FAKE_CUDA_MALLOC);
    fanin_box boxes[5];
    fanin_tensor t[] = {
        byte_tensor("a", &boxes[0], a + 512, 1000),
        byte_tensor("b", &boxes[1], a + 2 * MIB - 1000,
                    1000), /* same allocation, far off */
        byte_tensor("c", &boxes[2], b, 1000),
        byte_tensor("d", &boxes[3], c, 2 * MIB),
        byte_tensor("e", &boxes[4], memory, sizeof memory),
    };
    t[2].memory = (fanin_memory){FANIN_MEMORY_CUDA, 0};
    t[3].memory = (fanin_memory){FANIN_MEMORY_CUDA, -1};
    puller l = device_serve(t, 5);
    region_table *r = peer_regions(&l.control, &l.grant, WIRE_PATH_STREAM);
    assert_int_equal(r->count, 4);
    unsigned seen = 0;
    for (uint32_t i = 0; i < r->count; i++) {
        const region_entry *e = &r->entries[i];
        assert_int_equal(e->base, 0);
        assert_int_equal(e->rkey_size, 0);
        if (e->memory == FANIN_MEMORY_HOST && e->device == -1 && e->length == 100)
            seen |= 1;
        else if (e->memory == FANIN_MEMORY_CUDA && e->device == 1 &&
                 e->length == 2 * MIB)
            seen |= 2;
        else if (e->memory == FANIN_MEMORY_CUDA && e->device == 0 && e->length == 1000)
            seen |= 4;
        else if (e->memory == FANIN_MEMORY_CUDA && e->device == 0 &&
                 e->length == 2 * MIB - 512)
            seen |= 8;
    }
    assert_int_equal(seen, 15);
    region_table_free(&r);
}

static void expect_refused(const fanin_tensor *t, fanin_status code, const char *words)
{
    fanin_server *s = server_start_lease(0);
    fanin_error error = FANIN_ERROR_INIT;
    assert_int_equal(fanin_server_put(s, RUN, t, 1, false, &error), code);
    assert_says(error.message, words);
    assert_string_equal(error.key, RUN ":t");
    assert_true(error.remedy[0] != '\0');
}

DEVICE_CLEAN_TEST(contradictions_are_refused)
{
    static uint8_t memory[100];
    uint8_t *zero = device_alloc(0, 4096, FAKE_CUDA_MALLOC);
    uint8_t *one = device_alloc(1, 4096, FAKE_CUDA_MALLOC);
    fanin_box boxes[2];
    fanin_tensor t = byte_tensor("t", boxes, memory, 100);
    t.memory = (fanin_memory){FANIN_MEMORY_CUDA, -1};
    expect_refused(&t, FANIN_ERR_ARGUMENT, "host memory");
    boxes[0].address = one;
    t.memory.device = 0;
    expect_refused(&t, FANIN_ERR_ARGUMENT, "device 0, a box is on device 1");
    boxes[0] = (fanin_box){.extent = {50}, .address = zero};
    boxes[1] = (fanin_box){.offset = {50}, .extent = {50}, .address = one};
    t.n_boxes = 2;
    t.memory = (fanin_memory){0};
    expect_refused(&t, FANIN_ERR_ARGUMENT, "devices 0 and 1");
    boxes[0].address = memory;
    expect_refused(&t, FANIN_ERR_ARGUMENT, "CUDA device 1");
    t = byte_tensor("t", boxes, zero + 4000, 100);
    expect_refused(&t, FANIN_ERR_ARGUMENT, "beyond its allocation");
    boxes[0].stride[0] = -1; /* the lowest byte counts */
    boxes[0].address = zero + 50;
    expect_refused(&t, FANIN_ERR_ARGUMENT, "beyond its allocation");
    t = byte_tensor("t", boxes, one, 100);
    t.memory = (fanin_memory){FANIN_MEMORY_HOST, -1};
    expect_refused(&t, FANIN_ERR_ARGUMENT, "host memory, a box is on CUDA device 1");
    device_free(one);
    t.memory = (fanin_memory){FANIN_MEMORY_CUDA, -1};
    expect_refused(&t, FANIN_ERR_ARGUMENT, "");
}

/* The CPU can read managed memory: who calls it the host's may do so. */
DEVICE_CLEAN_TEST(managed_memory_may_be_called_host_memory)
{
    uint8_t *memory = device_alloc(0, 4096, FAKE_CUDA_MANAGED);
    fanin_box box;
    fanin_tensor t = byte_tensor("t", &box, memory, 100);
    t.memory = (fanin_memory){FANIN_MEMORY_HOST, -1};
    puller l = device_serve(&t, 1);
    region_table *r = peer_regions(&l.control, &l.grant, WIRE_PATH_STREAM);
    assert_int_equal(r->count, 1);
    assert_int_equal(r->entries[0].memory, FANIN_MEMORY_HOST);
    region_table_free(&r);
}

/* A driver that knows nothing of a pointer contradicts nobody. */
DEVICE_CLEAN_TEST(host_memory_needs_no_answer)
{
    static uint8_t memory[100];
    fanin_box box;
    fanin_tensor t = byte_tensor("t", &box, memory, 100);
    t.memory = (fanin_memory){FANIN_MEMORY_HOST, -1};
    fake_cuda_fail("cuPointerGetAttributes", CUDA_ERROR_UNKNOWN, 0, 0);
    device_serve(&t, 1);
    fake_cuda_fail("cuPointerGetAttributes", CUDA_SUCCESS, 0, 0);
}

/* Host memory by the megabyte is asked for once, whether it was said to be the host's or not. */
DEVICE_CLEAN_TEST(host_shards_cost_few_questions)
{
    enum { COUNT = 1000 };
    static uint8_t memory[COUNT * 500];
    static fanin_tensor t[COUNT];
    static fanin_box boxes[COUNT];
    static char names[COUNT][16];
    for (size_t i = 0; i < COUNT; i++) {
        snprintf(names[i], sizeof names[i], "%08zu", i);
        t[i] = byte_tensor(names[i], &boxes[i], memory + i * 500, 500);
        t[i].memory.kind = i % 2 ? FANIN_MEMORY_HOST : FANIN_MEMORY_DETECT;
    }
    uint64_t before = fake_cuda_calls("cuPointerGetAttributes");
    device_serve(t, COUNT);
    assert_in_range(fake_cuda_calls("cuPointerGetAttributes") - before, 1, 2);
}

DEVICE_CLEAN_TEST(many_shards_cost_few_questions)
{
    enum { COUNT = 37248, SEGMENTS = 8, EACH = COUNT / SEGMENTS };
    static fanin_tensor t[COUNT];
    static fanin_box boxes[COUNT];
    static char names[COUNT][16];
    uint8_t *segments[SEGMENTS];
    for (size_t i = 0; i < SEGMENTS; i++)
        segments[i] = device_alloc((int)i % 2, (size_t)EACH * 512, FAKE_CUDA_MALLOC);
    for (size_t i = 0; i < COUNT; i++) {
        snprintf(names[i], sizeof names[i], "%08zu", i);
        t[i] =
            byte_tensor(names[i], &boxes[i], segments[i / EACH] + i % EACH * 512, 500);
    }
    uint64_t before = fake_cuda_calls("cuPointerGetAttributes");
    puller l = device_serve(t, COUNT);
    assert_in_range(fake_cuda_calls("cuPointerGetAttributes") - before, 1,
                    2 * SEGMENTS);
    region_table *r = peer_regions(&l.control, &l.grant, WIRE_PATH_CUDA_IPC);
    assert_int_equal(r->count, SEGMENTS);
    region_table_free(&r);
}

DEVICE_CLEAN_TEST(memory_without_handles_is_streamed)
{
    static const fake_cuda_kind kinds[] = {FAKE_CUDA_VIRTUAL, FAKE_CUDA_POOL,
                                           FAKE_CUDA_MANAGED};
    static const char *const words[] = {"virtual-memory", "pool", "managed"};
    for (size_t i = 0; i < 3; i++) {
        uint8_t *memory = device_alloc(0, 3000, kinds[i]);
        fanin_box boxes[2];
        fanin_tensor t[] = {byte_tensor("a", &boxes[0], memory, 1000),
                            byte_tensor("b", &boxes[1], memory + 1000, 2000)};
        log_listen("no-ipc");
        puller l = device_serve(t, 2);
        log_expect(1, words[i]);
        log_await("expandable_segments:False");
        log_await("snapshots");
        region_table *r = peer_regions(&l.control, &l.grant, WIRE_PATH_CUDA_IPC);
        assert_int_equal(r->count, 1);
        assert_int_equal(r->entries[0].memory, FANIN_MEMORY_CUDA);
        assert_int_equal(r->entries[0].rkey_size, 0);
        region_table_free(&r);
        log_expect(1, "");
        assert_int_equal(server_stats(l.server).ipc_mappers, 0);
        uint8_t got[3000];
        read_entry all = {.box = 0, .count = 2};
        peer_read(&l.data, &l.grant, &all, 1, got, sizeof got);
        assert_memory_equal(got, device_bytes(memory), sizeof got);
        device_tear_down(state);
    }
}

/* -------------------------------------------------------------------- keys */

DEVICE_CLEAN_TEST(own_user_gets_handles)
{
    static uint8_t host[100];
    uint8_t *memory = device_alloc(1, 2 * MIB, FAKE_CUDA_MALLOC);
    fanin_box boxes[2];
    fanin_tensor t[] = {byte_tensor("a", &boxes[0], memory + 4096, MIB),
                        byte_tensor("b", &boxes[1], host, sizeof host)};
    puller l = device_serve(t, 2);
    peer_request_path(&l.control, WIRE_PATH_CUDA_IPC);
    body in = peer_expect(&l.control, MSG_OPEN_PATH_OK);
    msg_open_path ok;
    assert_int_equal(decode_open_path(&in, &ok), FANIN_OK);
    assert_int_equal(ok.address.size, 0);
    uint64_t before = fake_cuda_calls("cuIpcGetMemHandle");
    region_table *r = NULL;
    for (int i = 0; i < 3; i++) {
        if (r)
            region_table_free(&r);
        r = peer_regions(&l.control, &l.grant, WIRE_PATH_CUDA_IPC);
    }
    assert_int_equal(fake_cuda_calls("cuIpcGetMemHandle"), before + 1);
    assert_int_equal(r->count, 2);
    const region_entry *device = &r->entries[r->entries[0].device == -1];
    const region_entry *other = &r->entries[r->entries[0].device != -1];
    assert_int_equal(other->memory, FANIN_MEMORY_HOST);
    assert_int_equal(other->rkey_size, 0);
    assert_int_equal(device->base, 0);
    assert_int_equal(device->length, MIB);
    ipc_key key;
    gpu_device d;
    gpu_range range;
    uint8_t handle[GPU_HANDLE_SIZE];
    assert_true(ipc_key_decode(device->rkey, device->rkey_size, device->length, &key));
    assert_works(gpu_device_get(driver, 1, &d, ERROR));
    assert_works(gpu_range_of(driver, memory, &range, ERROR));
    assert_works(gpu_export(driver, &range, handle, ERROR));
    assert_memory_equal(key.uuid, d.uuid, sizeof d.uuid);
    assert_memory_equal(key.handle, handle, sizeof handle);
    assert_int_equal(key.offset, 4096);
    assert_int_equal(key.length, 2 * MIB);
    region_table_free(&r);
    peer stranger = peer_open(l.server);
    peer_request_path(&stranger, WIRE_PATH_CUDA_IPC);
    assert_says(peer_expect_error(&stranger, FANIN_ERR_UNSUPPORTED).message,
                "same host");
    grant g = peer_newest(&stranger);
    peer_request_regions(&stranger, &g, WIRE_PATH_CUDA_IPC);
    peer_expect_error(&stranger, FANIN_ERR_UNSUPPORTED);
}

/* The driver refuses to export: that is told, and the rest is served. */
DEVICE_CLEAN_TEST(refused_exports_leave_no_key)
{
    uint8_t *memory = device_alloc(0, 4096, FAKE_CUDA_MALLOC);
    puller l = device_serve_bytes(memory, 4096);
    fake_cuda_fail("cuIpcGetMemHandle", CUDA_ERROR_INVALID_VALUE, 0, 1);
    log_listen("no-ipc");
    for (int i = 0; i < 2; i++) {
        region_table *r = peer_regions(&l.control, &l.grant, WIRE_PATH_CUDA_IPC);
        assert_int_equal(r->entries[0].rkey_size, 0);
        region_table_free(&r);
    }
    fake_cuda_fail("cuIpcGetMemHandle", CUDA_SUCCESS, 0, 0);
    log_expect(1, "");
    assert_int_equal(server_stats(l.server).ipc_mappers, 0);
}

static void map(peer *p, const grant *g)
{
    region_table *r = peer_regions(p, g, WIRE_PATH_CUDA_IPC);
    region_table_free(&r);
}

DEVICE_CLEAN_TEST(who_still_maps_is_told)
{
    uint8_t *a = device_alloc(0, 2 * MIB, FAKE_CUDA_MALLOC),
            *b = device_alloc(1, MIB, FAKE_CUDA_MALLOC);
    fanin_box boxes[2];
    fanin_tensor t[] = {byte_tensor("a", &boxes[0], a, 1000),
                        byte_tensor("b", &boxes[1], b, 1000)};
    puller l = device_serve(t, 2);
    peer second = peer_open_unix(l.server);
    log_listen("still-mapped");
    assert_int_equal(server_stats(l.server).ipc_mappers, 0);
    map(&l.control, &l.grant);
    map(&l.control, &l.grant);
    map(&second, &l.grant);
    assert_int_equal(server_stats(l.server).ipc_mappers, 2);
    peer_end(&l.control, &l.grant, false);
    peer_close(&second);
    peer_await_count(&l.control, l.server, offsetof(fanin_server_stats, ipc_mappers),
                     1);
    assert_int_equal(fanin_server_remove(l.server, RUN, "a", NULL), FANIN_OK);
    log_expect(1, "2097152 bytes"); /* the second one has closed */
    log_await("removed");
    /* What is forgotten is never exported again. */
    uint64_t exports = fake_cuda_calls("cuIpcGetMemHandle");
    peer_request_regions(&l.control, &l.grant, WIRE_PATH_CUDA_IPC);
    peer_expect_error(&l.control, FANIN_ERR_STALE);
    assert_int_equal(fake_cuda_calls("cuIpcGetMemHandle"), exports);
    server_commit(l.server, 2);
    grant g = peer_newest(&l.control);
    assert_true(g.catalog_version != l.grant.catalog_version);
    map(&l.control, &g);
    assert_int_equal(fake_cuda_calls("cuIpcGetMemHandle"), exports); /* b's is cached */
    uint8_t *c = device_alloc(0, 3 * MIB, FAKE_CUDA_MALLOC);
    server_put(l.server, RUN, "b", c, 1000);
    log_expect(2, "1048576 bytes");
    log_await("replaced");
    server_commit(l.server, 3);
    g = peer_newest(&l.control);
    map(&l.control, &g);
    server_stop(&l.server, 0);
    log_expect(3, "3145728 bytes");
}

/* The last reader of a snapshot is a reply that is still being copied: its end frees the arena,
   which the session has mapped. */
DEVICE_TEST(freed_arenas_are_told)
{
    uint8_t *a = device_alloc(0, MIB, FAKE_CUDA_MALLOC),
            *b = device_alloc(1, MIB, FAKE_CUDA_MALLOC);
    fanin_server *s = server_start_lease(0);
    server_put(s, RUN, "a", a, MIB);
    server_snapshot(s, 1);
    puller l = puller_open_unix(s);
    puller_begin(&l);
    map(&l.control, &l.grant);
    log_listen("still-mapped");
    fake_cuda_hold_kernel(0, 0);
    read_entry all = {.box = 0, .count = 1};
    peer_request_read(&l.data, l.grant.token, MIB, &all, 1);
    assert_true(fake_cuda_wait_kernel_held(0));
    /* Another arena, on a device that works: the first one's kernels are all held. */
    server_begin(l.server);
    assert_int_equal(fanin_server_remove(l.server, RUN, "a", NULL), FANIN_OK);
    server_put(l.server, RUN, "b", b, MIB);
    server_snapshot(l.server, 2);
    assert_true(peer_end(&l.control, &l.grant, false).good);
    log_expect(0, "");
    fake_cuda_release(0);
    assert_memory_equal(peer_expect(&l.data, MSG_READ_OK).data, device_bytes(a), MIB);
    log_expect(1, "freed");
}

static void commit_deltas(fanin_server *s, uint64_t step)
{
    fanin_commit_options o;
    fanin_commit_options_init(&o, sizeof o);
    o.flags = FANIN_COMMIT_SNAPSHOT | FANIN_COMMIT_WAIT;
    o.deltas = 1;
    server_begin(s);
    assert_works(fanin_server_commit(s, RUN, step, &o, ERROR));
}

/* Not of the host's part alone either, nor of one device of two. */
DEVICE_TEST(memory_of_several_kinds_has_no_patches)
{
    static uint8_t memory[1000];
    fanin_server *s = server_start_lease(0);
    patch_offers offers;
    log_listen("no-patches");
    server_put(s, RUN, "a", device_alloc(0, 1000, FAKE_CUDA_MALLOC), 1000);
    server_put(s, RUN, "b", memory, sizeof memory);
    commit_deltas(s, 1);
    peer p = peer_open(s);
    peer_request_patches(&p, WIRE_RULE_NEWEST, 0);
    assert_false(peer_patches(&p, &offers));
    log_expect(0, "");
    commit_deltas(s, 2);
    log_expect(1, RUN ": readers get whole steps");
    server_put(s, RUN, "b", device_alloc(1, 1000, FAKE_CUDA_MALLOC), 1000);
    commit_deltas(s, 3);
    commit_deltas(s, 4);
    log_expect(1, "the host alone or of one CUDA device");
    peer_request_patches(&p, WIRE_RULE_NEWEST, 0);
    assert_false(peer_patches(&p, &offers));
    assert_int_equal(server_stats(s).patches_lacking, 3);
    assert_int_equal(server_stats(s).patches_made, 0);
}

/* Refused once, it is not asked for again, and the log says what to do. */
DEVICE_TEST(patches_need_pinned_memory)
{
    fanin_server *s = server_start_lease(0);
    patch_offers offers;
    log_listen("no-patches");
    server_put(s, RUN, "a", device_alloc(0, 1000, FAKE_CUDA_MALLOC), 1000);
    commit_deltas(s, 1);
    peer p = peer_open(s);
    peer_request_patches(&p, WIRE_RULE_NEWEST, 0);
    peer_patches(&p, &offers);
    fake_cuda_fail("cuMemHostAlloc", CUDA_ERROR_OUT_OF_MEMORY, 0, 0);
    commit_deltas(s, 2);
    commit_deltas(s, 3);
    fake_cuda_fail("cuMemHostAlloc", CUDA_SUCCESS, 0, 0);
    log_expect(1, "pinned host memory: allow the trainer that much");
    assert_int_equal(server_stats(s).patches_made, 0);
}
