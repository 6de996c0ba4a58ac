/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Digests of device memory: they are those of the bytes that a read of the same entries brings,
 * whoever makes them. Device 0 has the digest kernel, device 1 cannot load it. The driver is a
 * stand-in.
 */
#include "digest.h"
#include "convert.h"
#include "log_catcher.h"
#include "server_device.h"
#include "testing.h"

#include <cuda.h>

#define BYTES 300001
#define FLOATS ((uint64_t)40 * 30 * 20)
#define MOST 32

/* Boxes by their number: bytes, and F32 with gaps everywhere, each on one device; then bytes
   elsewhere. */
typedef struct scene {
    puller l;
    uint8_t *memory, *elsewhere; /* NULL: the host's */
    uint8_t host[1000];
} scene;

static void set_scene(scene *s, int device, int other)
{
    static fanin_tensor t[3];
    static fanin_box boxes[3];
    for (size_t i = 0; i < sizeof s->host; i++)
        s->host[i] = device_byte(i);
    s->memory = device_alloc(device, 4 * MIB, FAKE_CUDA_MALLOC);
    s->elsewhere =
        other < 0 ? NULL : device_alloc(other, sizeof s->host, FAKE_CUDA_MALLOC);
    t[0] = byte_tensor("a", &boxes[0], s->memory, BYTES);
    boxes[1] = (fanin_box){.extent = {40, 30, 20},
                           .address = s->memory + MIB,
                           .stride = {40000, -1300, 8}};
    boxes[1].address = s->memory + MIB + 40000;
    t[1] = (fanin_tensor){.struct_size = sizeof t[1],
                          .name = "b",
                          .dtype = FANIN_DTYPE_F32,
                          .n_dims = 3,
                          .shape = {40, 30, 20},
                          .boxes = &boxes[1],
                          .n_boxes = 1};
    t[2] = byte_tensor("c", &boxes[2], s->elsewhere ? s->elsewhere : s->host,
                       sizeof s->host);
    s->l = device_serve(t, 3);
}

static uint64_t entry_bytes(const read_entry *e)
{
    static const uint64_t bytes[] = {BYTES, 4 * FLOATS, 1000};
    uint64_t sum = e->length;
    for (uint64_t i = e->box; i < e->box + e->count; i++)
        sum += bytes[i];
    return sum;
}

/* How many digest kernels it took. */
static uint64_t check(scene *s, const read_entry *entries, uint32_t n,
                      fanin_dtype dtype)
{
    static uint8_t got[1 << 20];
    digest digests[MOST];
    fake_cuda_counts before, after;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < n; i++)
        bytes += entry_bytes(&entries[i]);
    fake_cuda_count(&before);
    peer_digest(&s->l.data, &s->l.grant, bytes, dtype, entries, n, digests);
    fake_cuda_count(&after);
    peer_read(&s->l.data, &s->l.grant, entries, n, got, bytes);
    box_digest *sum = box_digest_create();
    int convert = dtype ? convert_between(FANIN_DTYPE_F32, dtype) : CONVERT_NONE;
    const uint8_t *at = got;
    for (uint32_t i = 0; i < n; at += entry_bytes(&entries[i]), i++) {
        box_digest_add(sum, at, entry_bytes(&entries[i]), (uint32_t)convert);
        digest want = box_digest_take(sum);
        if (!digest_equal(&want, &digests[i]))
            fail_msg("entry %u of %u differs as dtype %d", i, n, (int)dtype);
    }
    box_digest_free(sum);
    return after.digests - before.digests;
}

/* Of device memory alone: each request takes @p kernels. */
static void check_all(scene *s, uint64_t kernels)
{
    static const read_entry whole[] = {{.box = 0, .count = 1}, {.box = 1, .count = 1}};
    static const read_entry joined[] = {{.box = 0, .count = 2}};
    read_entry parts[MOST];
    assert_int_equal(check(s, whole, 2, 0), kernels);
    assert_int_equal(check(s, joined, 1, 0), kernels);
    for (uint32_t i = 0; i < MOST; i++) /* around the ends of pieces, and of runs */
        parts[i] = (read_entry){
            .box = i % 2, .offset = i * 1021, .length = i < 8 ? 1 + i : 4080 + i};
    assert_int_equal(check(s, parts, MOST, 0), kernels);
    for (uint32_t i = 0; i < MOST; i++)
        parts[i] =
            (read_entry){.box = 1, .offset = i * 1024 + 4, .length = 4 * (2040 + i)};
    assert_int_equal(check(s, parts, MOST, FANIN_DTYPE_BF16), kernels);
    assert_int_equal(check(s, parts, MOST, FANIN_DTYPE_F16), kernels);
    assert_int_equal(check(s, &whole[1], 1, FANIN_DTYPE_BF16), kernels);
}

/* First of all on device 1: who cannot load a kernel is not asked again. */
DEVICE_CLEAN_TEST(the_cpu_digests_otherwise)
{
    scene s;
    fake_cuda_fail("cuModuleLoadData", CUDA_ERROR_OUT_OF_MEMORY, 1, 1);
    log_listen("slow-digests");
    set_scene(&s, 1, -1);
    fake_cuda_fail("cuModuleLoadData", CUDA_SUCCESS, 0, 0);
    log_expect(1, "device 1");
    check_all(&s, 0);
}

