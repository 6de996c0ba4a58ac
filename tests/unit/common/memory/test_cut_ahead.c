/* SPDX-License-Identifier: Apache-2.0 */
/* Units that threads cut, in blocks: those that one thread cuts, in their order. */
#include "copy_kernel.h"
#include "copy_list.h"
#include "testing.h"

#define ENTRIES 200000
#define LARGE ((uint32_t)70000 * COPY_UNIT_RUNS) /* runs: more units than a block has */

static copy_entry *entries;
static uint32_t *first;

static int set_up(void **state)
{
    entries = calloc(ENTRIES, sizeof *entries);
    first = calloc(ENTRIES + 1, sizeof *first);
    assert_true(entries && first);
    for (uint32_t i = 0; i < ENTRIES; i++) {
        copy_entry *e = &entries[i];
        *e = (copy_entry){.from = 7 * i, .to = 9 * i, .base = i, .runs = i % 3};
        e->run = i % 5 ? 16 : 3 * COPY_UNIT_BYTES; /* i % 3 == 0: of no unit */
        if (i == ENTRIES / 2)
            *e = (copy_entry){.run = 1, .runs = LARGE};
        first[i + 1] = first[i] + (uint32_t)copy_units_cut(e, NULL);
    }
    return 0;
}

static int tear_down(void **state)
{
    free(entries);
    free(first);
    return 0;
}

/* Of the entries from @p begin to @p end. */
static void assert_cut(uint32_t begin, uint32_t end)
{
    uint32_t n = end - begin, at = 0, units, *starts = calloc(n + 1, sizeof *starts);
    const copy_entry *block;
    assert_non_null(starts);
    for (uint32_t i = 0; i <= n; i++)
        starts[i] = first[begin + i] - first[begin];
    copy_entry *alone = malloc((starts[n] + 1) * sizeof *alone);
    assert_non_null(alone);
    for (uint32_t i = 0; i < n; i++)
        copy_units_cut(&entries[begin + i], alone + starts[i]);
    cut_ahead *c = cut_ahead_open(entries + begin, starts, n);
    assert_non_null(c);
    for (;;) {
        assert_true(cut_ahead_next(c, &block, &units));
        if (!block)
            break;
        assert_true(at + units <= starts[n]);
        assert_memory_equal(block, alone + at, units * sizeof *block);
        at += units;
    }
    assert_int_equal(at, starts[n]);
    cut_ahead_close(&c);
    assert_null(c);
    free(alone);
    free(starts);
}

TEST(units_come_in_order)
{
    assert_cut(0, ENTRIES);
    assert_cut(ENTRIES / 2, ENTRIES / 2 + 1); /* one that alone is more than a block */
    assert_cut(ENTRIES / 2 - 3, ENTRIES / 2 + 3);
    assert_cut(0, 2);
    assert_cut(0, 1); /* that has no unit */
    assert_cut(0, 0);
}

TEST(it_may_be_closed_before_the_end)
{
    const copy_entry *block;
    uint32_t units;
    for (int taken = 0; taken < 6; taken++) {
        cut_ahead *c = cut_ahead_open(entries, first, ENTRIES);
        assert_non_null(c);
        for (int i = 0; i < taken; i++)
            assert_true(cut_ahead_next(c, &block, &units) && block);
        cut_ahead_close(&c);
    }
    cut_ahead *none = NULL;
    cut_ahead_close(&none);
}

TESTS_BETWEEN(set_up, tear_down)
