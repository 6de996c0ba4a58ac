/* SPDX-License-Identifier: Apache-2.0 */
#include "bench.h"
#include "check.h"
#include "command.h"
#include "failure.h"
#include "interrupt.h"
#include "output.h"
#include "progress.h"
#include "report.h"
#include "session.h"
#include "source.h"
#include "world.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct bench {
    const command *self;
    invocation line;
    source_options source_options;
    world_options world;
    char *dest;
    int iterations, cold;

    rank_options rank_options;
    source source;
    ranks *ranks; /**< NULL: ranks that run already */
    char *target; /**< theirs, or of our own ranks */
    session session;
    arena arena;
    bool follows_pattern, have_limits;
    bench_samples samples;
    bench_limit limits[3];
    fanin_result_info last;
    char reason[256];
    uint64_t peak_bytes, serial;
} bench;

static bool to_memory(const bench *b)
{
    return b->dest == NULL || strcmp(b->dest, "memory") == 0;
}

/* Removes an adapter directory that this bench made. */
static void remove_directory(const char *path)
{
    DIR *directory = opendir(path);
    if (directory == NULL) {
        return;
    }
    for (const struct dirent *e; (e = readdir(directory)) != NULL;) {
        if (e->d_name[0] != '.') {
            unlinkat(dirfd(directory), e->d_name, 0);
        }
    }
    closedir(directory);
    rmdir(path);
}

/* One pull; @p info is filled but for its strings. */
static fanin_status pull_once(bench *b, bool check, fanin_result_info *info,
                              fanin_error *error)
{
    fanin_result *result = NULL;
    fanin_pull_options options;
    char path[4096];
    fanin_status status;
    fanin_pull_options_init(&options, sizeof(options));
    options.publication = b->session.publication;
    options.timeout_ms = b->line.common.timeout_ms;
    *info = (fanin_result_info){.struct_size = sizeof(*info)};
    snprintf(path, sizeof(path), "%s/fanin-bench-%d-%llu", to_memory(b) ? "" : b->dest,
             (int)getpid(), (unsigned long long)b->serial++);
    if (to_memory(b)) {
        status = fanin_client_pull(b->session.client, &options, b->arena.tensors,
                                   b->arena.count, &result, error);
    } else {
        status = fanin_client_pull_adapter(b->session.client, &options, path, &result,
                                           error);
    }
    if (status == FANIN_OK) {
        fanin_result_get(result, info);
        snprintf(b->reason, sizeof(b->reason), "%s",
                 info->path_reason != NULL ? info->path_reason : "");
        info->path_reason = info->ranks_json = NULL;
    }
    for (size_t i = 0;
         status == FANIN_OK && check && to_memory(b) && i < b->arena.count; i++) {
        const fanin_tensor *t = &b->arena.tensors[i];
        uint64_t bytes = fanin_dtype_bits(t->dtype);
        for (uint32_t d = 0; d < t->n_dims; d++) {
            bytes *= t->shape[d];
        }
        status = check_memory(b->session.publication, t->name, info->step,
                              t->boxes[0].address, bytes / 8, error);
    }
    if (!to_memory(b)) {
        uint64_t checked;
        if (status == FANIN_OK && check) {
            status = check_directory(path, b->session.publication, info->step, &checked,
                                     error);
        }
        remove_directory(path);
    }
    fanin_result_free(&result);
    return status;
}

/* A client that knows nothing yet: what connecting costs belongs to the pull. */
static int pull_cold(bench *b, fanin_result_info *info)
{
    fanin_error error = FANIN_ERROR_INIT;
    session_close(&b->session);
    uint64_t start = progress_now_ns();
    int code = session_open(&b->session, b->self, &b->line, b->target, b->line.run);
    if (code == 0) {
        code = session_connect(&b->session, b->line.common.timeout_ms);
    }
    uint64_t connected = progress_now_ns() - start;
    if (code == 0 && pull_once(b, false, info, &error) != FANIN_OK) {
        code = failure_report("cannot pull", &error);
    }
    info->connect_ns += connected;
    info->total_ns += connected;
    info->fixed_ns += connected;
    return code;
}

