/* SPDX-License-Identifier: Apache-2.0 */
#include "bench.h"
#include "report.h"

#include <stdlib.h>

bool bench_samples_init(bench_samples *s, uint32_t iterations)
{
    *s = (bench_samples){.capacity = iterations};
    s->values = calloc((size_t)iterations * BENCH_MAX_PHASES, sizeof(s->values[0]));
    return s->values != NULL;
}

void bench_samples_add(bench_samples *s, const fanin_result_info *info)
{
    if (s->count == s->capacity) {
        return;
    }
    for (uint32_t i = 0; report_phases[i].name != NULL; i++) {
        s->values[(size_t)i * s->capacity + s->count] =
            report_phase_ns(info, &report_phases[i]);
    }
    s->count++;
}

void bench_samples_free(bench_samples *s)
{
    free(s->values);
    *s = (bench_samples){0};
}

static int ascending(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a;
    uint64_t y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

bench_figure bench_figure_make(uint64_t *values, uint32_t count)
{
    if (count == 0) {
        return (bench_figure){0};
    }
    qsort(values, count, sizeof(values[0]), ascending);
    uint64_t low = values[(count - 1) / 2];
    return (bench_figure){low + (values[count / 2] - low) / 2, values[0],
                          values[count - 1]};
}

bench_figure bench_figure_of(const bench_samples *s, uint32_t phase)
{
    return bench_figure_make(s->values + (size_t)phase * s->capacity, s->count);
}
