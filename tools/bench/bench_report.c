/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/bench.h"
#include "fetch/failure.h"
#include "fetch/output.h"
#include "fetch/report.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The first two commits of a rank make its arenas. */
enum { FIRST_COMMITS = 2 };

/* Timed commits of a rank; false: there are none. */
static bool commits_of(const bench *b, uint32_t rank, uint32_t *count_out,
                       bench_figure *out)
{
    uint64_t ns[RANK_COMMITS];
    uint32_t count = ranks_commits(b->ranks, rank, ns);
    if (count <= FIRST_COMMITS) {
        return false;
    }
    *count_out = count - FIRST_COMMITS;
    *out = bench_figure_make(ns + FIRST_COMMITS, *count_out);
    return true;
}

static bool has_commits(const bench *b)
{
    return b->ranks != NULL && b->rank_options.publishing.timed;
}

/* Medians of the ranks, over the ranks. */
static bench_figure commits_of_all(const bench *b)
{
    uint32_t size = b->rank_options.world_size;
    uint64_t *medians = calloc(size + 1, sizeof(medians[0]));
    bench_figure figure = {0};
    uint32_t n = 0;
    for (uint32_t rank = 0; medians != NULL && rank < size; rank++) {
        uint32_t count;
        bench_figure one;
        if (commits_of(b, rank, &count, &one)) {
            medians[n++] = one.median;
        }
    }
    if (n > 0) {
        figure = bench_figure_make(medians, n);
    }
    free(medians);
    return figure;
}

static json_t *figure_json(bench_figure f)
{
    json_t *o = json_object();
    output_set_u64(o, "median_ns", f.median);
    output_set_u64(o, "min_ns", f.least);
    output_set_u64(o, "max_ns", f.most);
    return o;
}

static json_t *limits_json(const bench *b)
{
    json_t *list = json_array();
    for (size_t i = 0; i < b->limits.count; i++) {
        const bench_limit *l = &b->limits.items[i];
        json_t *o = l->problem[0] == '\0' ? figure_json(l->ns) : json_object();
        output_set_string(o, "name", l->name);
        output_set_u64(o, "threads", l->threads);
        output_set_u64(o, "bytes", l->bytes);
        output_set_u64(o, "pieces", l->pieces);
        output_set_string(o, "problem", l->problem);
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
        bench_figure figure;
        if (commits_of(b, rank, &count, &figure)) {
            json_t *one = figure_json(figure);
            output_set_u64(one, "rank", rank);
            output_set_u64(one, "commits", count);
            json_array_append_new(list, one);
        }
    }
    json_object_set_new(o, "ranks", list);
    return o;
}

static json_t *losses_json(const bench *b)
{
    json_t *list = json_array();
    for (size_t i = 0; i < b->n_losses; i++) {
        const bench_loss *l = &b->losses[i];
        json_t *ratios = json_array();
        for (uint32_t j = 0; j < l->pairs; j++) {
            json_array_append_new(ratios, json_real(l->ratio[j]));
        }
        json_array_append_new(list, json_pack("{s:i, s:i, s:f, s:f, s:f, s:o}", "rank",
                                              (int)l->rank, "device", l->device, "rate",
                                              l->rate_idle, "rate_size",
                                              device_load_size(b->rank_options.load),
                                              "loss", 1 - l->median, "ratios", ratios));
    }
    return list;
}

/* Medians of each round of pulls. */
static json_t *rounds_json(const bench *b)
{
    json_t *list = json_array();
    uint32_t each = (uint32_t)b->iterations;
    for (uint32_t first = 0; first + each <= b->samples.count; first += each) {
        json_t *o = json_object();
        for (uint32_t i = 0; report_phases[i].name != NULL; i++) {
            output_set_u64(o, report_phases[i].name,
                           bench_figure_part(&b->samples, i, first, each).median);
        }
        json_array_append_new(list, o);
    }
    return list;
}