static int measure(bench *b)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_result_info info;
    if (pull_once(b, b->follows_pattern, &info, &error) != FANIN_OK) {
        return failure_report("cannot pull", &error); /* the warm-up proves the bytes */
    }
    for (int i = 0; i < b->iterations; i++) {
        if (b->cold) {
            int code = pull_cold(b, &info);
            if (code != 0) {
                return code;
            }
        } else if (pull_once(b, false, &info, &error) != FANIN_OK) {
            return failure_report("cannot pull", &error);
        }
        bench_samples_add(&b->samples, &info);
        b->last = info;
        if (interrupt_requested()) {
            return EXIT_INTERRUPTED;
        }
    }
    b->peak_bytes = report_peak_bytes();
    return 0;
}

static void measure_limits(bench *b)
{
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    if (b->ranks != NULL) {
        b->limits[0] = bench_raw_read(&b->rank_options, b->ranks, &b->arena, 1);
        b->limits[1] = bench_raw_read(&b->rank_options, b->ranks, &b->arena,
                                      processors > 1 ? (uint32_t)processors : 1);
    }
    b->limits[2] = bench_memcpy(&b->arena);
    b->have_limits = true;
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
    for (size_t i = 0; i < 3; i++) {
        const bench_limit *l = &b->limits[i];
        if (l->name == NULL) {
            continue;
        }
        json_t *o = l->problem == NULL ? figure_json(l->ns) : json_object();
        output_set_string(o, "name", l->name);
        output_set_u64(o, "threads", l->threads);
        output_set_u64(o, "bytes", l->bytes);
        output_set_u64(o, "pieces", l->pieces);
        output_set_string(o, "problem", l->problem);
        json_array_append_new(list, o);
    }
    return list;
}

static void tell_json(const bench *b)
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
    output_set_string(o, "destination", to_memory(b) ? "memory" : b->dest);
    output_set_string(o, "path", fanin_path_name(b->last.path));
    output_set_string(o, "path_reason", b->reason);
    output_set_u64(o, "reads", b->last.reads);
    output_set_u64(o, "iterations", b->samples.count);
    json_object_set_new(o, "cold", json_boolean(b->cold));
    json_object_set_new(o, "pattern_checked", json_boolean(b->follows_pattern));
    json_object_set_new(o, "phases", phases);
    json_object_set_new(o, "limits", limits_json(b));
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

static void tell_text(const bench *b)
{
    static const output_column columns[] = {{"PHASE", false, false},
                                            {"MEDIAN", true, false},
                                            {"MIN", true, false},
                                            {"MAX", true, false},
                                            {"RATE", true, false}};
    struct libscols_table *table = output_table(columns, 5);
    printf("%llu tensors, %s, %u ranks, to %s\n", (unsigned long long)b->last.tensors,
           output_bytes(b->last.bytes).s, b->session.target.count,
           to_memory(b) ? "memory" : b->dest);
    printf("path %s%s%s, %llu reads a pull\n", fanin_path_name(b->last.path),
           b->reason[0] != '\0' ? ": " : "", b->reason,
           (unsigned long long)b->last.reads);
    printf("%u pulls, %s; %s\n", b->samples.count,
           b->cold ? "each by a new client" : "warm",
           b->follows_pattern ? "every byte of the first one proven"
                              : "bytes not proven: the ranks follow no pattern");
    for (uint32_t i = 0; report_phases[i].name != NULL; i++) {
        const char *name = report_phases[i].name;
        bench_figure f = bench_figure_of(&b->samples, i);
        bool moves = strcmp(name, "read") == 0 || strcmp(name, "total") == 0;
        if (f.most > 0) {
            add_figure(table, name, f, moves ? b->last.bytes : 0);
        }
    }
    for (size_t i = 0; b->have_limits && i < 3; i++) {
        const bench_limit *l = &b->limits[i];
        char name[96];
        if (l->name == NULL || l->problem != NULL) {
            continue;
        }
        snprintf(name, sizeof(name), "limit: %s, %u thread%s", l->name, l->threads,
                 l->threads == 1 ? "" : "s");
        add_figure(table, name, l->ns, l->bytes);
    }
    output_print(table);
    for (size_t i = 0; b->have_limits && i < 3; i++) {
        if (b->limits[i].problem != NULL) {
            failure_warn("no limit by %s: %s", b->limits[i].name, b->limits[i].problem);
        }
    }
    printf("peak resident set %s\n", output_bytes(b->peak_bytes).s);
}

