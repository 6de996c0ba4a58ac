/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/command.h"
#include "trainer/device_options.h"
#include "trainer/device_driver.h"
#include "fetch/failure.h"
#include "fetch/output.h"
#include "trainer/source.h"
#include "trainer/world.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct serve_options {
    common_options common;
    source_options source;
    world_options world;
    device_options device;
    char **runs, *info;
    int update_every, ready_fd, uncoupled, keep_going, wait_commit;
    long long steps, first_step;
} serve_options;

static const char *host_of(const rank_options *options)
{
    return options->bind != NULL ? options->bind : "127.0.0.1";
}

static output_text address_of(const rank_options *options, const ranks *r,
                              uint32_t rank)
{
    output_text text;
    const char *host = host_of(options);
    snprintf(text.s, sizeof(text.s),
             strchr(host, ':') != NULL ? "[%.180s]:%u" : "%.180s:%u", host,
             ranks_port(r, rank));
    return text;
}

static char *target_of(const rank_options *options, const ranks *r)
{
    char *text = NULL;
    size_t size = 0;
    FILE *stream = open_memstream(&text, &size);
    for (uint32_t rank = 0; stream != NULL && rank < options->world_size; rank++) {
        fprintf(stream, "%s%s", rank > 0 ? "," : "", address_of(options, r, rank).s);
    }
    if (stream == NULL || fclose(stream) != 0) {
        free(text);
        return NULL;
    }
    return text;
}

static json_t *ready_json(const rank_options *options, const ranks *r,
                          const char *target)
{
    json_t *object = json_pack("{s:s, s:i, s:s}", "event", "ready", "pid",
                               (int)getpid(), "target", target);
    json_t *list = json_array();
    json_t *runs = json_array();
    output_set_hex(object, "world_id", options->world_id, sizeof(options->world_id));
    output_set_u64(object, "world_size", options->world_size);
    output_set_u64(object, "step", options->first_step);
    output_set_u64(object, "tensors", options->tensors->count);
    output_set_u64(object, "bytes", options->tensors->bytes);
    for (uint32_t rank = 0; rank < options->world_size; rank++) {
        json_t *one =
            json_pack("{s:i, s:i, s:i, s:s}", "rank", (int)rank, "pid",
                      (int)ranks_pid(r, rank), "port", (int)ranks_port(r, rank),
                      "address", address_of(options, r, rank).s);
        int device = rank_device(options, rank);
        if (device != DEVICE_HOST) {
            json_object_set_new(one, "device", json_integer(device));
        }
        json_array_append_new(list, one);
    }
    for (size_t i = 0; i < options->n_runs; i++) {
        json_array_append_new(runs, json_string(options->runs[i]));
    }
    json_object_set_new(object, "ranks", list);
    json_object_set_new(object, "runs", runs);
    return object;
}

/* To stdout, or to the descriptor that a script waits at. */
static int tell_ready(const serve_options *o, const rank_options *options,
                      const ranks *r)
{
    char *target = target_of(options, r);
    if (target == NULL) {
        return failure_local("cannot start ranks", FANIN_ERR_MEMORY, "free memory",
                             "no memory for the addresses");
    }
    FILE *stream = stdout;
    if (o->ready_fd >= 0) {
        stream = fdopen(o->ready_fd, "w");
        if (stream == NULL) {
            free(target);
            return failure_usage("serve", "--ready-fd %d: %s", o->ready_fd,
                                 strerror(errno));
        }
    }
    if (o->common.json) {
        json_t *object = ready_json(options, r, target);
        json_object_set_new(object, "schema", json_integer(1));
        json_dumpf(object, stream, JSON_COMPACT);
        json_decref(object);
        fputc('\n', stream);
    } else {
        fprintf(stream, "ready: pid %d, %u ranks, step %llu, target %s\n",
                (int)getpid(), options->world_size,
                (unsigned long long)options->first_step, target);
    }
    free(target);
    if (o->ready_fd < 0) {
        return failure_of_output(0);
    }
    bool bad = ferror(stream) != 0;
    if (fclose(stream) != 0 || bad) {
        return failure_local("cannot start ranks", FANIN_ERR_IO,
                             "give a descriptor that can be written",
                             "--ready-fd %d: %s", o->ready_fd, strerror(errno));
    }
    return 0;
}

