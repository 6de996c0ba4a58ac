/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/bench.h"
#include "fetch/failure.h"
#include "fetch/output.h"
#include "fetch/report.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The first two commits of a rank make its arenas. */
enum { FIRST_COMMITS = 2 };

/* Timed commits of a rank; false: there are none. */
static bool commits_of(const bench *b, uint32_t rank, uint32_t *count_out,
                       stats_figure *out)
{
    uint64_t ns[RANK_COMMITS];
    uint32_t count = ranks_commits(b->ranks, rank, ns);
    if (count <= FIRST_COMMITS) {
        return false;
    }
    *count_out = count - FIRST_COMMITS;
    *out = stats_figure_of(ns + FIRST_COMMITS, *count_out);
    return true;
}

static bool has_commits(const bench *b)
{
    return b->ranks != NULL && b->rank_options.publishing.timed;
}

/* Medians of the ranks, over the ranks. */
static stats_figure commits_of_all(const bench *b)
{
    uint32_t size = b->rank_options.world_size;
    uint64_t *medians = output_require(calloc(size + 1, sizeof medians[0]));
    uint32_t n = 0;
    for (uint32_t rank = 0; rank < size; rank++) {
        uint32_t count;
        stats_figure one;
        if (commits_of(b, rank, &count, &one)) {
            medians[n++] = one.median;
        }
    }
    stats_figure figure = stats_figure_of(medians, n);
    free(medians);
    return figure;
}

static json_t *figure_json(stats_figure f)
{
    return output_object("median_ns", output_u64(f.median), "p90_ns", output_u64(f.p90),
                         "p99_ns", output_u64(f.p99), "min_ns", output_u64(f.least),
                         "max_ns", output_u64(f.most), "count", output_u64(f.count),
                         NULL);
}

static json_t *limits_json(const bench *b)
{
    json_t *list = json_array();
    for (size_t i = 0; i < b->limits.count; i++) {
        const bench_limit *l = &b->limits.items[i];
        json_t *o = l->problem[0] == '\0' ? figure_json(l->ns) : json_object();
        output_set(o, "name", output_string(l->name), "threads", output_u64(l->threads),
                   "bytes", output_u64(l->bytes), "pieces", output_u64(l->pieces),
                   "problem", output_string(l->problem), NULL);
        json_array_append_new(list, o);
    }
    return list;
}

static json_t *commits_json(const bench *b)
{
    json_t *o = figure_json(commits_of_all(b)); /* of the ranks' medians */
    json_t *list = json_array();
    for (uint32_t rank = 0; rank < b->rank_options.world_size; rank++) {
        uint32_t count;
        stats_figure figure;
        if (commits_of(b, rank, &count, &figure)) {
            json_t *one = figure_json(figure);
            output_set(one, "rank", output_u64(rank), "commits", output_u64(count),
                       NULL);
            json_array_append_new(list, one);
        }
    }
    output_set(o, "ranks", list, NULL);
    return o;
}

static json_t *loss_json(const bench *b, const bench_loss *l, uint32_t number)
{
    const bench_loss_row *row = &l->rows[number];
    json_t *ratios = json_array();
    json_t *pulls = json_array();
    for (int i = 0; i < b->pairs; i++) {
        json_array_append_new(ratios, json_real(row->ratio[i]));
        json_array_append_new(pulls, output_u64(b->loss_pulls[i][number]));
    }
    return output_object(
        "readers", output_u64(b->counts[number]), "step_ns", json_real(row->step_ns),
        "loss", json_real(row->loss), "loss_min", json_real(row->least), "loss_max",
        json_real(row->most), "loss_mean", json_real(row->mean), "loss_error",
        json_real(row->mean_error), "work_loss", json_real(row->work),
        "work_loss_error", json_real(row->work_error), "lease_wait",
        json_real(row->wait), "server_cpu", json_real(row->cpu), "ratios", ratios,
        "pulls", pulls, NULL);
}

static json_t *losses_json(const bench *b)
{
    json_t *list = json_array();
    for (size_t i = 0; i < b->n_losses; i++) {
        const bench_loss *l = &b->losses[i];
        json_t *rows = json_array();
        for (uint32_t j = 0; j < b->n_counts; j++) {
            json_array_append_new(rows, loss_json(b, l, j));
        }
        double size = device_load_size(l->device, b->rank_options.load);
        json_array_append_new(
            list,
            output_object("rank", output_u64(l->rank), "device", output_rank(l->device),
                          "rate", json_real(l->units / l->step_idle_ns * 1e9),
                          "rate_size", json_real(size), "step_ns",
                          json_real(l->step_idle_ns), "readers", rows, NULL));
    }
    return list;
}

static json_t *trainer_json(const bench *b)
{
    return output_object("load", output_string(b->load_name), "phase_ns",
                         output_u64((uint64_t)b->phase_ms * 1000000), "update_every_ns",
                         output_u64((uint64_t)b->update_every * 1000000), "pause_ns",
                         output_u64((uint64_t)b->pause * 1000000), "trainers",
                         losses_json(b), NULL);
}

