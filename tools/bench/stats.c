/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/stats.h"
#include "fetch/output.h"

#include <math.h>
#include <stdlib.h>

/* Numbers drawn of each series, and how often a series is drawn anew. */
enum { DRAWN = 20000000, MOST_DRAWS = 2000, LEAST_DRAWS = 200 };

static int ascending(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a;
    uint64_t y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static uint64_t middle(uint64_t low, uint64_t high)
{
    return low + (high - low) / 2;
}

/* Of sorted values. */
static uint64_t percentile(const uint64_t *values, uint32_t count, uint32_t percent)
{
    uint64_t rank = ((uint64_t)count * percent + 99) / 100;
    return values[rank > 0 ? rank - 1 : 0];
}

stats_figure stats_figure_of(uint64_t *values, uint32_t count)
{
    if (count == 0) {
        return (stats_figure){0};
    }
    qsort(values, count, sizeof values[0], ascending);
    return (stats_figure){
        .median = middle(values[(count - 1) / 2], values[count / 2]),
        .least = values[0],
        .most = values[count - 1],
        .p90 = percentile(values, count, 90),
        .p99 = percentile(values, count, 99),
        .count = count,
    };
}

static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9E3779B97F4A7C15); /* splitmix64 */
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

/* The value that would be number @p k if they were sorted; they are moved. */
static uint64_t select_value(uint64_t *values, uint32_t count, uint32_t k)
{
    int64_t low = 0, high = (int64_t)count - 1;
    while (low < high) {
        uint64_t pivot = values[k];
        int64_t i = low, j = high;
        while (i <= j) {
            while (values[i] < pivot) {
                i++;
            }
            while (values[j] > pivot) {
                j--;
            }
            if (i <= j) {
                uint64_t swap = values[i];
                values[i++] = values[j];
                values[j--] = swap;
            }
        }
        if (j < (int64_t)k) {
            low = i;
        }
        if (i > (int64_t)k) {
            high = j;
        }
    }
    return values[k];
}

/* The median of blocks of @p values, drawn at random with return, as many as there are. */
static double draw_median(const uint64_t *values, uint32_t count, uint64_t *scratch,
                          uint64_t *state)
{
    uint32_t length = (uint32_t)lround(cbrt(count));
    for (uint32_t n = 0; n < count;) {
        uint32_t from = (uint32_t)(next_random(state) % count);
        for (uint32_t i = 0; i < length && n < count; i++) {
            scratch[n++] = values[(from + i) % count];
        }
    }
    uint64_t low = select_value(scratch, count, (count - 1) / 2);
    return (double)middle(low, select_value(scratch, count, count / 2));
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_of(const uint64_t *values, uint32_t count, uint64_t *scratch)
{
    for (uint32_t i = 0; i < count; i++) {
        scratch[i] = values[i];
    }
    return (double)stats_figure_of(scratch, count).median;
}

stats_ratio stats_compare(const uint64_t *a, uint32_t n_a, const uint64_t *b,
                          uint32_t n_b)
{
    uint32_t most = n_a > n_b ? n_a : n_b;
    uint32_t draws = DRAWN / most;
    draws = draws < LEAST_DRAWS ? LEAST_DRAWS : draws > MOST_DRAWS ? MOST_DRAWS : draws;
    uint64_t *scratch = output_require(malloc(most * sizeof scratch[0]));
    double *ratios = output_require(malloc(draws * sizeof ratios[0]));
    uint64_t state = 1;
    for (uint32_t i = 0; i < draws; i++) {
        double below = draw_median(a, n_a, scratch, &state);
        ratios[i] = draw_median(b, n_b, scratch, &state) / (below > 0 ? below : 1);
    }
    qsort(ratios, draws, sizeof ratios[0], by_value);
    stats_ratio out = {
        .ratio = median_of(b, n_b, scratch) / median_of(a, n_a, scratch),
        .low = ratios[draws / 200],
        .high = ratios[draws - 1 - draws / 200],
    };
    free(scratch);
    free(ratios);
    return out;
}