DEVICE_CLEAN_TEST(kernels_digest)
{
    scene s;
    set_scene(&s, 0, -1);
    check_all(&s, 1);
    check_all(&s, 0); /* again: they are kept */
}

/* What lies in two places is digested by the CPU, and with it what fits into a chunk. The next
   entry, where devices differ, and the next request are not. */
DEVICE_CLEAN_TEST(places_may_mix)
{
    static const read_entry mixed[] = {{.box = 1, .count = 2}, {.box = 0, .count = 1}};
    static const read_entry alone[] = {{.box = 0, .offset = 7, .length = 9000}};
    for (int other = -1; other < 2; other += 2) {
        scene s;
        set_scene(&s, 0, other);
        assert_int_equal(check(&s, mixed, 2, 0), other == 1);
        assert_int_equal(check(&s, alone, 1, 0), 1);
        device_tear_down_clean(state);
    }
}

#define WIDE 39
#define PIECE ((uint64_t)LIMIT_READ_BYTES)

static digest digest_at(box_digest *sum, const uint8_t *at, uint64_t size)
{
    box_digest_add(sum, at, size, CONVERT_NONE);
    return box_digest_take(sum);
}

/* Where a rank says so one digest may ask for much: of a GPU in parts of 144 MiB here, with one of
   the host's between them that no chunk holds. */
DEVICE_CLEAN_TEST(much_is_digested_at_one_go)
{
    static fanin_tensor t[2];
    static fanin_box boxes[2];
    static uint8_t host[5 * MIB + 3];
    uint8_t *memory = device_alloc(0, 5 * MIB, FAKE_CUDA_MALLOC);
    digest digests[WIDE];
    fake_cuda_counts before, after;
    read_entry entries[WIDE];
    memset(host, 7, sizeof host);
    t[0] = byte_tensor("a", &boxes[0], memory, 5 * MIB);
    t[1] = byte_tensor("b", &boxes[1], host, sizeof host);
    puller l = device_serve(t, 2);
    assert_int_equal(peer_newest(&l.control).digest_bytes, LIMIT_DIGEST_BYTES);
    for (uint32_t i = 0; i < WIDE; i++)
        entries[i] = i == WIDE - 2 ? (read_entry){.box = 1, .count = 1}
                                   : (read_entry){.offset = i * 1021, .length = PIECE};
    fake_cuda_count(&before);
    peer_digest(&l.data, &l.grant, (WIDE - 1) * PIECE + sizeof host, 0, entries, WIDE,
                digests);
    fake_cuda_count(&after);
    assert_int_equal(after.digests - before.digests, 3);
    box_digest *sum = box_digest_create();
    for (uint32_t i = 0; i < WIDE; i++) {
        digest want = i == WIDE - 2
                          ? digest_at(sum, host, sizeof host)
                          : digest_at(sum, device_bytes(memory) + i * 1021, PIECE);
        assert_true(digest_equal(&want, &digests[i]));
    }
    box_digest_free(sum);
}

/* Of all others no more than a read, and of none more than the most that there is. */
DEVICE_CLEAN_TEST(too_much_is_refused)
{
    static uint8_t host[5 * MIB];
    uint8_t *memory = device_alloc(0, 5 * MIB, FAKE_CUDA_MALLOC);
    read_entry entries[65];
    for (int on_device = 0; on_device < 2; on_device++) {
        puller l = device_serve_bytes(on_device ? memory : host, sizeof host);
        uint32_t n = on_device ? 65 : 2;
        for (uint32_t i = 0; i < n; i++)
            entries[i] = (read_entry){.offset = i, .length = i ? PIECE : 1};
        peer_request_digest(&l.data, &l.grant, (n - 1) * PIECE + 1, 0, entries, n);
        peer_expect_error(&l.data, on_device ? FANIN_ERR_PROTOCOL : FANIN_ERR_ARGUMENT);
        if (on_device)
            continue;
        assert_int_equal(peer_newest(&l.control).digest_bytes, 0);
        const read_entry whole[] = {{.count = 1}, {.length = 1}};
        peer_request_digest(&l.data, &l.grant, sizeof host + 1, 0, whole, 2);
        peer_expect_error(&l.data, FANIN_ERR_ARGUMENT);
        digest alone;
        peer_digest(&l.data, &l.grant, PIECE, 0, &entries[1], 1, &alone);
    }
}

/* Nothing is answered before the device has done it; the update waits for no longer than that. */
DEVICE_CLEAN_TEST(failures_are_answered)
{
    static const read_entry all = {.box = 0, .count = 1};
    scene s;
    set_scene(&s, 0, -1);
    fake_cuda_hold(0);
    peer_request_digest(&s.l.data, &s.l.grant, BYTES, 0, &all, 1);
    assert_true(fake_cuda_wait_queued(0, 1));
    fake_cuda_break(0);
    assert_says(peer_expect_error(&s.l.data, FANIN_ERR_TRANSPORT).message, "device 0");
    fake_cuda_release(0);
    assert_true(fake_cuda_wait_idle(0)); /* what was queued is lost, not late */
    fake_cuda_repair(0);
    assert_int_equal(check(&s, &all, 1, 0), 1);
    assert_works(fanin_server_begin_update(s.l.server, RUN, ERROR));
    peer_request_digest(&s.l.data, &s.l.grant, BYTES, 0, &all, 1);
    peer_expect_error(&s.l.data, FANIN_ERR_STALE);
}
