/* SPDX-License-Identifier: Apache-2.0 */
/* Lanes that gather for host memory, when some still wait for a stream of the caller's that a pull
   gave up waiting for: nothing that is done to them waits with them. */
#include "device/devices.h"
#include "fake_cuda.h"
#include "testing.h"

#define DEVICES 2
#define SMALL ((uint64_t)1 << 20)
#define LARGE (2 * SMALL)
#define LARGEST (2 * LARGE)

typedef struct bench {
    gpu *g;
    device_memory *memory;
    gpu_stream *callers;
    fake_cuda_counts before;
} bench;

static fake_cuda_counts counts(void)
{
    fake_cuda_counts c;
    fake_cuda_count(&c);
    return c;
}

static int setup(void **state)
{
    static bench b;
    logger nobody = {0};
    assert_works(gpu_load(&nobody, &b.g, ERROR));
    b.before = counts();
    b.memory = device_memory_create(b.g);
    assert_non_null(b.memory);
    assert_works(gpu_stream_create(b.g, 0, &b.callers, ERROR));
    *state = &b;
    return 0;
}

static int teardown(void **state)
{
    bench *b = *state;
    for (int i = 0; i < DEVICES; i++) {
        fake_cuda_release(i);
        assert_true(fake_cuda_wait_idle(i));
    }
    device_memory_destroy(&b->memory);
    gpu_stream_destroy(&b->callers);
    fake_cuda_counts after = counts();
    assert_int_equal(after.streams, b->before.streams);
    assert_int_equal(after.bytes, b->before.bytes);
    assert_int_equal(after.pinned, b->before.pinned);
    return 0;
}

#define CASE(name) TEST_WITH(name, setup, teardown)

static void take(const bench *b, uint64_t chunk, gather_lane lanes[GATHER_LANES])
{
    assert_works(device_memory_lanes(b->memory, 0, chunk, true, lanes, ERROR));
}

/* As a pull does whose destination is in use on that stream. All of the device stands still. */
static void leave_waiting(const gather_lane lanes[GATHER_LANES])
{
    fanin_error error = FANIN_ERROR_INIT;
    const fanin_stream per_thread = {.handle = (void *)2, .device = 0};
    fake_cuda_hold(0);
    for (int i = 0; i < GATHER_LANES; i++)
        assert_ok(gpu_stream_after(lanes[i].stream, &per_thread, &error), error);
    assert_int_equal(gpu_stream_wait(lanes[0].stream, 0, &error), FANIN_ERR_TIMEOUT);
}

static bool share(const gather_lane *a, const gather_lane *b)
{
    return a->stream == b->stream || a->device == b->device || a->host == b->host ||
           a->digests == b->digests;
}

/* Larger ones are others; the smaller ones go when all are idle. */
CASE(larger_lanes_do_not_wait)
{
    bench *b = *state;
    gather_lane small[GATHER_LANES], large[GATHER_LANES], largest[GATHER_LANES];
    take(b, SMALL, small);
    leave_waiting(small);
    take(b, LARGE, large);
    leave_waiting(large);
    take(b, LARGEST, largest);
    for (int i = 0; i < GATHER_LANES; i++)
        assert_false(share(&small[i], &large[i]) || share(&small[i], &largest[i]) ||
                     share(&large[i], &largest[i]));
    assert_int_equal(counts().bytes - b->before.bytes,
                     GATHER_LANES * (SMALL + LARGE + LARGEST));
    fake_cuda_release(0);
    assert_true(fake_cuda_wait_idle(0));
    take(b, SMALL, large);
    assert_ptr_equal(large[0].stream, largest[0].stream);
    assert_int_equal(counts().bytes - b->before.bytes, GATHER_LANES * LARGEST);
}

static void assert_live(const void *memory, size_t bytes)
{
    assert_non_null(fake_cuda_alias(memory));
    assert_non_null(fake_cuda_alias((const uint8_t *)memory + bytes - 1));
}

/* Up to the last byte that a user may write. */
CASE(memory_is_as_large_as_promised)
{
    const bench *b = *state;
    gather_lane lanes[GATHER_LANES];
    pool_chunk *chunk;
    copy_entry *entries;
    take(b, SMALL, lanes);
    for (int i = 0; i < GATHER_LANES; i++) {
        assert_live(lanes[i].device, SMALL);
        assert_live(lanes[i].host, SMALL);
        assert_live(lanes[i].digests, GATHER_DIGESTS * sizeof *lanes[i].digests);
    }
    assert_works(device_memory_take(b->memory, &chunk, ERROR));
    assert_live(chunk->bytes, CHUNK_BYTES);
    assert_live(chunk->entries, CHUNK_ENTRIES * sizeof *entries);
    for (unsigned i = 0; i < POOL_AREAS; i++) {
        assert_works(device_memory_area(b->memory, i, &entries, ERROR));
        assert_live(entries, AREA_ENTRIES * sizeof *entries);
    }
    assert_works(device_memory_entries(b->memory, 1, &entries, ERROR));
    assert_live(entries, AREA_ENTRIES * sizeof *entries);
}

/* One that has room enough is given out again, however it stands. */
CASE(lanes_that_wait_are_used_again)
{
    bench *b = *state;
    gather_lane first[GATHER_LANES], again[GATHER_LANES];
    take(b, LARGE, first);
    leave_waiting(first);
    for (int i = 0; i < 3; i++)
        take(b, SMALL, again);
    assert_int_equal(counts().bytes - b->before.bytes, GATHER_LANES * LARGE);
    assert_ptr_equal(first[0].stream, again[0].stream);
}

/* A device that gathers no more keeps them until they are idle. */
CASE(another_device_gathers)
{
    bench *b = *state;
    const gather_set other = {{1}, 1};
    gather_lane lanes[GATHER_LANES];
    take(b, SMALL, lanes);
    leave_waiting(lanes);
    device_memory_gather(b->memory, &other);
    assert_int_equal(counts().bytes - b->before.bytes, GATHER_LANES * SMALL);
    take(b, LARGE, lanes);
    device_memory_gather(b->memory, &other);
    fake_cuda_release(0);
    assert_true(fake_cuda_wait_idle(0));
    device_memory_gather(b->memory, &other);
    assert_int_equal(counts().bytes, b->before.bytes);
}

/* Before a client goes, all are asked whether they have ended. */
CASE(those_kept_aside_are_drained)
{
    bench *b = *state;
    gather_lane lanes[GATHER_LANES];
    take(b, SMALL, lanes);
    leave_waiting(lanes);
    take(b, LARGE, lanes);
    fake_cuda_release(0);
    assert_true(fake_cuda_wait_idle(0));
    uint64_t asked = fake_cuda_calls("cuStreamQuery");
    assert_true(device_memory_drain(b->memory, deadline_in_ms(20000)));
    assert_int_equal(fake_cuda_calls("cuStreamQuery") - asked, 2 * GATHER_LANES);
}
