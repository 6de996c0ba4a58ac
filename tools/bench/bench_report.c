/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/bench.h"
#include "fetch/failure.h"
#include "fetch/output.h"
#include "fetch/report.h"

#include <inttypes.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

/* ---------------------- where, when and by which command line it was measured */

static void name_processor(char *out, size_t size)
{
    char line[256];
    struct utsname host;
    snprintf(out, size, "%s", uname(&host) == 0 ? host.machine : "unknown");
    FILE *file = fopen("/proc/cpuinfo", "re");
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        const char *colon = strchr(line, ':');
        if (colon != NULL && strncmp(line, "model name", 10) == 0) {
            snprintf(out, size, "%.*s", (int)strcspn(colon + 2, "\n"), colon + 2);
            break;
        }
    }
    if (file != NULL)
        (void)fclose(file);
}

static void about_put_word(FILE *stream, const char *word)
{
    static const char plain[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
                                "0123456789-_./:,=+@%";
    if (word[0] != '\0' && word[strspn(word, plain)] == '\0') {
        fputs(word, stream);
        return;
    }
    fputc('\'', stream);
    for (; *word != '\0'; word++)
        fputs(*word == '\'' ? "'\\''" : (char[]){*word, '\0'}, stream);
    fputc('\'', stream);
}

static char *about_join(int argc, const char **argv)
{
    char *text = NULL;
    size_t size = 0;
    FILE *stream = output_require(open_memstream(&text, &size));
    fputs(argv[0], stream); /* "nixl-fetch bench" */
    for (int i = 1; i < argc; i++) {
        fputc(' ', stream);
        about_put_word(stream, argv[i]);
    }
    (void)fclose(stream);
    return output_require(text);
}

void about_make(int argc, const char **argv, about *out)
{
    struct utsname host;
    struct tm utc;
    cpu_set_t usable;
    time_t now = time(NULL);
    *out = (about){.command = about_join(argc, argv)};
    name_processor(out->processor, sizeof out->processor);
    if (uname(&host) == 0)
        snprintf(out->kernel, sizeof out->kernel, "%s %s", host.sysname, host.release);
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    out->cores = sched_getaffinity(0, sizeof usable, &usable) == 0
                     ? (uint32_t)CPU_COUNT(&usable)
                     : (uint32_t)cores;
    out->memory_bytes =
        (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    if (gmtime_r(&now, &utc) != NULL)
        strftime(out->date, sizeof out->date, "%Y-%m-%dT%H:%M:%SZ", &utc);
}

void about_devices(about *a)
{
    gpu *g;
    gpu_device device;
    int count = gpu_load(NULL, &g, NULL) == FANIN_OK ? gpu_count(g) : 0;
    for (int i = 0; i < count && gpu_device_get(g, i, &device, NULL) == FANIN_OK; i++)
        output_append(a->devices, sizeof a->devices, "%s%.63s", i > 0 ? ", " : "",
                      device.name);
}

void about_free(about *a)
{
    free(a->command);
    a->command = NULL;
}

static json_t *about_machine_json(const about *a)
{
    return output_object(
        "processor", output_string(a->processor), "cores", output_u64(a->cores),
        "memory_bytes", output_u64(a->memory_bytes), "kernel", output_string(a->kernel),
        "devices", output_string(a->devices), NULL);
}

/* ---------------------------------------------------------------------- figures */

static int samples_ascending(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a;
    uint64_t y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static uint64_t samples_middle(uint64_t low, uint64_t high)
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
    if (count == 0)
        return (stats_figure){0};
    qsort(values, count, sizeof values[0], samples_ascending);
    return (stats_figure){
        .median = samples_middle(values[(count - 1) / 2], values[count / 2]),
        .least = values[0],
        .most = values[count - 1],
        .p90 = percentile(values, count, 90),
        .p99 = percentile(values, count, 99),
        .count = count,
    };
}

void bench_samples_init(bench_samples *s, uint32_t iterations)
{
    *s = (bench_samples){.capacity = iterations};
    s->values = output_require(
        calloc((size_t)iterations * BENCH_MAX_PHASES, sizeof s->values[0]));
}

void bench_samples_add(bench_samples *s, const fanin_result_info *info)
{
    if (s->count == s->capacity)
        return;
    for (uint32_t i = 0; report_phases[i].name != NULL; i++)
        s->values[(size_t)i * s->capacity + s->count] =
            report_phase_ns(info, &report_phases[i]);
    s->count++;
}

void bench_samples_free(bench_samples *s)
{
    free(s->values);
    *s = (bench_samples){0};
}

/* Over samples first .. first+count-1 of phase number phase. */
static stats_figure figure_part(const bench_samples *s, uint32_t phase, uint32_t first,
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
    if (problem != NULL)
        snprintf(limit->problem, sizeof limit->problem, "%.150s", problem);
    else
        limit->ns = stats_figure_of(times, count);
}

/* The first two commits of a rank make its arenas. */
enum { FIRST_COMMITS = 2 };

/* Timed commits of a rank; false: there are none. */
static bool commits_of(const bench *b, uint32_t rank, uint32_t *count_out,
                       stats_figure *out)
{
    uint64_t ns[RANK_COMMITS];
    uint32_t count = ranks_commits(b->ranks, rank, ns);
    if (count <= FIRST_COMMITS)
        return false;
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
        if (commits_of(b, rank, &count, &one))
            medians[n++] = one.median;
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

/* Medians of each round of pulls. */
static json_t *rounds_json(const bench *b)
{
    json_t *list = json_array();
    uint32_t each = (uint32_t)b->iterations;
    for (uint32_t first = 0; first + each <= b->samples.count; first += each) {
        json_t *o = json_object();
        for (uint32_t i = 0; report_phases[i].name != NULL; i++) {
            stats_figure f = figure_part(&b->samples, i, first, each);
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
               json_boolean(session_is_secured(&b->all[0].session)), "no_unix",
               json_boolean(b->line.connect.no_unix), "checksums",
               json_boolean(!b->line.connect.no_checksums), NULL);
}

void bench_tell_json(const bench *b)
{
    json_t *phases = json_object();
    json_t *o = json_object();
    for (uint32_t i = 0; report_phases[i].name != NULL; i++) {
        stats_figure f = figure_part(&b->samples, i, 0, b->samples.count);
        output_set(phases, report_phases[i].name, figure_json(f), NULL);
        if (strcmp(report_phases[i].name, "total") == 0) {
            double rate = (double)b->last.bytes / (double)f.median * 1e9;
            output_set(o, "bytes_per_second", json_real(rate), NULL);
        }
    }
    output_set(
        o, "tensors", output_u64(b->last.tensors), "bytes", output_u64(b->last.bytes),
        "world_size", output_u64(b->all[0].session.target.count), "destination",
        output_string(b->dest != NULL ? b->dest : "memory"), "device",
        output_string(b->trainer.device), "path",
        output_string(fanin_path_name(b->last.path)), "path_reason",
        output_string(b->reason), "reads", output_u64(b->last.reads), "iterations",
        output_u64(b->samples.count), "cold", json_boolean(b->cold), "snapshot",
        json_boolean(b->trainer.snapshot), "pattern_checked",
        json_boolean(b->pattern.follows), "all_checked", json_boolean(b->check_all),
        "workers", json_integer(b->workers), "mappings",
        json_integer(b->mappings != NULL ? b->workers : 0), "phases", phases, "rounds",
        rounds_json(b), "samples", samples_json(b), "limits", limits_json(b), NULL);
    set_about(b, o);
    if (has_commits(b))
        output_set(o, "commit", commits_json(b), NULL);
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
        if (l->problem[0] != '\0')
            continue;
        snprintf(name, sizeof name, "limit: %s", l->name);
        if (l->threads > 0)
            output_append(name, sizeof name, ", %u thread%s", l->threads,
                          l->threads == 1 ? "" : "s");
        add_figure(table, name, l->ns, l->bytes);
    }
}

static void tell_head(const bench *b)
{
    printf("%" PRIu64 " tensors, %s, %u ranks%s%s%s, to %s\n", b->last.tensors,
           output_bytes(b->last.bytes).s, b->all[0].session.target.count,
           b->trainer.device != NULL ? " on devices " : "",
           b->trainer.device != NULL ? b->trainer.device : "",
           b->trainer.snapshot ? ", snapshots" : "",
           b->dest != NULL ? b->dest : "memory");
    if (b->mappings != NULL)
        printf(
            "as recorded mappings say, by %d of the engine's ranks at once; phases are "
            "the slowest one's\n",
            b->workers);
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
        stats_figure f = figure_part(&b->samples, i, 0, b->samples.count);
        bool moves = strcmp(name, "read") == 0 || strcmp(name, "verify") == 0 ||
                     strcmp(name, "total") == 0;
        if (f.most > 0)
            add_figure(table, name, f, moves ? b->last.bytes : 0);
    }
    if (has_commits(b))
        add_figure(table, "commit, medians of ranks", commits_of_all(b), 0);
    add_limits(b, table);
    output_print(table);
    for (size_t i = 0; i < b->limits.count; i++) {
        if (b->limits.items[i].problem[0] != '\0')
            failure_warn("no limit by %s: %s", b->limits.items[i].name,
                         b->limits.items[i].problem);
    }
    printf("peak resident set %s\n", output_bytes(b->peak_bytes).s);
}
