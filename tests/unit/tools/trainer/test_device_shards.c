/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in trainer's device memory: laid out as PyTorch's caching allocator does, and filled
   from the host; and what conversions the tool expects. */
#include "testing.h"

#include "trainer/device_shards.h"
#include "fake_cuda.h"
#include "fetch/pattern.h"

#define KIB UINT64_C(1024)
#define MIB (UINT64_C(1024) * KIB)

enum { COUNT = 10 };

/* Tensors of one dimension of bytes, whole in one rank. */
static const uint64_t sizes[COUNT] = {
    600,     1 * MIB, 0,  1 * MIB - 512, 1 * MIB + 1, 10 * MIB,
    9 * MIB, 3 * MIB, 77, 13 * MIB,
};

typedef struct world {
    shard shards[COUNT];
    void *memory[COUNT];
    device_shards *device;
    fanin_error error;
} world;

static void begin(world *w)
{
    *w = (world){.error = FANIN_ERROR_INIT};
    for (size_t i = 0; i < COUNT; i++) {
        const tensor_spec spec = {.dtype = FANIN_DTYPE_U8,
                                  .n_dims = 1,
                                  .shape = {sizes[i]},
                                  .bytes = sizes[i]};
        shard_cut(&spec, 0, 1, 0, &w->shards[i]);
    }
}

static void finish(world *w)
{
    device_shards_free(&w->device);
    assert_null(w->device);
}

static uint64_t at(const world *w, size_t i)
{
    return (uint64_t)(uintptr_t)w->memory[i];
}

/* Whether @p i lies outside the segment of @p size that begins with @p first. */
static bool apart(const world *w, size_t i, size_t first, uint64_t size)
{
    return at(w, i) < at(w, first) || at(w, i) >= at(w, first) + size;
}

TEST(test_layout)
{
    world w;
    begin(&w);
    assert_int_equal(
        device_shards_make(1, w.shards, COUNT, w.memory, &w.device, &w.error),
        FANIN_OK);
    /* Small ones share a segment of 2 MiB, in which 600 bytes take 1024. */
    assert_int_equal(at(&w, 1), at(&w, 0) + 1024);
    assert_null(w.memory[2]);
    /* 1 MiB - 1024 is left: too little for the next; the last one fits best there. */
    assert_true(apart(&w, 3, 0, 2 * MIB));
    assert_int_equal(at(&w, 8), at(&w, 1) + 1 * MIB);
    /* More than 1 MiB: a segment of 20 MiB, whose rest serves the next ones that fit. */
    assert_true(apart(&w, 4, 0, 2 * MIB));
    assert_int_equal(at(&w, 5), at(&w, 4) + 1 * MIB + 512);
    assert_true(apart(&w, 6, 4, 20 * MIB));
    assert_int_equal(at(&w, 7), at(&w, 5) + 10 * MIB);
    /* What fits nowhere and is large: a segment of its own. */
    assert_true(apart(&w, 9, 4, 20 * MIB));
    assert_true(apart(&w, 9, 6, 20 * MIB));
    fake_cuda_counts counts;
    fake_cuda_count(&counts);
    assert_int_equal(counts.allocations, 5);
    assert_true(counts.bytes >= (2 + 2 + 20 + 20 + 14) * MIB);
    assert_true(counts.bytes < (2 + 2 + 20 + 20 + 14 + 1) * MIB);
    finish(&w);
}

/* Bytes of a shard as the device has them. */
static uint8_t *fetch(world *w, size_t i)
{
    uint8_t *bytes = malloc(w->shards[i].bytes + 1);
    assert_non_null(bytes);
    gpu_stream *stream = device_shards_stream(w->device);
    assert_int_equal(
        gpu_copy(stream, bytes, w->memory[i], w->shards[i].bytes, &w->error), FANIN_OK);
    assert_int_equal(gpu_stream_wait(stream, UINT64_MAX, &w->error), FANIN_OK);
    return bytes;
}