static json_t *info_json(const rank_options *options, const ranks *r)
{
    char *end;
    const char *run = options->runs[0];
    long long number = strtoll(run, &end, 10);
    bool is_number = run[0] >= '0' && run[0] <= '9' && *end == '\0' &&
                     (run[0] != '0' || run[1] == '\0') && strlen(run) < 18;
    json_t *object = json_object();
    json_object_set_new(object, "run_idx",
                        is_number ? json_integer(number) : json_string(run));
    json_object_set_new(object, "world_size", json_integer(options->world_size));
    output_set_hex(object, "world_id", options->world_id, sizeof(options->world_id));
    if (options->server_name != NULL) {
        output_set_string(object, "server_name", options->server_name);
    }
    if (options->base_port != 0) {
        output_set_string(object, "host", host_of(options));
        json_object_set_new(object, "base_port", json_integer(options->base_port));
        return object;
    }
    json_t *hosts = json_array();
    for (uint32_t rank = 0; rank < options->world_size; rank++) {
        json_array_append_new(
            hosts, json_pack("{s:s, s:i, s:[i]}", "host", host_of(options), "base_port",
                             (int)ranks_port(r, rank) - (int)rank, "ranks", (int)rank));
    }
    json_object_set_new(object, "hosts", hosts);
    return object;
}

static int write_info(const char *path, const rank_options *options, const ranks *r)
{
    char temporary[4096];
    snprintf(temporary, sizeof(temporary), "%s.%d.tmp", path, (int)getpid());
    json_t *object = info_json(options, r);
    unlink(temporary); /* of a process of this number that was killed */
    FILE *file = fopen(temporary, "wxe");
    bool good = file != NULL && json_dumpf(object, file, JSON_INDENT(2)) == 0 &&
                fputc('\n', file) != EOF;
    if (file != NULL && fclose(file) != 0) {
        good = false;
    }
    json_decref(object);
    if (good && rename(temporary, path) == 0) {
        return 0;
    }
    int saved = errno;
    if (file != NULL) {
        unlink(temporary);
    }
    return failure_local("cannot start ranks", FANIN_ERR_IO,
                         "give --info a writable place", "%s: %s", path,
                         strerror(saved));
}

static json_t *stats_json(uint32_t rank, uint64_t step, const fanin_server_stats *s)
{
    json_t *o = json_pack("{s:i}", "rank", (int)rank);
    output_set_u64(o, "step", step);
    output_set_u64(o, "pulls_good", s->pulls_good);
    output_set_u64(o, "pulls_stale", s->pulls_stale);
    output_set_u64(o, "pulls_abandoned", s->pulls_abandoned);
    output_set_u64(o, "begins_granted", s->begins_granted);
    output_set_u64(o, "begins_refused", s->begins_refused);
    output_set_u64(o, "bytes_streamed", s->bytes_streamed);
    output_set_u64(o, "reads_streamed", s->reads_streamed);
    output_set_u64(o, "reads_refused", s->reads_refused);
    output_set_u64(o, "updates", s->updates);
    output_set_u64(o, "commits", s->commits);
    output_set_u64(o, "commits_withdrawn", s->commits_withdrawn);
    output_set_u64(o, "drain_wait_ns_total", s->drain_wait_ns_total);
    output_set_u64(o, "drain_wait_ns_max", s->drain_wait_ns_max);
    output_set_u64(o, "drains_expired", s->drains_expired);
    output_set_u64(o, "sessions_opened", s->sessions_opened);
    output_set_u64(o, "sessions_refused", s->sessions_refused);
    output_set_u64(o, "protocol_errors", s->protocol_errors);
    output_set_u64(o, "sessions", s->sessions);
    output_set_u64(o, "leases", s->leases);
    output_set_u64(o, "session_memory", s->session_memory);
    return o;
}

