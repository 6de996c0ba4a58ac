/* SPDX-License-Identifier: Apache-2.0 */
/** @file Parts of `bench`: figures over several pulls, and the limits beside them. */
#ifndef BENCH_H
#define BENCH_H

#include "arena.h"
#include "ranks.h"

#include <jansson.h>

enum { BENCH_MAX_ITERATIONS = 100000, BENCH_MAX_PHASES = 16 };

/** Samples of every phase of report_phases, in nanoseconds. */
typedef struct bench_samples {
    uint64_t *values; /**< [phase][iteration] */
    uint32_t capacity, count;
} bench_samples;

bool bench_samples_init(bench_samples *s, uint32_t iterations);
void bench_samples_add(bench_samples *s, const fanin_result_info *info);
void bench_samples_free(bench_samples *s);

typedef struct bench_figure {
    uint64_t median, least, most;
} bench_figure;

/** Over all samples of phase number @p phase. */
bench_figure bench_figure_of(const bench_samples *s, uint32_t phase);
/** Over @p count values, which are sorted. */
bench_figure bench_figure_make(uint64_t *values, uint32_t count);

/** What the machine does without this library. */
typedef struct bench_limit {
    const char *name;
    const char *problem; /**< why there is no figure, NULL: there is one */
    uint64_t bytes, pieces;
    uint32_t threads;
    bench_figure ns;
} bench_limit;

/** process_vm_readv of the ranks' shards in pieces of at most 1 MiB into @p a's memory. */
bench_limit bench_raw_read(const rank_options *options, const ranks *r, const arena *a,
                           uint32_t threads);
/** memcpy of as many bytes as @p a has, by one thread. */
bench_limit bench_memcpy(const arena *a);

#endif