/* Medians of each round of pulls. */
static json_t *rounds_json(const bench *b)
{
    json_t *list = json_array();
    uint32_t each = (uint32_t)b->iterations;
    for (uint32_t first = 0; first + each <= b->samples.count; first += each) {
        json_t *o = json_object();
        for (uint32_t i = 0; report_phases[i].name != NULL; i++) {
            stats_figure f = bench_figure_part(&b->samples, i, first, each);
            output_set(o, report_phases[i].name, output_u64(f.median), NULL);
        }
        json_array_append_new(list, o);
    }
    return list;
}

static json_t *samples_json(const bench *b)
{
    json_t *o = json_object();
    for (uint32_t i = 0; report_phases[i].name != NULL; i++) {
        const uint64_t *values = b->samples.values + (size_t)i * b->samples.capacity;
        output_set(o, report_phases[i].name, output_list(values, b->samples.count),
                   NULL);
    }
    return o;
}

/* How and where it was measured. */
static void set_about(const bench *b, json_t *o)
{
    output_set(o, "machine", about_machine_json(&b->about), "command",
               output_string(b->about.command), "date", output_string(b->about.date),
               "library", output_string(fanin_version()), "verify",
               json_boolean(b->verify), "pull_dtype", output_string(b->pull_dtype),
               "spare_file", json_boolean(b->spare_file), "pause_ns",
               output_u64((uint64_t)b->pause * 1000000), "secured",
               json_boolean(session_is_secured(&b->session)), "no_unix",
               json_boolean(b->line.connect.no_unix), "checksums",
               json_boolean(!b->line.connect.no_checksums), NULL);
}

void bench_tell_json(const bench *b)
{
    json_t *phases = json_object();
    json_t *o = json_object();
    for (uint32_t i = 0; report_phases[i].name != NULL; i++) {
        stats_figure f = bench_figure_part(&b->samples, i, 0, b->samples.count);
        output_set(phases, report_phases[i].name, figure_json(f), NULL);
        if (strcmp(report_phases[i].name, "total") == 0) {
            double rate = (double)b->last.bytes / (double)f.median * 1e9;
            output_set(o, "bytes_per_second", json_real(rate), NULL);
        }
    }
    output_set(
        o, "tensors", output_u64(b->last.tensors), "bytes", output_u64(b->last.bytes),
        "world_size", output_u64(b->session.target.count), "destination",
        output_string(b->dest != NULL ? b->dest : "memory"), "device",
        output_string(b->trainer.device), "path",
        output_string(fanin_path_name(b->last.path)), "path_reason",
        output_string(b->reason), "reads", output_u64(b->last.reads), "iterations",
        output_u64(b->samples.count), "cold", json_boolean(b->cold), "snapshot",
        json_boolean(b->trainer.snapshot), "pattern_checked",
        json_boolean(b->pattern.follows), "all_checked", json_boolean(b->check_all),
        "layout", output_string(b->layout), "workers", json_integer(b->workers),
        "mappings", json_integer(b->mappings != NULL ? b->workers : 0), "phases",
        phases, "rounds", rounds_json(b), "samples", samples_json(b), "limits",
        limits_json(b), NULL);
    set_about(b, o);
    if (has_commits(b)) {
        output_set(o, "commit", commits_json(b), NULL);
    }
    if (b->n_losses > 0) {
        output_set(o, "trainer_load", trainer_json(b), NULL);
    }
    output_set(o, "peak_resident_bytes", output_u64(b->peak_bytes), NULL);
    output_json(o);
}

static void add_figure(struct libscols_table *table, const char *name, stats_figure f,
                       uint64_t bytes)
{
    output_row(table, NULL, name, output_number(f.count).s, output_duration(f.median).s,
               output_duration(f.p90).s, output_duration(f.p99).s,
               output_duration(f.least).s, output_duration(f.most).s,
               bytes > 0 ? output_rate(bytes, f.median).s : NULL);
}

static void add_limits(const bench *b, struct libscols_table *table)
{
    for (size_t i = 0; i < b->limits.count; i++) {
        const bench_limit *l = &b->limits.items[i];
        char name[160];
        if (l->problem[0] != '\0') {
            continue;
        }
        snprintf(name, sizeof name, "limit: %s", l->name);
        if (l->threads > 0) {
            output_append(name, sizeof name, ", %u thread%s", l->threads,
                          l->threads == 1 ? "" : "s");
        }
        add_figure(table, name, l->ns, l->bytes);
    }
}

