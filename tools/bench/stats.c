/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/stats.h"

#include <stdlib.h>

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
