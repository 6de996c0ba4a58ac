/* SPDX-License-Identifier: Apache-2.0 */
/* What being pulled without pause costs ranks that work: phases without and with pulls take
   turns, and each pulled phase is compared with the two around it. */
#include "bench/bench.h"
#include "fetch/failure.h"
#include "fetch/interrupt.h"
#include "fetch/progress.h"

#include <stdlib.h>

enum { PHASE_MS = 1000 };

static int pull_for(bench *b, uint32_t ms)
{
    uint64_t end = progress_in_ms(ms);
    while (progress_left_ms(end) > 0) {
        fanin_error error = FANIN_ERROR_INIT;
        fanin_result_info info;
        if (bench_pull(b, false, &info, &error) != FANIN_OK) {
            return failure_report("cannot pull", &error);
        }
        b->loss_pulls++;
        if (interrupt_requested()) {
            return interrupt_exit_code();
        }
    }
    return 0;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_of(const double *values, uint32_t count)
{
    double sorted[2 * BENCH_LOSS_PAIRS + 1] = {0};
    for (uint32_t i = 0; i < count; i++) {
        sorted[i] = values[i];
    }
    qsort(sorted, count, sizeof sorted[0], by_value);
    return count > 0 ? (sorted[(count - 1) / 2] + sorted[count / 2]) / 2 : 0;
}

static double rate_of(const bench *b, uint32_t rank, uint32_t phase)
{
    rank_work work = ranks_slot(b->ranks, rank)->work[phase];
    return work.ns > 0 ? (double)work.units / (double)work.ns * 1e9 : 0;
}

/* Phases 2, 4, ... were without pulls, 3, 5, ... with them. */
static bench_loss loss_of(const bench *b, uint32_t rank)
{
    bench_loss loss = {.rank = rank,
                       .device = rank_device(&b->rank_options, rank),
                       .pairs = BENCH_LOSS_PAIRS};
    double idle[BENCH_LOSS_PAIRS + 1];
    for (uint32_t i = 0; i <= BENCH_LOSS_PAIRS; i++) {
        idle[i] = rate_of(b, rank, 2 + 2 * i);
    }
    for (uint32_t i = 0; i < BENCH_LOSS_PAIRS; i++) {
        double around = (idle[i] + idle[i + 1]) / 2;
        loss.ratio[i] = around > 0 ? rate_of(b, rank, 3 + 2 * i) / around : 0;
    }
    loss.rate_idle = median_of(idle, BENCH_LOSS_PAIRS + 1);
    loss.median = median_of(loss.ratio, BENCH_LOSS_PAIRS);
    return loss;
}

int bench_trainer(bench *b)
{
    int code = 0;
    for (uint32_t phase = 1; phase <= 2 * BENCH_LOSS_PAIRS + 2 && code == 0; phase++) {
        bool pulled = phase > 1 && phase % 2 != 0;
        ranks_phase(b->ranks, phase); /* the first one warms up */
        code = pulled ? pull_for(b, PHASE_MS) : ranks_pause(b->ranks, PHASE_MS);
        if (code == 0 && interrupt_requested()) {
            code = interrupt_exit_code();
        }
    }
    ranks_phase(b->ranks, 0);
    for (uint32_t rank = 0; code == 0 && rank < b->rank_options.world_size; rank++) {
        if (rank_works(&b->rank_options, rank) && b->n_losses < DEVICE_MAX) {
            b->losses[b->n_losses++] = loss_of(b, rank);
        }
    }
    return code;
}
