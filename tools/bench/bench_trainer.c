/* SPDX-License-Identifier: Apache-2.0 */
/* What being pulled costs ranks that work: phases without and with readers take turns, and each
   phase with readers is compared with the two around it. */
#include "bench/bench.h"
#include "fetch/failure.h"
#include "fetch/interrupt.h"
#include "fetch/progress.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>

/* The first phase warms up, from the second on every other one has no readers. */
enum { FIRST_IDLE = 2, FIRST_PULLED = 3, LOOK_MS = 100, SHORTEST_MS = 1000 };

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_of(const double *values, uint32_t count)
{
    double sorted[BENCH_MAX_PAIRS * BENCH_MAX_COUNTS + 1] = {0};
    for (uint32_t i = 0; i < count; i++) {
        sorted[i] = values[i];
    }
    qsort(sorted, count, sizeof sorted[0], by_value);
    return count > 0 ? (sorted[(count - 1) / 2] + sorted[count / 2]) / 2 : 0;
}

/* A step's time in a phase, 0: none was whole. */
static double step_of(const bench *b, uint32_t rank, uint32_t phase)
{
    rank_work work = ranks_slot(b->ranks, rank)->work[phase];
    return work.steps > 0 ? (double)work.ns / (double)work.steps : 0;
}

/* A unit's time in a phase, without the updates. */
static double unit_of(const bench *b, uint32_t rank, uint32_t phase)
{
    rank_work work = ranks_slot(b->ranks, rank)->work[phase];
    return work.units > 0 ? (double)work.load_ns / (double)work.units : 0;
}

/* One minus each ratio: the mean, and how far that may be off. */
static void mean_of(const double *ratios, uint32_t count, double *mean, double *off)
{
    double sum = 0, squares = 0;
    for (uint32_t i = 0; i < count; i++) {
        sum += 1 - ratios[i];
    }
    *mean = sum / count;
    for (uint32_t i = 0; i < count; i++) {
        double apart = 1 - ratios[i] - *mean;
        squares += apart * apart;
    }
    *off = count > 1 ? sqrt(squares / (count - 1) / count) : 0;
}

static bench_loss_row row_of(const bench *b, uint32_t rank, uint32_t number)
{
    const uint32_t pairs = (uint32_t)b->pairs;
    bench_loss_row row = {.least = 1e9, .most = -1e9};
    double ratios[BENCH_MAX_PAIRS], steps[BENCH_MAX_PAIRS];
    double waits[BENCH_MAX_PAIRS], cpus[BENCH_MAX_PAIRS], units[BENCH_MAX_PAIRS];
    for (uint32_t i = 0; i < pairs; i++) {
        uint32_t phase = FIRST_PULLED + 2 * (i * b->n_counts + number);
        double around = (step_of(b, rank, phase - 1) + step_of(b, rank, phase + 1)) / 2;
        rank_work work = ranks_slot(b->ranks, rank)->work[phase];
        steps[i] = step_of(b, rank, phase);
        waits[i] = work.ns > 0 ? (double)work.wait_ns / (double)work.ns : 0;
        cpus[i] = work.ns > 0 ? (double)work.cpu_ns / (double)work.ns : 0;
        double alone = (unit_of(b, rank, phase - 1) + unit_of(b, rank, phase + 1)) / 2;
        double pulled = unit_of(b, rank, phase);
        units[i] = pulled > 0 ? alone / pulled : 0;
        ratios[i] = row.ratio[i] = steps[i] > 0 ? around / steps[i] : 0;
        row.least = 1 - ratios[i] < row.least ? 1 - ratios[i] : row.least;
        row.most = 1 - ratios[i] > row.most ? 1 - ratios[i] : row.most;
    }
    row.loss = 1 - median_of(ratios, pairs);
    mean_of(ratios, pairs, &row.mean, &row.mean_error);
    mean_of(units, pairs, &row.work, &row.work_error);
    row.step_ns = median_of(steps, pairs);
    row.wait = median_of(waits, pairs);
    row.cpu = median_of(cpus, pairs);
    return row;
}

static bench_loss loss_of(const bench *b, uint32_t rank)
{
    bench_loss loss = {.rank = rank, .device = rank_device(&b->rank_options, rank)};
    const uint32_t n = (uint32_t)b->pairs * b->n_counts + 1;
    double idle[BENCH_MAX_PAIRS * BENCH_MAX_COUNTS + 1];
    for (uint32_t i = 0; i < n; i++) {
        idle[i] = step_of(b, rank, FIRST_IDLE + 2 * i);
    }
    loss.step_idle_ns = median_of(idle, n);
    rank_work work = ranks_slot(b->ranks, rank)->work[FIRST_IDLE];
    loss.units = work.steps > 0 ? (double)work.units / (double)work.steps : 0;
    for (uint32_t i = 0; i < b->n_counts; i++) {
        loss.rows[i] = row_of(b, rank, i);
    }
    return loss;
}

static bool all_counted(const bench *b, uint32_t phase)
{
    for (uint32_t rank = 0; rank < b->rank_options.world_size; rank++) {
        if (rank_works(&b->rank_options, rank) &&
            atomic_load(&ranks_slot(b->ranks, rank)->counted) != phase) {
            return false;
        }
    }
    return true;
}

/* As long as --phase says, and until each rank that works has had a whole step: what one has to do
   was fixed by its first step, and clocks may have been higher then. */
