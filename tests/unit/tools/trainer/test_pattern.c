/* SPDX-License-Identifier: Apache-2.0 */
/* The tool's byte pattern: known values, and every way to cut it gives the same bytes. */
#include "fetch/pattern.h"
#include "trainer/device_shards.h"
#include "testing.h"

/* What tests/support/pattern.py says: `pattern.py bytes lora:0:a 1 0 40`. */
TEST(bytes_are_those_of_the_second_implementation)
{
    static const char expected[] = "76a17197d39986668fa67757a3157cf4ce57264858474859ffb"
                                   "0796df23e5d1cf651cdba7bc629d2";
    uint8_t bytes[40];
    char text[81];
    pattern_fill(bytes, pattern_start(pattern_seed("lora:0:a"), 1), 0, sizeof bytes);
    for (size_t i = 0; i < sizeof bytes; i++)
        snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    assert_string_equal(text, expected);
}

TEST(any_part_equals_the_whole)
{
    enum { SIZE = 67 };
    uint8_t whole[SIZE];
    uint8_t part[SIZE + 2];
    uint64_t start = pattern_start(pattern_seed("key"), 9);
    pattern_fill(whole, start, 0, SIZE);
    for (size_t from = 0; from <= SIZE; from++) {
        for (size_t size = 0; from + size <= SIZE; size++) {
            memset(part, 0xee, sizeof part);
            pattern_fill(part + 1, start, from, size);
            assert_memory_equal(part + 1, whole + from, size);
            assert_int_equal(part[0], 0xee);
            assert_int_equal(part[size + 1], 0xee);
            assert_int_equal(pattern_compare(whole + from, start, from, size), size);
        }
    }
}

TEST(every_wrong_byte_is_found)
{
    enum { SIZE = 9000 }; /* more than a block of the comparison */
    uint8_t *bytes = malloc(SIZE);
    uint64_t start = pattern_start(pattern_seed("key"), 3);
    assert_non_null(bytes);
    for (size_t offset = 0; offset < 9; offset += 4) {
        pattern_fill(bytes, start, offset, SIZE);
        for (size_t i = 0; i < SIZE; i += i < 64 || i > SIZE - 64 ? 1 : 97) {
            bytes[i] ^= 0x10;
            assert_int_equal(pattern_compare(bytes, start, offset, SIZE), i);
            bytes[i] ^= 0x10;
        }
    }
    free(bytes);
}

TEST(steps_and_keys_differ)
{
    uint8_t bytes[64];
    uint64_t seed = pattern_seed("lora:0:a");
    pattern_fill(bytes, pattern_start(seed, 5), 0, sizeof bytes);
    assert_true(pattern_compare(bytes, pattern_start(seed, 6), 0, 64) < 8);
    assert_true(
        pattern_compare(bytes, pattern_start(pattern_seed("lora:1:a"), 5), 0, 64) < 8);
}

/* torch.chunk's examples: 10 over 4, 5 over 4, 8 over 16. */
TEST(chunks_are_those_of_torch)
{
    static const struct {
        uint64_t n;
        uint32_t parts;
        uint64_t sizes[16];
    } cases[] = {{10, 4, {3, 3, 3, 1}},
                 {5, 4, {2, 2, 1, 0}},
                 {8, 16, {1, 1, 1, 1, 1, 1, 1, 1}},
                 {0, 3, {0}}};
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        uint64_t next = 0;
        for (uint32_t i = 0; i < cases[c].parts; i++) {
            uint64_t begin;
            uint64_t end;
            shard_chunk(cases[c].n, cases[c].parts, i, 1, &begin, &end);
            assert_int_equal(begin, next);
            assert_int_equal(end - begin, cases[c].sizes[i]);
            next = end;
        }
        assert_int_equal(next, cases[c].n);
    }
}

/* Shards of every dimension, written run by run, make up the tensor. */
TEST(shards_tile_the_tensor)
{
    static const fanin_dtype dtypes[] = {FANIN_DTYPE_BF16, FANIN_DTYPE_U8,
                                         FANIN_DTYPE_F4, FANIN_DTYPE_F6_E2M3};
    uint64_t start = pattern_start(pattern_seed("k"), 1);
    for (size_t d = 0; d < sizeof dtypes / sizeof dtypes[0]; d++) {
        tensor_spec t = {
            .name = "k", .dtype = dtypes[d], .n_dims = 3, .shape = {5, 3, 12}};
        t.bytes = 5 * 3 * 12 * fanin_dtype_bits(t.dtype) / 8;
        for (uint32_t dim = 0; dim < 4; dim++) {
            uint8_t whole[400] = {0};
            uint64_t sum = 0;
            for (uint32_t part = 0; part < 4; part++) {
                shard s;
                shard_cut(&t, dim, 4, part, &s);
                for (uint64_t run = 0; s.bytes > 0 && run < s.runs; run++) {
                    uint64_t at = s.first + run * s.step;
                    pattern_fill(whole + at, start, at, s.run_bytes);
                }
                sum += s.bytes;
            }
            assert_int_equal(sum, t.bytes);
            assert_int_equal(pattern_compare(whole, start, 0, t.bytes), t.bytes);
        }
    }
}

TEST(a_scalar_is_whole_on_one_rank)
{
    tensor_spec t = {.name = "k", .dtype = FANIN_DTYPE_F32, .bytes = 4};
    shard s;
    shard_cut(&t, 0, 4, 0, &s);
    assert_int_equal(s.bytes, 4);
    shard_cut(&t, 0, 4, 1, &s);
    assert_int_equal(s.bytes, 0);
}
