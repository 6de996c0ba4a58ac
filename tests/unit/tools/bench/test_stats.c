/* SPDX-License-Identifier: Apache-2.0 */
/* Percentiles. */
#include "bench/bench.h"
#include "testing.h"

TEST(a_percentile_is_a_sample)
{
    uint64_t values[100];
    for (uint32_t i = 0; i < 100; i++)
        values[i] = 100 - i;
    stats_figure f = stats_figure_of(values, 100);
    assert_int_equal(f.median, 50); /* between 50 and 51 */
    assert_int_equal(f.p90, 90);
    assert_int_equal(f.p99, 99);
    assert_int_equal(f.least, 1);
    assert_int_equal(f.most, 100);
    assert_int_equal(f.count, 100);
}

TEST(few_samples_have_percentiles)
{
    uint64_t one[] = {7};
    uint64_t three[] = {30, 10, UINT64_MAX};
    stats_figure f = stats_figure_of(one, 1);
    assert_true(f.median == 7 && f.p90 == 7 && f.p99 == 7 && f.least == 7 &&
                f.most == 7);
    f = stats_figure_of(three, 3);
    assert_true(f.median == 30 && f.p90 == UINT64_MAX && f.p99 == UINT64_MAX);
    f = stats_figure_of(one, 0);
    assert_true(f.count == 0 && f.median == 0 && f.most == 0);
}
