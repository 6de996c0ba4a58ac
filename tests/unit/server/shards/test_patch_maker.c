/* SPDX-License-Identifier: Apache-2.0 */
/** @file What is found between two arenas by several threads' stretches, beside a naive compare. */
#include "shards/patch_maker.h"
#include "patch.h"
#include "testing.h"

#include <stdlib.h>
#include <string.h>

#define MOST (3 * PATCH_SEGMENT)

static uint8_t before[MOST], after[MOST], naive[8 * MOST];
static uint64_t seed;

static uint32_t draw(uint32_t below)
{
    seed = seed * 6364136223846793005U + 1442695040888963407U;
    return (uint32_t)(seed >> 33) % below;
}

static void put16(uint8_t *at, uint64_t value)
{
    at[0] = (uint8_t)value;
    at[1] = (uint8_t)(value >> 8);
}

static bool word_differs(uint64_t at, uint64_t length)
{
    return before[at] != after[at] ||
           (at + 1 < length && before[at + 1] != after[at + 1]);
}

/* The directory and the changes behind it, word by word. How many bytes the changes have. */
static uint64_t compare_naively(uint64_t length)
{
    uint64_t segments = patch_segments(length), all = 0;
    uint8_t *changes = naive + patch_directory_bytes(length);
    for (uint64_t s = 0; s < segments; s++) {
        uint64_t base = s * PATCH_SEGMENT, count = 0, n = 0;
        uint64_t end = base + PATCH_SEGMENT < length ? base + PATCH_SEGMENT : length;
        for (uint64_t at = base; at < end; at += 2)
            count += word_differs(at, length);
        for (uint64_t at = base; at < end; at += 2) {
            if (!word_differs(at, length))
                continue;
            put16(changes + 2 * n, (at - base) / 2);
            changes[2 * (count + n)] = after[at];
            changes[2 * (count + n) + 1] = at + 1 < length ? after[at + 1] : 0;
            n++;
        }
        put16(naive + 4 * s, count);
        put16(naive + 4 * s + 2, count >> 16);
        changes += 4 * count;
        all += 4 * count;
    }
    return all;
}

/* By two threads' finds, which take turns at stretches of any even length, each in any cuts. */
static uint8_t *make(uint64_t length, uint64_t most, uint64_t *changes)
{
    patch_maker *m = patch_maker_open(before, length, length, most);
    assert_non_null(m);
    patch_finds *finds[2] = {patch_finds_open(m), patch_finds_open(m)};
    for (uint64_t from = 0; from < length;) {
        uint64_t size = 2 * (uint64_t)(1 + draw(PATCH_WORDS * 3 / 2)), i = draw(2);
        uint64_t to = size < length - from ? from + size : length;
        while (from < to) {
            uint64_t most_now = draw(4) == 0 ? 3 : to - from;
            uint64_t cut = draw((uint32_t)most_now + 1);
            cut = cut < to - from ? cut : to - from;
            patch_maker_compare(m, finds[i], from, after + from, cut);
            from += cut;
        }
        patch_maker_keep(m, finds[i]);
    }
    uint8_t *packed = patch_maker_pack(m, changes);
    patch_finds_close(finds[0]);
    patch_finds_close(finds[1]);
    patch_maker_close(m);
    return packed;
}

static void expect_naive(uint64_t length)
{
    uint64_t changes, expected = compare_naively(length);
    uint8_t *packed = make(length, 8 * MOST, &changes);
    assert_non_null(packed);
    assert_int_equal(changes, expected);
    assert_memory_equal(packed, naive,
                        (size_t)(patch_directory_bytes(length) + expected));
    free(packed);
}

static void fill(uint64_t length)
{
    for (uint64_t i = 0; i < length; i++)
        before[i] = (uint8_t)draw(256);
    memcpy(after, before, (size_t)length);
}

TEST(any_share_of_words_is_found)
{
    /* One of so many bytes changes; 1: all are drawn anew. */
    static const uint32_t one_of[] = {1, 2, 7, 100, 5000, 1000000};
    for (uint32_t i = 0; i < 12; i++) {
        uint64_t length = MOST - draw(2 * PATCH_SEGMENT);
        seed = i;
        fill(length);
        for (uint64_t at = 0; at < length; at++)
            if (draw(one_of[i % 6]) == 0)
                after[at] = (uint8_t)draw(256);
        expect_naive(length);
    }
}

TEST(all_and_none_differ)
{
    fill(MOST);
    expect_naive(MOST);
    for (uint64_t i = 0; i < MOST; i++)
        after[i] = (uint8_t)~before[i];
    expect_naive(MOST);
    expect_naive(MOST - 1);
}

TEST(the_ends_of_segments_are_found)
{
    static const uint64_t at[] = {0, PATCH_SEGMENT - 2, PATCH_SEGMENT - 1,
                                  PATCH_SEGMENT, 2 * PATCH_SEGMENT + 1};
    fill(MOST);
    for (size_t i = 0; i < sizeof at / sizeof *at; i++)
        after[at[i]] ^= 0x80;
    for (uint64_t length = 2 * PATCH_SEGMENT + 1; length < 2 * PATCH_SEGMENT + 40;
         length++) {
        after[length - 1] ^= 1;
        expect_naive(length);
    }
    for (uint64_t length = 1; length < 40; length++)
        expect_naive(length);
}

/* Bytes that no stretch has are not looked at, the other half of a last word neither. */
TEST(only_stretches_are_compared)
{
    uint64_t changes;
    fill(2000);
    for (uint64_t i = 0; i < 2000; i++)
        after[i] ^= 0xff;
    patch_maker *m = patch_maker_open(before, 2000, 2, MOST);
    patch_finds *f = patch_finds_open(m);
    patch_maker_compare(m, f, 512, after + 512, 2); /* stretches come in any order */
    patch_maker_keep(m, f);
    patch_maker_compare(m, f, 10, after + 10, 3);
    patch_maker_keep(m, f);
    uint8_t *packed = patch_maker_pack(m, &changes);
    const uint8_t expected[] = {
        3, 0, 0,         0,         5,         0, 6,          0,
        0, 1, after[10], after[11], after[12], 0, after[512], after[513]};
    assert_int_equal(changes, 12);
    assert_memory_equal(packed, expected, sizeof expected);
    free(packed);
    patch_finds_close(f);
    patch_maker_close(m);
}

TEST(what_finds_no_room_is_given_up)
{
    uint64_t changes;
    fill(MOST);
    for (uint64_t i = 0; i < 100; i++)
        after[1000 * i] ^= 1;
    uint64_t exact = patch_directory_bytes(MOST) + 100 * PATCH_CHANGE;
    uint8_t *packed = make(MOST, exact, &changes);
    assert_non_null(packed);
    assert_int_equal(changes, 100 * PATCH_CHANGE);
    free(packed);
    assert_null(make(MOST, exact - 1, &changes));
    assert_null(patch_maker_open(before, MOST, 1, patch_directory_bytes(MOST) - 1));
}
