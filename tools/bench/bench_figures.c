/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/bench.h"
#include "fetch/output.h"
#include "fetch/report.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void bench_samples_init(bench_samples *s, uint32_t iterations)
{
    *s = (bench_samples){.capacity = iterations};
    s->values = output_require(
        calloc((size_t)iterations * BENCH_MAX_PHASES, sizeof s->values[0]));
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

stats_figure bench_figure_part(const bench_samples *s, uint32_t phase, uint32_t first,
                               uint32_t count)
{
    uint64_t *copy = output_require(malloc(((size_t)count + 1) * sizeof copy[0]));
    memcpy(copy, s->values + (size_t)phase * s->capacity + first,
           count * sizeof copy[0]);
    stats_figure figure = stats_figure_of(copy, count);
    free(copy);
    return figure;
}

bench_limit *bench_limit_add(bench_limits *limits, const char *format, ...)
{
    size_t at =
        limits->count < BENCH_MAX_LIMITS ? limits->count++ : BENCH_MAX_LIMITS - 1;
    bench_limit *limit = &limits->items[at];
    va_list arguments;
    *limit = (bench_limit){.pieces = 1};
    va_start(arguments, format);
    vsnprintf(limit->name, sizeof limit->name, format, arguments);
    va_end(arguments);
    return limit;
}

void bench_limit_end(bench_limit *limit, uint64_t *times, uint32_t count,
                     const char *problem)
{
    if (problem != NULL) {
        snprintf(limit->problem, sizeof limit->problem, "%.150s", problem);
    } else {
        limit->ns = stats_figure_of(times, count);
    }
}