/* The ranks' addresses, as a target. */
static int own_target(bench *b)
{
    size_t size = 0;
    const char *host =
        b->rank_options.bind != NULL ? b->rank_options.bind : "127.0.0.1";
    bool v6 = strchr(host, ':') != NULL;
    FILE *stream = open_memstream(&b->target, &size);
    for (uint32_t r = 0; stream != NULL && r < b->rank_options.world_size; r++) {
        fprintf(stream, "%s%s%s%s:%u", r > 0 ? "," : "", v6 ? "[" : "", host,
                v6 ? "]" : "", ranks_port(b->ranks, r));
    }
    if (stream == NULL || fclose(stream) != 0) {
        return failure_local("cannot start ranks", FANIN_ERR_MEMORY, "free memory",
                             "no memory for the addresses");
    }
    b->line.connect.world_size = 0; /* the list says it */
    return 0;
}

static int start_ranks(bench *b)
{
    static char zero[] = "0";
    static char *runs[] = {zero};
    int code = source_open(b->self, &b->source_options, "small", &b->source);
    if (code != 0) {
        return code;
    }
    if (b->line.connect.world_size != 0) {
        b->world.world_size = b->line.connect.world_size;
    }
    b->world.no_ucx = b->line.connect.no_ucx;
    code = world_resolve(b->self, &b->world, &b->rank_options);
    if (code != 0) {
        return code;
    }
    if (b->line.run != NULL && !options_run_valid(b->line.run)) {
        return failure_usage(b->self->name, "'%s' is no run's name", b->line.run);
    }
    rank_options *o = &b->rank_options;
    if (o->server_name == NULL) {
        o->server_name = b->line.connect.server_name;
    }
    o->runs = b->line.run != NULL ? &b->line.run : runs;
    o->n_runs = 1;
    o->tensors = &b->source.tensors;
    o->pairs = b->source.pairs;
    o->n_pairs = b->source.n_pairs;
    o->first_step = 1;
    o->update_every_ms = -1;
    o->extents = true;
    o->verbose = b->line.common.verbose != 0;
    code = ranks_start(o, &b->ranks);
    if (code == 0) {
        code = ranks_wait_ready(b->ranks, 300000);
    }
    return code != 0 ? code : own_target(b);
}

static int bench_all(bench *b)
{
    fanin_error error = FANIN_ERROR_INIT;
    uint32_t timeout_ms = b->line.common.timeout_ms;
    if (!bench_samples_init(&b->samples, (uint32_t)b->iterations)) {
        return failure_local("cannot measure", FANIN_ERR_MEMORY, "fewer --iterations",
                             "no memory for the samples");
    }
    int code = session_open(&b->session, b->self, &b->line, b->target, b->line.run);
    if (code == 0) {
        code = session_connect(&b->session, timeout_ms);
    }
    if (code != 0) {
        return code;
    }
    session *s = &b->session;
    fanin_status status = FANIN_OK;
    if (to_memory(b)) {
        status = arena_make(s->client, s->publication, timeout_ms, &b->arena, &error);
    }
    if (status == FANIN_OK) {
        status = check_follows_pattern(s->client, s->publication, timeout_ms,
                                       &b->follows_pattern, &error);
    }
    if (status != FANIN_OK) {
        return failure_report("cannot pull", &error);
    }
    code = measure(b);
    if (code == 0) {
        if (to_memory(b)) {
            measure_limits(b);
        }
        if (b->line.common.json) {
            tell_json(b);
        } else {
            tell_text(b);
        }
    }
    return code;
}

