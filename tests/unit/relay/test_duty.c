/* SPDX-License-Identifier: Apache-2.0 */
/** @file Duties: alike for all who have the same list, even, and steady when somebody joins. */
#include "duty.h"
#include "random.h"
#include "testing.h"

#define MOST 65
#define UNITS 515
#define MEMBERS_MOST 512
#define UNITS_MOST 32768

static void make_members(member *all, size_t n)
{
    random_source r = {7};
    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j < sizeof all[i].id; j++)
            all[i].id[j] = (uint8_t)random_next(&r);
    }
    qsort(all, n, sizeof *all, member_compare);
}

TEST(loads_differ_by_one_unit_at_most)
{
    member all[MOST];
    uint32_t owner[UNITS], load[MOST], counted[MOST];
    for (size_t n = 1; n <= MOST; n++) {
        make_members(all, n);
        duty_deal(all, n, owner, UNITS, load);
        memset(counted, 0, sizeof counted);
        for (size_t u = 0; u < UNITS; u++)
            counted[owner[u]]++;
        for (size_t i = 0; i < n; i++) {
            assert_int_equal(counted[i], load[i]);
            assert_in_range(load[i], UNITS / n, UNITS / n + (UNITS % n > 0));
        }
    }
}

static void check_join(size_t n, size_t units)
{
    member more[MEMBERS_MOST + 1];
    static uint32_t before[UNITS_MOST], after[UNITS_MOST];
    uint32_t load[MEMBERS_MOST + 1];
    size_t moved = 0;
    make_members(more, n + 1);
    /* the lowest id is new: all numbers shift */
    duty_deal(more + 1, n, before, units, load);
    duty_deal(more, n + 1, after, units, load);
    for (size_t u = 0; u < units; u++)
        moved += after[u] != before[u] + 1;
    assert_in_range(moved, units / (n + 1), 7 * units / (n + 1));
}

TEST(a_join_moves_little_more_than_the_new_share)
{
    for (size_t n = 2; n < MOST; n *= 2)
        check_join(n, UNITS);
    check_join(MEMBERS_MOST, UNITS_MOST);
}

TEST(ranks_are_a_line_without_the_owner)
{
    member all[9];
    make_members(all, 9);
    for (size_t u = 0; u < 50; u++) {
        bool taken[8] = {false};
        for (size_t i = 0; i < 9; i++) {
            if (i == 4)
                continue;
            size_t rank = duty_rank(all, 9, i, 4, u);
            assert_in_range(rank, 0, 7);
            assert_false(taken[rank]);
            taken[rank] = true;
        }
    }
}
