/* SPDX-License-Identifier: Apache-2.0 */
/** @file Figures over samples, and whether two series of them differ. */
#ifndef STATS_H
#define STATS_H

#include <stdint.h>

/** A percentile is the least sample that so many of them do not exceed. */
typedef struct stats_figure {
    uint64_t median, least, most, p90, p99;
    uint32_t count; /**< samples; 0: all else is 0 */
} stats_figure;

/** Over @p count values, which are sorted. */
stats_figure stats_figure_of(uint64_t *values, uint32_t count);

/** The ratio of two medians, b's over a's, and where it lies with the confidence of 99 %. */
typedef struct stats_ratio {
    double ratio, low, high;
} stats_ratio;

enum { STATS_LEAST_SAMPLES = 5 };

/** By resampling blocks of neighbours, as pulls that follow each other are alike; the same each
    time. Each has STATS_LEAST_SAMPLES or more, no medians are 0. In the order in which they were
    taken. */
stats_ratio stats_compare(const uint64_t *a, uint32_t n_a, const uint64_t *b,
                          uint32_t n_b);

#endif
