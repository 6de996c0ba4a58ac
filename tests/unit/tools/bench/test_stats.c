/* SPDX-License-Identifier: Apache-2.0 */
/* Percentiles, and when two series of samples differ. */
#include "bench/stats.h"
#include "testing.h"

enum { MANY = 200 };

static uint64_t state;

static uint64_t random_below(uint64_t limit)
{
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (state >> 33) % limit;
}

static void a_percentile_is_a_sample(void **s)
{
    (void)s;
    uint64_t values[100];
    for (uint32_t i = 0; i < 100; i++) {
        values[i] = 100 - i;
    }
    stats_figure f = stats_figure_of(values, 100);
    assert_int_equal(f.median, 50); /* between 50 and 51 */
    assert_int_equal(f.p90, 90);
    assert_int_equal(f.p99, 99);
    assert_int_equal(f.least, 1);
    assert_int_equal(f.most, 100);
    assert_int_equal(f.count, 100);
}

static void few_samples_have_percentiles(void **s)
{
    (void)s;
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

/* Of a hundred pairs of series of the same kind few may seem to differ. */
static void noise_is_no_difference(void **s)
{
    (void)s;
    uint64_t a[MANY], b[MANY];
    int seen = 0;
    state = 11;
    for (int round = 0; round < 100; round++) {
        for (uint32_t i = 0; i < MANY; i++) {
            a[i] = 1000000 + random_below(300000);
            b[i] = 1000000 + random_below(300000);
        }
        stats_ratio r = stats_compare(a, MANY, b, MANY);
        seen += r.low > 1 || r.high < 1;
        assert_true(r.low <= r.ratio && r.ratio <= r.high);
    }
    assert_true(seen <= 5);
}

static void a_tenth_more_is_seen(void **s)
{
    (void)s;
    uint64_t a[MANY], b[MANY];
    state = 5;
    for (uint32_t i = 0; i < MANY; i++) {
        a[i] = 1000000 + random_below(100000);
        b[i] = 1100000 + random_below(110000);
    }
    stats_ratio slower = stats_compare(a, MANY, b, MANY);
    stats_ratio faster = stats_compare(b, MANY, a, MANY);
    assert_true(slower.low > 1.05 && slower.high < 1.15);
    assert_true(faster.high < 0.95);
    stats_ratio again = stats_compare(a, MANY, b, MANY);
    assert_memory_equal(&slower, &again, sizeof slower);
}

/* A machine that was busy for a while makes neighbours alike: that is no reason to be surer. */
static void slow_stretches_widen_the_interval(void **s)
{
    (void)s;
    uint64_t stretches[MANY], mixed[MANY];
    for (uint32_t i = 0; i < MANY; i++) {
        stretches[i] = 1000 + (i / 50 % 2) * 1000 + i % 7;
        mixed[i] = 1000 + (i % 2) * 1000 + i % 7;
    }
    stats_ratio wide = stats_compare(mixed, MANY, stretches, MANY);
    assert_true(wide.low < 0.9 && wide.high > 1.1);
}

static void the_least_number_of_samples_is_enough(void **s)
{
    (void)s;
    const uint64_t a[STATS_LEAST_SAMPLES] = {100, 101, 102, 103, 104};
    const uint64_t b[STATS_LEAST_SAMPLES] = {200, 201, 202, 203, 204};
    stats_ratio r = stats_compare(a, STATS_LEAST_SAMPLES, b, STATS_LEAST_SAMPLES);
    assert_true(r.low > 1.8 && r.high < 2.2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_percentile_is_a_sample),
        cmocka_unit_test(few_samples_have_percentiles),
        cmocka_unit_test(noise_is_no_difference),
        cmocka_unit_test(a_tenth_more_is_seen),
        cmocka_unit_test(slow_stretches_widen_the_interval),
        cmocka_unit_test(the_least_number_of_samples_is_enough),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