/* How long the last timed commits took. */
static json_t *commits_json(const ranks *r, uint32_t rank)
{
    uint64_t ns[RANK_COMMITS];
    uint32_t count = ranks_commits(r, rank, ns);
    json_t *list = json_array();
    for (uint32_t i = 0; i < count; i++) {
        json_array_append_new(list, json_integer((json_int_t)ns[i]));
    }
    return list;
}

static void tell_stopped(const serve_options *o, const rank_options *options,
                         const ranks *r)
{
    json_t *list = json_array();
    uint64_t good = 0;
    uint64_t stale = 0;
    uint64_t longest = 0;
    for (uint32_t rank = 0; rank < options->world_size; rank++) {
        const fanin_server_stats *s = ranks_stats(r, rank);
        if (s != NULL) {
            good += s->pulls_good;
            stale += s->pulls_stale;
            longest = s->drain_wait_ns_max > longest ? s->drain_wait_ns_max : longest;
            json_t *one = stats_json(rank, ranks_step(r, rank), s);
            if (options->publishing.timed) {
                json_object_set_new(one, "commit_ns", commits_json(r, rank));
            }
            json_array_append_new(list, one);
        }
    }
    if (o->common.json) {
        output_json_line(json_pack("{s:s, s:o}", "event", "stopped", "ranks", list));
        return;
    }
    json_decref(list);
    if (!o->common.quiet) {
        fprintf(
            stderr,
            "serve: stopped at step %llu; pulls confirmed by ranks %llu, stale %llu; "
            "begin_update waited at most %s\n",
            (unsigned long long)ranks_step(r, 0), (unsigned long long)good,
            (unsigned long long)stale, output_duration(longest).s);
    }
}

static int resolve(const command *self, serve_options *o, rank_options *out)
{
    if (o->steps > 1 && o->update_every < 0) {
        return failure_usage(self->name, "--steps needs --update-every");
    }
    if (o->runs != NULL) {
        out->runs = o->runs;
        out->n_runs = 0;
        while (o->runs[out->n_runs] != NULL) {
            out->n_runs++;
        }
    }
    for (size_t i = 0; i < out->n_runs; i++) {
        if (!options_run_valid(out->runs[i])) {
            return failure_usage(self->name,
                                 "run '%s' is not 1 to 64 of A-Z a-z 0-9 . _ -",
                                 out->runs[i]);
        }
        for (size_t j = 0; j < i; j++) {
            if (strcmp(out->runs[i], out->runs[j]) == 0) {
                return failure_usage(self->name, "run '%s' is given twice",
                                     out->runs[i]);
            }
        }
    }
    out->update_every_ms = o->update_every;
    out->steps = (uint64_t)o->steps;
    out->first_step = (uint64_t)o->first_step;
    out->uncoupled = o->uncoupled != 0;
    out->keep_going = o->keep_going != 0;
    out->verbose = o->common.verbose != 0;
    out->publishing.timed = o->wait_commit != 0;
    int code = world_resolve(self, &o->world, out);
    return code != 0 ? code : device_resolve(self, &o->device, out);
}

static int live(const serve_options *o, const rank_options *options)
{
    ranks *r;
    int code = ranks_start(options, &r);
    if (code != 0) {
        return code;
    }
    code = ranks_wait_ready(r, o->common.timeout_ms);
    if (code == 0 && o->info != NULL) {
        code = write_info(o->info, options, r);
    }
    if (code == 0) {
        code = tell_ready(o, options, r);
    }
    bool was_ready = code == 0;
    if (code == 0) {
        code = ranks_serve(r);
    }
    int stopped = ranks_stop(r);
    if (was_ready) {
        tell_stopped(o, options, r);
    }
    ranks_free(&r);
    return code != 0 ? code : stopped;
}