static int check_usage(bench *b)
{
    if (b->iterations < 1 || b->iterations > BENCH_MAX_ITERATIONS) {
        return failure_usage(b->self->name, "--iterations is 1 to %d",
                             BENCH_MAX_ITERATIONS);
    }
    if (b->line.parsed.count > 1) {
        return failure_usage(b->self->name, "unexpected argument '%s'",
                             b->line.parsed.positional[1]);
    }
    if (b->line.parsed.count == 0) {
        return 0;
    }
    if (source_given(&b->source_options)) {
        return failure_usage(b->self->name, "TARGET and --model exclude each other");
    }
    b->target = strdup(b->line.parsed.positional[0]);
    return b->target != NULL ? 0
                             : failure_local("cannot start", FANIN_ERR_MEMORY,
                                             "free memory", "no memory");
}

static void close_all(bench *b)
{
    session_close(&b->session);
    ranks_free(&b->ranks);
    source_close(&b->source);
    arena_free(&b->arena);
    bench_samples_free(&b->samples);
    free(b->target);
}

static int run(const command *self, int argc, const char **argv)
{
    bench b = {.self = self, .line.common.timeout_ms = 60000, .iterations = 10};
    struct poptOption source_part[SOURCE_OPTIONS], world_part[WORLD_OPTIONS];
    struct poptOption table[] = {
        {"dest", 'd', POPT_ARG_STRING, &b.dest, 0,
         "memory (default), or a directory to make adapters in", "memory|DIR"},
        {"iterations", 'i', POPT_ARG_INT, &b.iterations, 0, "pulls (default 10)", "N"},
        {"cold", 0, POPT_ARG_NONE, &b.cold, 0,
         "a new client for each pull: connection, catalog and plan anew", NULL},
        {NULL, 0, POPT_ARG_INCLUDE_TABLE, source_part, 0,
         "What own ranks serve:", NULL},
        {NULL, 0, POPT_ARG_INCLUDE_TABLE, world_part, 0, "Own ranks:", NULL},
        SESSION_TABLE(&b.line),
        POPT_TABLEEND,
    };
    int code;
    world_init(&b.world);
    source_table(&b.source_options, true, source_part);
    world_table(&b.world, false, world_part);
    if (session_parse(self, &b.line, argc, argv, table, &code)) {
        code = check_usage(&b);
        if (code == 0 && b.target == NULL) {
            code = start_ranks(&b);
        }
        if (code == 0) {
            code = bench_all(&b);
        }
        close_all(&b);
    }
    session_end(&b.line);
    return code;
}

const command cmd_bench = {
    .name = "bench",
    .arguments = "[TARGET] [OPTION...]",
    .summary = "measure pulls by phase, beside what the machine can do",
    .help = "Examples:\n"
            "  nixl-fetch bench --adapter-shape dense --world-size 8 --path stream\n"
            "  nixl-fetch bench --model qwen3-30b-a3b --r 16 --dest /dev/shm "
            "--iterations 5\n"
            "  nixl-fetch bench 10.0.0.1:6000 --world-size 8 --run 0 --json\n"
            "\n"
            "Without TARGET it starts ranks of its own. Figures are medians; 'fixed' "
            "is the\n"
            "pull's time less that from the first read posted to the last byte in "
            "place. The\n"
            "limits are raw process_vm_readv of the same shards in pieces of 1 MiB "
            "into the\n"
            "same memory, and memcpy.",
    .run = run,
};
