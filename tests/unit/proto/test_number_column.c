/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers come back from their columns, and even ones take no bits. */
#include "failing_memory.h"
#include "number_column.h"
#include "random.h"
#include "testing.h"

#define MOST (5 * COLUMN_BLOCK + 1)

static uint64_t numbers[MOST];

static number_column column_of(uint64_t n)
{
    number_column c = {0};
    for (uint64_t i = 0; i < n; i++)
        assert_true(number_column_add(&c, numbers[i]));
    assert_true(number_column_close(&c));
    assert_int_equal(c.count, n);
    return c;
}

static void come_back(uint64_t n)
{
    number_column c = column_of(n);
    for (uint64_t i = 0; i < n; i++)
        assert_int_equal(number_column_get(&c, i), numbers[i]);
    number_column_free(&c);
}

TEST(all_come_back)
{
    random_source r = {7};
    (void)state;
    for (int round = 0; round < 3000; round++) {
        uint64_t n = random_below(&r, MOST + 1), step = random_next(&r);
        uint32_t wide = (uint32_t)random_below(&r, 64), often = round % 7;
        step >>= random_below(&r, 64);
        numbers[0] = random_next(&r) >> random_below(&r, 64);
        for (uint64_t i = 1; i < n; i++) {
            uint64_t more = often && random_below(&r, often) == 0 ? random_next(&r) : 0;
            numbers[i] = numbers[i - 1] + step + (more >> wide);
        }
        come_back(n);
    }
}

TEST(the_widest_come_back)
{
    for (uint64_t i = 0; i < MOST; i++)
        numbers[i] = i % 2 ? UINT64_MAX : 0;
    come_back(MOST);
    for (uint64_t i = 0; i < MOST; i++)
        numbers[i] = i % 3 ? (uint64_t)INT64_MAX + i % 2 : i;
    come_back(MOST);
}

TEST(even_ones_take_no_bits)
{
    for (uint64_t i = 0; i < MOST; i++)
        numbers[i] = 1000 + 512 * i;
    number_column c = column_of(MOST);
    assert_int_equal(c.n_words, 0);
    assert_int_equal(c.n_blocks, 6);
    number_column_free(&c);
}

/* One that is out of the way costs its own block only. */
TEST(one_jump_widens_its_block_only)
{
    for (uint64_t i = 0; i < MOST; i++)
        numbers[i] = 8 * i + (i > COLUMN_BLOCK + 5 ? 1 << 20 : 0);
    number_column c = column_of(MOST);
    assert_true(c.n_words > 0);
    assert_true(c.n_words <= COLUMN_BLOCK * 21 / 64);
    number_column_free(&c);
}

static bool fill(number_column *c)
{
    bool ok = true;
    for (uint64_t i = 0; i < MOST && ok; i++)
        ok = number_column_add(c, numbers[i]);
    return ok && number_column_close(c);
}

/* Whichever allocation fails: it says so, or did not need it. */
TEST(without_memory_it_says_so)
{
    random_source r = {8};
    bool failed = true;
    long refused = 0;
    (void)state;
    for (uint64_t i = 0; i < MOST; i++)
        numbers[i] = random_next(&r);
    for (long calls = 0; failed; calls++) {
        number_column c = {0};
        failing_memory_start(calls, false);
        bool filled = fill(&c);
        failed = failing_memory_stop();
        assert_true(filled || failed);
        refused += !filled;
        for (uint64_t i = 0; i < MOST && filled; i++)
            assert_int_equal(number_column_get(&c, i), numbers[i]);
        number_column_free(&c);
    }
    assert_true(refused > 3);
}
