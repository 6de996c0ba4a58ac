/* SPDX-License-Identifier: Apache-2.0 */
/** @file Figures over samples. */
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

#endif