void bench_tell_json(const bench *b)
{
    json_t *phases = json_object();
    json_t *o = json_object();
    for (uint32_t i = 0; report_phases[i].name != NULL; i++) {
        json_object_set_new(phases, report_phases[i].name,
                            figure_json(bench_figure_of(&b->samples, i)));
        if (strcmp(report_phases[i].name, "total") == 0) {
            double total = (double)bench_figure_of(&b->samples, i).median;
            json_object_set_new(o, "bytes_per_second",
                                json_real((double)b->last.bytes / total * 1e9));
        }
    }
    output_set_u64(o, "tensors", b->last.tensors);
    output_set_u64(o, "bytes", b->last.bytes);
    output_set_u64(o, "world_size", b->session.target.count);
    output_set_string(o, "destination", b->dest != NULL ? b->dest : "memory");
    output_set_string(o, "device", b->device.device);
    output_set_string(o, "path", fanin_path_name(b->last.path));
    output_set_string(o, "path_reason", b->reason);
    output_set_u64(o, "reads", b->last.reads);
    output_set_u64(o, "iterations", b->samples.count);
    json_object_set_new(o, "cold", json_boolean(b->cold));
    json_object_set_new(o, "snapshot", json_boolean(b->device.snapshot));
    json_object_set_new(o, "pattern_checked", json_boolean(b->pattern.follows));
    json_object_set_new(o, "all_checked", json_boolean(b->check_all));
    json_object_set_new(o, "phases", phases);
    json_object_set_new(o, "rounds", rounds_json(b));
    json_object_set_new(o, "limits", limits_json(b));
    if (has_commits(b)) {
        json_object_set_new(o, "commit", commits_json(b));
    }
    if (b->n_losses > 0) {
        json_object_set_new(o, "trainers", losses_json(b));
        output_set_u64(o, "trainers_pulls", b->loss_pulls);
    }
    output_set_u64(o, "peak_resident_bytes", b->peak_bytes);
    output_json(o);
}

static void add_figure(struct libscols_table *table, const char *name, bench_figure f,
                       uint64_t bytes)
{
    output_text median = output_duration(f.median);
    output_text least = output_duration(f.least);
    output_text most = output_duration(f.most);
    output_text rate = output_rate(bytes, f.median);
    const char *cells[] = {name, median.s, least.s, most.s, bytes > 0 ? rate.s : NULL};
    output_row(table, NULL, cells, 5);
}

static void add_limits(const bench *b, struct libscols_table *table)
{
    for (size_t i = 0; i < b->limits.count; i++) {
        const bench_limit *l = &b->limits.items[i];
        char name[160];
        if (l->problem[0] != '\0') {
            continue;
        }
        snprintf(name, sizeof(name), "limit: %s", l->name);
        if (l->threads > 0) {
            size_t used = strlen(name);
            snprintf(name + used, sizeof(name) - used, ", %u thread%s", l->threads,
                     l->threads == 1 ? "" : "s");
        }
        add_figure(table, name, l->ns, l->bytes);
    }
}

static void tell_trainers(const bench *b)
{
    bool product = b->rank_options.load == DEVICE_LOAD_PRODUCT;
    for (size_t i = 0; i < b->n_losses; i++) {
        const bench_loss *l = &b->losses[i];
        double rate = l->rate_idle * device_load_size(b->rank_options.load) / 1e12;
        printf("trainer on GPU %d: %.1f %s alone; loses %.2f %% while it is pulled "
               "(%llu pulls)\n",
               l->device, rate,
               product ? "Tflop/s of products of halves, 4096 by 4096,"
                       : "TB/s of sweeps over memory",
               100 * (1 - l->median), (unsigned long long)b->loss_pulls);
    }
}

static void tell_head(const bench *b)
{
    printf("%llu tensors, %s, %u ranks%s%s%s, to %s\n",
           (unsigned long long)b->last.tensors, output_bytes(b->last.bytes).s,
           b->session.target.count, b->device.device != NULL ? " on devices " : "",
           b->device.device != NULL ? b->device.device : "",
           b->device.snapshot ? ", snapshots" : "",
           b->dest != NULL ? b->dest : "memory");
    printf("path %s%s%s, %llu reads a pull\n", fanin_path_name(b->last.path),
           b->reason[0] != '\0' ? ": " : "", b->reason,
           (unsigned long long)b->last.reads);
    printf("%u pulls, %s; %s\n", b->samples.count,
           b->cold ? "each by a new client" : "warm",
           !b->pattern.follows ? "bytes not proven: the ranks follow no pattern"
           : b->check_all      ? "every byte of each proven"
                               : "every byte of the first one proven");
}

void bench_tell_text(const bench *b)
{
    static const output_column columns[] = {{"PHASE", false, false},
                                            {"MEDIAN", true, false},
                                            {"MIN", true, false},
                                            {"MAX", true, false},
                                            {"RATE", true, false}};
    struct libscols_table *table = output_table(columns, 5);
    tell_head(b);
    for (uint32_t i = 0; report_phases[i].name != NULL; i++) {
        const char *name = report_phases[i].name;
        bench_figure f = bench_figure_of(&b->samples, i);
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
    tell_trainers(b);
    printf("peak resident set %s\n", output_bytes(b->peak_bytes).s);
}