static int run(const command *self, int argc, const char **argv)
{
    serve_options o = {.common.timeout_ms = 300000,
                       .update_every = -1,
                       .ready_fd = -1,
                       .first_step = 1};
    struct poptOption common[COMMON_OPTIONS], source_part[SOURCE_OPTIONS],
        world_part[WORLD_OPTIONS], device_part[DEVICE_OPTIONS];
    struct poptOption table[] = {
        {NULL, 0, POPT_ARG_INCLUDE_TABLE, source_part, 0, "What to serve:", NULL},
        {"run", 0, POPT_ARG_ARGV, &o.runs, 0, "the run's name (default 0); repeatable",
         "R"},
        {"update-every", 0, POPT_ARG_INT, &o.update_every, 0,
         "rewrite in place, then stay MS milliseconds; without it one step stays",
         "MS"},
        {"steps", 0, POPT_ARG_LONGLONG, &o.steps, 0,
         "stop updating after N steps, but go on serving", "N"},
        {"first-step", 0, POPT_ARG_LONGLONG, &o.first_step, 0, "first step (default 1)",
         "S"},
        {"uncoupled", 0, POPT_ARG_NONE, &o.uncoupled, 0,
         "ranks do not wait for each other between steps", NULL},
        {"keep-going", 0, POPT_ARG_NONE, &o.keep_going, 0,
         "the others go on when a rank dies", NULL},
        {"wait-commit", 0, POPT_ARG_NONE, &o.wait_commit, 0,
         "each commit waits until it has taken effect, and is timed", NULL},
        {"info", 0, POPT_ARG_STRING, &o.info, 0, "write a nixl_info.json", "FILE"},
        {"ready-fd", 0, POPT_ARG_INT, &o.ready_fd, 0,
         "write the ready line to this descriptor", "FD"},
        {NULL, 0, POPT_ARG_INCLUDE_TABLE, device_part, 0, "How they publish:", NULL},
        {NULL, 0, POPT_ARG_INCLUDE_TABLE, world_part, 0, "The ranks:", NULL},
        {NULL, 0, POPT_ARG_INCLUDE_TABLE, common, 0, "Common options:", NULL},
        POPT_TABLEEND,
    };
    arguments parsed;
    char zero[] = "0";
    char *default_runs[] = {zero};
    rank_options options = {.runs = default_runs, .n_runs = 1};
    source served = {0};
    int code;
    world_init(&o.world);
    source_table(&o.source, true, source_part);
    world_table(&o.world, true, world_part);
    device_table(&o.device, device_part);
    options_common(&o.common, common);
    if (options_parse(self, argc, argv, table, &o.common, &parsed, &code)) {
        code = parsed.count > 0 ? failure_usage(self->name, "unexpected argument '%s'",
                                                parsed.positional[0])
                                : resolve(self, &o, &options);
        if (code == 0) {
            o.source.masters = options.publishing.cast != 0;
            code = source_open(self, &o.source, NULL, &served);
        }
        if (code == 0) {
            options.tensors = &served.tensors;
            options.pairs = served.pairs;
            options.n_pairs = served.n_pairs;
            code = live(&o, &options);
        }
        source_close(&served);
    }
    options_free(&parsed);
    return code;
}

const command cmd_serve = {
    .name = "serve",
    .arguments = "[OPTION...]",
    .summary = "be a trainer: rank processes that hold an adapter and update it",
    .help =
        "Examples:\n"
        "  nixl-fetch serve --model llama-3.1-8b --r 16 --world-size 8 --base-port "
        "6000\n"
        "  nixl-fetch serve --adapter-shape small --update-every 5 --info "
        "nixl_info.json\n"
        "  nixl-fetch serve --adapter ./my-adapter --run 3 --base-port 6000\n"
        "  nixl-fetch serve --adapter-shape moe --device 0,1 --snapshot --cast bf16 "
        "--update-every 100\n"
        "\n"
        "Prints one line that begins with \"ready:\" when all ranks have committed "
        "their\n"
        "first step, then serves until SIGINT or SIGTERM, which end all ranks (exit\n"
        "status 0). A rank that dies ends the others, unless --keep-going is given.\n"
        "Bytes follow a pattern of key, step and place that 'pull --check-pattern' "
        "proves;\n"
        "those of --adapter are the file's at every step.",
    .run = run,
};