/* Filled twice: the second one waits for the copies of the first. */
TEST(test_bytes)
{
    world w;
    void **images;
    begin(&w);
    assert_int_equal(
        device_shards_make(1, w.shards, COUNT, w.memory, &w.device, &w.error),
        FANIN_OK);
    for (unsigned step = 1; step <= 2; step++) {
        assert_int_equal(device_shards_images(w.device, &images, &w.error), FANIN_OK);
        assert_null(images[2]);
        for (size_t i = 0; i < COUNT; i++)
            pattern_fill(images[i], step * i, 0, sizes[i]);
        assert_int_equal(device_shards_send(w.device, &w.error), FANIN_OK);
    }
    for (size_t i = 0; i < COUNT; i++) {
        if (sizes[i] > 0) {
            uint8_t *bytes = fetch(&w, i);
            assert_int_equal(pattern_compare(bytes, 2 * i, 0, sizes[i]), sizes[i]);
            free(bytes);
        }
    }
    finish(&w);
}

TEST(test_refusals)
{
    world w;
    begin(&w);
    assert_int_equal(
        device_shards_make(2, w.shards, COUNT, w.memory, &w.device, &w.error),
        FANIN_ERR_ARGUMENT);
    assert_non_null(strstr(w.error.message, "device 2"));
    finish(&w);
    w.shards[5].bytes = w.shards[5].run_bytes = UINT64_C(1) << 45;
    assert_int_equal(
        device_shards_make(1, w.shards, COUNT, w.memory, &w.device, &w.error),
        FANIN_ERR_MEMORY);
    finish(&w);
}

/* Values worked out by hand. */
TEST(test_half)
{
    static const struct {
        uint32_t from;
        uint16_t bf16, f16;
    } cases[] = {
        {0x00000000, 0x0000, 0x0000},
        {0x80000000, 0x8000, 0x8000}, /* zeros */
        {0x3f800000, 0x3f80, 0x3c00},
        {0xc0000000, 0xc000, 0xc000}, /* 1, -2 */
        {0x3f808000, 0x3f80, 0x3c04}, /* 1 + 2^-8: tie, to even */
        {0x3f818000, 0x3f82, 0x3c0c}, /* tie, up to even */
        {0x3f808001, 0x3f81, 0x3c04}, /* just above the tie */
        {0x3f801000, 0x3f80, 0x3c00}, /* 1 + 2^-11: tie of a half */
        {0x3f803000, 0x3f80, 0x3c02}, /* 1 + 3 * 2^-11 */
        {0x477fe000, 0x4780, 0x7bff}, /* 65504, the largest half */
        {0x477fefff, 0x4780, 0x7bff},
        {0x477ff000, 0x4780, 0x7c00}, /* around 65520 */
        {0x7f7fffff, 0x7f80, 0x7c00},
        {0xff800000, 0xff80, 0xfc00}, /* largest, -inf */
        {0x7f800001, 0x7fc0, 0x7e00},
        {0xffc01234, 0xffc0, 0xfe00}, /* NaN */
        {0x33800000, 0x3380, 0x0001},
        {0x33000000, 0x3300, 0x0000}, /* 2^-24, 2^-25 */
        {0x33000001, 0x3300, 0x0001},
        {0x387fffff, 0x3880, 0x0400}, /* above; 2^-14 */
        {0x00000001, 0x0000, 0x0000},
        {0x00018000, 0x0002, 0x0000}, /* subnormal floats */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        uint32_t from = cases[i].from;
        uint8_t in[4] = {(uint8_t)from, (uint8_t)(from >> 8), (uint8_t)(from >> 16),
                         (uint8_t)(from >> 24)};
        uint8_t out[2];
        half_convert(FANIN_DTYPE_BF16, out, in, 1);
        assert_int_equal(out[0] | out[1] << 8, cases[i].bf16);
        half_convert(FANIN_DTYPE_F16, out, in, 1);
        assert_int_equal(out[0] | out[1] << 8, cases[i].f16);
    }
    assert_true(half_converts(FANIN_DTYPE_F32, FANIN_DTYPE_F16));
    assert_false(half_converts(FANIN_DTYPE_F64, FANIN_DTYPE_F16));
    assert_false(half_converts(FANIN_DTYPE_F32, FANIN_DTYPE_F32));
}