static void add_loss(const bench *b, struct libscols_table *table, const bench_loss *l,
                     const char *name, uint32_t number)
{
    const bench_loss_row *row = &l->rows[number];
    char loss[3][32], means[2][48], shares[2][32];
    const double values[3] = {row->loss, row->least, row->most};
    uint64_t pulls = 0;
    for (int i = 0; i < 3; i++) {
        snprintf(loss[i], sizeof loss[i], "%+.3f %%", 100 * values[i]);
    }
    snprintf(means[0], sizeof means[0], "%+.3f ± %.3f %%", 100 * row->mean,
             100 * row->mean_error);
    snprintf(means[1], sizeof means[1], "%+.3f ± %.3f %%", 100 * row->work,
             100 * row->work_error);
    snprintf(shares[0], sizeof shares[0], "%.4f %%", 100 * row->wait);
    snprintf(shares[1], sizeof shares[1], "%.4f %%", 100 * row->cpu);
    for (int i = 0; i < b->pairs; i++) {
        pulls += b->loss_pulls[i][number];
    }
    output_row(table, NULL, name, output_number(b->counts[number]).s,
               output_number(pulls).s, output_duration((uint64_t)row->step_ns).s,
               loss[0], loss[1], loss[2], means[0], means[1], shares[0], shares[1]);
}

static const char *rate_name(device_load_kind kind)
{
    return kind == DEVICE_LOAD_PRODUCT   ? "Gflop/s of products of matrices"
           : kind == DEVICE_LOAD_INTEGER ? "Gop/s of integers"
                                         : "GB/s of sweeps over memory";
}

static void tell_trainers(const bench *b)
{
    struct libscols_table *table = output_table(
        "TRAINER READERS> PULLS> STEP> LOSS> LEAST> MOST> MEAN> WORK> WAITS> CPU>");
    for (size_t i = 0; i < b->n_losses; i++) {
        const bench_loss *l = &b->losses[i];
        char name[40] = "host";
        if (l->device != DEVICE_HOST) {
            snprintf(name, sizeof name, "GPU %d", l->device);
        }
        double rate = l->units / l->step_idle_ns *
                      device_load_size(l->device, b->rank_options.load);
        printf("trainer, %s: %.3g %s alone\n", name, rate,
               rate_name(b->rank_options.load));
        for (uint32_t j = 0; j < b->n_counts; j++) {
            add_loss(b, table, l, name, j);
        }
    }
    printf("%d phases of %d ms for each number of readers, each between two without; "
           "readers pause %d ms, ranks update every %d ms%s\n",
           b->pairs, b->phase_ms, b->pause, b->update_every,
           b->trainer.snapshot ? ", snapshots" : "");
    output_print(table);
}

static void tell_head(const bench *b)
{
    printf("%" PRIu64 " tensors, %s, %u ranks%s%s%s, to %s\n", b->last.tensors,
           output_bytes(b->last.bytes).s, b->session.target.count,
           b->trainer.device != NULL ? " on devices " : "",
           b->trainer.device != NULL ? b->trainer.device : "",
           b->trainer.snapshot ? ", snapshots" : "",
           b->dest != NULL ? b->dest : "memory");
    if (b->layout != NULL || b->mappings != NULL) {
        printf(
            "%s, by %d of the engine's ranks at once; phases are the slowest one's\n",
            b->layout != NULL ? b->layout : "as recorded mappings say", b->workers);
    }
    printf("path %s%s%s, %" PRIu64 " reads a pull\n", fanin_path_name(b->last.path),
           b->reason[0] != '\0' ? ": " : "", b->reason, b->last.reads);
    printf("%u pulls, %s; %s\n", b->samples.count,
           b->cold ? "each by a new client" : "warm",
           !b->pattern.follows ? "bytes not proven: the ranks follow no pattern"
           : b->check_all      ? "every byte of each proven"
                               : "every byte of the first one proven");
}

void bench_tell_text(const bench *b)
{
    struct libscols_table *table =
        output_table("PHASE N> MEDIAN> P90> P99> MIN> MAX> RATE>");
    tell_head(b);
    for (uint32_t i = 0; report_phases[i].name != NULL; i++) {
        const char *name = report_phases[i].name;
        stats_figure f = bench_figure_part(&b->samples, i, 0, b->samples.count);
        bool moves = strcmp(name, "read") == 0 || strcmp(name, "verify") == 0 ||
                     strcmp(name, "total") == 0;
        if (f.most > 0) {
            add_figure(table, name, f, moves ? b->last.bytes : 0);
        }
    }
    if (has_commits(b)) {
        add_figure(table, "commit, medians of ranks", commits_of_all(b), 0);
    }
    add_limits(b, table);
    output_print(table);
    for (size_t i = 0; i < b->limits.count; i++) {
        if (b->limits.items[i].problem[0] != '\0') {
            failure_warn("no limit by %s: %s", b->limits.items[i].name,
                         b->limits.items[i].problem);
        }
    }
    if (b->n_losses > 0) {
        tell_trainers(b);
    }
    printf("peak resident set %s\n", output_bytes(b->peak_bytes).s);
}
