/* SPDX-License-Identifier: Apache-2.0 */
/** @file Directories and places of patches that lie, and how patches are told. */
#include "patch.h"
#include "testing.h"

#include <string.h>

/* A region of two segments, the second of three words and a half. */
#define LENGTH (PATCH_SEGMENT + 7)
#define WORDS_AT_THE_END 4

static const uint8_t one_and_two[] = {1, 0, 0, 0, 2, 0, 0, 0};

TEST(a_directory_says_where_changes_begin)
{
    uint64_t first[3];
    assert_int_equal(patch_segments(0), 0);
    assert_int_equal(patch_segments(PATCH_SEGMENT), 1);
    assert_int_equal(patch_directory_bytes(LENGTH), sizeof one_and_two);
    assert_true(patch_directory_read(one_and_two, LENGTH, 3 * PATCH_CHANGE, first));
    assert_int_equal(first[0], 0);
    assert_int_equal(first[1], 1);
    assert_int_equal(first[2], 3);
}

TEST(a_directory_that_lies_is_refused)
{
    static const uint8_t full[] = {0, 0, 1, 0, WORDS_AT_THE_END, 0, 0, 0};
    static const uint8_t too_many[] = {1, 0, 1, 0, 0, 0, 0, 0};
    static const uint8_t too_many_at_the_end[] = {0, 0, 0, 0, WORDS_AT_THE_END + 1,
                                                  0, 0, 0};
    static const uint8_t most[] = {0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0};
    uint64_t first[3], all = (PATCH_WORDS + WORDS_AT_THE_END) * PATCH_CHANGE;
    assert_true(patch_directory_read(full, LENGTH, all, first));
    assert_false(patch_directory_read(full, LENGTH, all - PATCH_CHANGE, first));
    assert_false(patch_directory_read(full, LENGTH, all + 1, first));
    assert_false(patch_directory_read(too_many, LENGTH, 65537 * PATCH_CHANGE, first));
    assert_false(
        patch_directory_read(too_many_at_the_end, LENGTH, 5 * PATCH_CHANGE, first));
    assert_false(
        patch_directory_read(most, LENGTH, UINT64_C(0xffffffff) * PATCH_CHANGE, first));
}

TEST(places_ascend_inside_of_their_segment)
{
    static const uint8_t good[] = {0, 0, 3, 0, 7, 7, 7, 7};
    static const uint8_t twice[] = {3, 0, 3, 0, 7, 7, 7, 7};
    static const uint8_t down[] = {3, 0, 0, 0, 7, 7, 7, 7};
    static const uint8_t last[] = {0xff, 0xff, 7, 7};
    assert_true(patch_segment_is_sound(good, 0, 7));
    assert_true(patch_segment_is_sound(good, 2, 7));
    assert_false(patch_segment_is_sound(good, 2, 6));
    assert_false(patch_segment_is_sound(twice, 2, 7));
    assert_false(patch_segment_is_sound(down, 2, 7));
    assert_true(patch_segment_is_sound(last, 1, PATCH_SEGMENT));
    assert_false(patch_segment_is_sound(last, 1, PATCH_SEGMENT - 2));
}

TEST(offers_are_told_and_read)
{
    patch_offers offers = {.generation = UINT64_MAX,
                           .directory_bytes = 8,
                           .first_box = UINT64_C(1) << 22,
                           .count = PATCHES_MOST};
    for (uint32_t i = 0; i < PATCHES_MOST; i++)
        offers.patches[i] = (struct patch_offer){100 - i, UINT64_C(1) << (4 * i)};
    uint8_t bytes[PATCH_OFFERS_BYTES];
    size_t size = patch_offers_encode(&offers, bytes);
    assert_int_equal(size, sizeof bytes);
    patch_offers read;
    assert_true(patch_offers_decode((bytes_view){bytes, size}, &read));
    assert_memory_equal(&read, &offers, sizeof read);
    assert_true(patch_offers_decode((bytes_view){bytes, 24}, &read));
    assert_int_equal(read.count, 0);
    assert_false(patch_offers_decode((bytes_view){bytes, 0}, &read));
    assert_int_equal(read.generation, 0);
}

TEST(a_wait_ok_with_half_a_patch_is_refused)
{
    uint8_t bytes[PATCH_OFFERS_BYTES] = {0};
    static const size_t bad[] = {1, 8, 16, 25, 32, 48};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        buffer b = {0};
        msg_wait_ok m = {.step = 1, .catalog_version = 2, .patches = {bytes, bad[i]}},
                    read;
        encode_wait_ok(&b, 1, &m);
        body in = {b.data + FRAME_SIZE, b.size - FRAME_SIZE, NULL};
        assert_int_equal(decode_wait_ok(&in, &read), FANIN_ERR_PROTOCOL);
        buffer_free(&b);
    }
}