static int wait_phase(const bench *b, uint32_t phase)
{
    uint64_t end = progress_in_ms((uint64_t)b->phase_ms);
    uint64_t last = progress_in_ms((uint64_t)b->phase_ms + b->line.common.timeout_ms);
    for (uint32_t left; (left = progress_left_ms(end)) > 0 ||
                        (!all_counted(b, phase) && progress_left_ms(last) > 0);) {
        int code = ranks_pause(b->ranks, left > 0 && left < LOOK_MS ? left : LOOK_MS);
        if (code == 0 && interrupt_requested()) {
            code = interrupt_exit_code();
        }
        if (code != 0) {
            return code;
        }
    }
    return 0;
}

/* A phase of so many readers; those pulls are over when it is. */
static int one_phase(bench *b, bench_readers *readers, uint32_t phase, uint32_t active,
                     uint32_t *pulls_out)
{
    ranks_phase(b->ranks, phase);
    bench_readers_begin(readers, active);
    int code = wait_phase(b, phase);
    if (code != 0) {
        bench_readers_cancel(readers);
        return code;
    }
    return bench_readers_end(readers, pulls_out);
}

static int all_phases(bench *b, bench_readers *readers)
{
    const uint32_t measured = (uint32_t)b->pairs * b->n_counts;
    uint32_t none;
    int code = one_phase(b, readers, 1, 0, &none);
    code = code != 0 ? code : one_phase(b, readers, FIRST_IDLE, 0, &none);
    for (uint32_t i = 0; i < measured && code == 0; i++) {
        uint32_t *pulls = &b->loss_pulls[i / b->n_counts][i % b->n_counts];
        uint32_t active = b->counts[i % b->n_counts];
        code = one_phase(b, readers, FIRST_PULLED + 2 * i, active, pulls);
        code = code != 0 ? code
                         : one_phase(b, readers, FIRST_PULLED + 2 * i + 1, 0, &none);
    }
    ranks_phase(b->ranks, 0);
    return code;
}

/* Every phase has to have a whole step. */
static int check_steps(const bench *b, uint32_t rank)
{
    const uint32_t last = FIRST_IDLE + 2 * (uint32_t)b->pairs * b->n_counts;
    for (uint32_t phase = FIRST_IDLE; phase <= last; phase++) {
        if (step_of(b, rank, phase) <= 0) {
            return failure_local(
                "cannot measure what readers cost", FANIN_ERR_TIMEOUT,
                "give a shorter --update-every or a longer --timeout",
                "rank %u had no whole step of %d ms and its update in a phase of %d ms "
                "and the %u ms of --timeout after it",
                rank, b->update_every, b->phase_ms, b->line.common.timeout_ms);
        }
    }
    return 0;
}

int bench_trainer(bench *b)
{
    bench_readers *readers = NULL;
    uint32_t most = 1;
    for (uint32_t i = 0; i < b->n_counts; i++) {
        most = b->counts[i] > most ? b->counts[i] : most;
    }
    int code = bench_readers_open(b, most, &readers);
    code = code != 0 ? code : all_phases(b, readers);
    bench_readers_free(&readers);
    for (uint32_t rank = 0; code == 0 && rank < b->rank_options.world_size; rank++) {
        if (rank_works(&b->rank_options, rank) && b->n_losses < DEVICE_MAX) {
            code = check_steps(b, rank);
            b->losses[b->n_losses++] = loss_of(b, rank);
        }
    }
    return code;
}

/* "0,1,8" */
static bool parse_counts(bench *b, const char *text)
{
    b->n_counts = 0;
    for (const char *at = text; b->n_counts < BENCH_MAX_COUNTS;) {
        char *end = NULL;
        if (*at < '0' || *at > '9') {
            return false;
        }
        unsigned long count = strtoul(at, &end, 10);
        if (count > BENCH_MAX_READERS) {
            return false;
        }
        b->counts[b->n_counts++] = (uint32_t)count;
        if (*end != ',') {
            return *end == '\0';
        }
        at = end + 1;
    }
    return false;
}

int bench_trainer_resolve(bench *b)
{
    const char *name = b->self->name;
    if (!parse_counts(b, b->readers != NULL ? b->readers : "1")) {
        return failure_usage(name,
                             "--readers '%s' is no list such as 0,1,8 of %d numbers at "
                             "most, each up to %d",
                             b->readers, BENCH_MAX_COUNTS, BENCH_MAX_READERS);
    }
    for (uint32_t i = 0; i < b->n_counts; i++) {
        if (b->counts[i] > 1 && (b->workers > 1 || b->directory)) {
            return failure_usage(name,
                                 "several --readers are for one worker and memory");
        }
    }
    if (b->pairs > BENCH_MAX_PAIRS) {
        return failure_usage(name, "--pairs is 1 to %d", BENCH_MAX_PAIRS);
    }
    if (b->phase_ms == 0) {
        b->phase_ms = b->update_every < SHORTEST_MS / 3 ? SHORTEST_MS
                      : b->update_every < INT_MAX / 3   ? 3 * b->update_every
                                                        : INT_MAX;
    }
    if (b->phase_ms / 2 < b->update_every) {
        return failure_usage(name, "--phase %d holds no two steps of --update-every %d",
                             b->phase_ms, b->update_every);
    }
    return 0;
}
