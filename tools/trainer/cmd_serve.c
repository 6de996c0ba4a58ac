/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/command.h"
#include "trainer/device_shards.h"
#include "fetch/failure.h"
#include "fetch/output.h"
#include "fetch/session.h"
#include "trainer/trainer_options.h"
#include "counters.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct serve_options {
    common_options common;
    trainer_options trainer;
    char **runs, *info;
    int update_every, ready_fd, uncoupled, keep_going, wait_commit;
    long long steps, first_step;
} serve_options;

static json_t *ready_json(const rank_options *options, const ranks *r,
                          const char *target)
{
    json_t *list = json_array();
    json_t *runs = json_array();
    for (uint32_t rank = 0; rank < options->world_size; rank++) {
        const rank_slot *slot = ranks_slot(r, rank);
        json_t *one =
            output_object("rank", output_u64(rank), "pid", json_integer(slot->pid),
                          "port", output_u64(slot->port), "address",
                          output_string(ranks_address(r, rank).s), NULL);
        int device = rank_device(options, rank);
        if (device != DEVICE_HOST)
            output_set(one, "device", json_integer(device), NULL);
        json_array_append_new(list, one);
    }
    for (size_t i = 0; i < options->n_runs; i++) {
        char name[OPTIONS_PUBLICATION];
        rank_publication(options, i, name);
        json_array_append_new(runs, json_string(options_run_of(name)));
    }
    return output_object(
        "event", output_string("ready"), "pid", json_integer(getpid()), "target",
        output_string(target), "world_id", output_digits(options->world_id),
        "world_size", output_u64(options->world_size), "step",
        output_u64(options->first_step), "tensors", output_u64(options->tensors->count),
        "bytes", output_u64(options->tensors->bytes), "ranks", list, "runs", runs,
        "schema", json_integer(1), NULL);
}

/* To stdout, or to the descriptor that a script waits at. */
static int tell_ready(const serve_options *o, const rank_options *options,
                      const ranks *r)
{
    FILE *stream = o->ready_fd >= 0 ? fdopen(o->ready_fd, "w") : stdout;
    if (stream == NULL)
        return failure_usage("serve", "--ready-fd %d: %s", o->ready_fd,
                             strerror(errno));
    char *target = ranks_target(r);
    if (o->common.json) {
        json_t *object = ready_json(options, r, target);
        json_dumpf(object, stream, JSON_COMPACT);
        json_decref(object);
        fputc('\n', stream);
    } else {
        fprintf(stream, "ready: pid %d, %u ranks, step %" PRIu64 ", target %s\n",
                (int)getpid(), options->world_size, options->first_step, target);
    }
    free(target);
    if (o->ready_fd < 0)
        return failure_of_output(0);
    bool bad = ferror(stream) != 0;
    if (fclose(stream) != 0 || bad)
        return failure_local("cannot start ranks", FANIN_ERR_IO,
                             "give a descriptor that can be written",
                             "--ready-fd %d: %s", o->ready_fd, strerror(errno));
    return 0;
}

/* Where the ranks have their secret from. Links stay: where secrets are mounted they lead elsewhere
   soon. */
static void tell_secret(json_t *object, const rank_options *options)
{
    char folder[PATH_MAX] = "";
    char *path = NULL;
    const char *file = options->credentials.secret_file;
    if (options->credentials.tls_cert != NULL)
        return; /* instead; readers have certificates of their own */
    file = file != NULL ? file : getenv("FANIN_SECRET_FILE");
    if (file == NULL || file[0] == '\0' ||
        (file[0] != '/' && getcwd(folder, sizeof folder) == NULL))
        return;
    if (asprintf(&path, "%s%s%s", folder, file[0] != '/' ? "/" : "", file) > 0) {
        output_set(object, "secret_file", output_string(path), NULL);
        free(path);
    }
}

static json_t *info_json(const rank_options *options, const ranks *r)
{
    char *end;
    char name[OPTIONS_PUBLICATION];
    rank_publication(options, 0, name);
    const char *run = strchr(name, ':') + 1;
    long long number = strtoll(run, &end, 10);
    bool is_number = run[0] >= '0' && run[0] <= '9' && *end == '\0' &&
                     (run[0] != '0' || run[1] == '\0') && strlen(run) < 18;
    json_t *object =
        output_object("run_idx", is_number ? json_integer(number) : json_string(run),
                      "world_size", output_u64(options->world_size), "world_id",
                      output_digits(options->world_id), NULL);
    json_t *publications = json_array();
    for (size_t i = 0; i < options->n_runs; i++) {
        rank_publication(options, i, name);
        json_array_append_new(publications, json_string(name));
    }
    output_set(object, "publications", publications, NULL);
    if (options->server_name != NULL)
        output_set(object, "server_name", output_string(options->server_name), NULL);
    tell_secret(object, options);
    if (options->base_port != 0) {
        output_set(object, "host", output_string(ranks_host(r)), "base_port",
                   output_u64(options->base_port), NULL);
        return object;
    }
    json_t *hosts = json_array();
    for (uint32_t rank = 0; rank < options->world_size; rank++)
        json_array_append_new(
            hosts,
            json_pack("{s:s, s:i, s:[i]}", "host", ranks_host(r), "base_port",
                      (int)ranks_slot(r, rank)->port - (int)rank, "ranks", (int)rank));
    output_set(object, "hosts", hosts, NULL);
    return object;
}

static int write_info(const char *path, const rank_options *options, const ranks *r)
{
    char temporary[4096];
    snprintf(temporary, sizeof temporary, "%s.%d.tmp", path, (int)getpid());
    json_t *object = info_json(options, r);
    unlink(temporary); /* of a process of this number that was killed */
    FILE *file = fopen(temporary, "wxe");
    bool good = file != NULL && json_dumpf(object, file, JSON_INDENT(2)) == 0 &&
                fputc('\n', file) != EOF;
    if (file != NULL && fclose(file) != 0)
        good = false;
    json_decref(object);
    if (good && rename(temporary, path) == 0)
        return 0;
    int saved = errno;
    if (file != NULL)
        unlink(temporary);
    return failure_local("cannot start ranks", FANIN_ERR_IO,
                         "give --info a writable place", "%s: %s", path,
                         strerror(saved));
}

static json_t *stats_json(uint32_t rank, uint64_t step, const fanin_server_stats *s)
{
    json_t *o = output_object("rank", output_u64(rank), "step", output_u64(step), NULL);
#define ADD_OWN(name, ...) json_object_set_new(o, #name, output_u64(s->name));
#define ADD(key, ...) ADD_OWN(__VA_ARGS__)
    COUNTERS(ADD, ADD_OWN, COUNTER_NOT_SHOWN)
#undef ADD
#undef ADD_OWN
    return o;
}

static void tell_stopped(const serve_options *o, const rank_options *options,
                         const ranks *r)
{
    json_t *list = json_array();
    uint64_t good = 0;
    uint64_t stale = 0;
    uint64_t longest = 0;
    for (uint32_t rank = 0; rank < options->world_size; rank++) {
        const rank_slot *slot = ranks_slot(r, rank);
        const fanin_server_stats *s = &slot->stats;
        if (slot->has_stats) {
            good += s->pulls_good;
            stale += s->pulls_stale;
            longest = s->drain_wait_ns_max > longest ? s->drain_wait_ns_max : longest;
            json_t *one = stats_json(rank, slot->step, s);
            if (options->publishing.timed) {
                uint64_t ns[RANK_COMMITS]; /* how long the last ones took */
                output_set(one, "commit_ns",
                           output_list(ns, ranks_commits(r, rank, ns)), NULL);
            }
            json_array_append_new(list, one);
        }
    }
    if (o->common.json) {
        output_json_line(
            output_object("event", output_string("stopped"), "ranks", list, NULL));
        return;
    }
    json_decref(list);
    if (!o->common.quiet)
        fprintf(stderr,
                "serve: stopped at step %" PRIu64 "; pulls confirmed by ranks %" PRIu64
                ", stale %" PRIu64 "; begin_update waited at most %s\n",
                ranks_slot(r, 0)->step, good, stale, output_duration(longest).s);
}

static int serve_resolve(const command *self, serve_options *o, source *served,
                         rank_options *out)
{
    if (o->steps > 1 && o->update_every < 0)
        return failure_usage(self->name, "--steps needs --update-every");
    if (o->runs != NULL) {
        out->runs = o->runs;
        out->n_runs = 0;
        while (o->runs[out->n_runs] != NULL)
            out->n_runs++;
    }
    int code = trainer_runs_resolve(self, &o->trainer, out);
    if (code != 0)
        return code;
    out->update_every_ms = o->update_every;
    out->steps = (uint64_t)o->steps;
    out->first_step = (uint64_t)o->first_step;
    out->uncoupled = o->uncoupled != 0;
    out->keep_going = o->keep_going != 0;
    out->log = session_log_of(&o->common);
    out->log_cookie = o->common.verbose ? o : NULL;
    out->publishing.timed = o->wait_commit != 0;
    return trainer_options_resolve(self, &o->trainer, NULL, served, out);
}

static int serve_live(const serve_options *o, const rank_options *options)
{
    ranks *r;
    int code = ranks_start(options, &r);
    if (code != 0)
        return code;
    code = ranks_wait_ready(r, o->common.timeout_ms);
    if (code == 0 && o->info != NULL)
        code = write_info(o->info, options, r);
    code = code != 0 ? code : tell_ready(o, options, r);
    bool was_ready = code == 0;
    code = code != 0 ? code : ranks_serve(r);
    int stopped = ranks_stop(r);
    if (was_ready)
        tell_stopped(o, options, r);
    ranks_free(&r);
    return code != 0 ? code : stopped;
}

static serve_options given;
static struct poptOption common_part[COMMON_OPTIONS];
static struct poptOption option_table[] = {
    {NULL, 0, POPT_ARG_INCLUDE_TABLE, given.trainer.source_part, 0,
     "What to serve:", NULL},
    {"run", 0, POPT_ARG_ARGV, &given.runs, 0,
     "the run's name, full:R of a whole model (default 0); repeatable", "R"},
    {"update-every", 0, POPT_ARG_INT, &given.update_every, 0,
     "rewrite in place, then stay MS milliseconds; without it one step stays", "MS"},
    {"steps", 0, POPT_ARG_LONGLONG, &given.steps, 0,
     "stop updating after N steps, but go on serving", "N"},
    {"first-step", 0, POPT_ARG_LONGLONG, &given.first_step, 0, "first step (default 1)",
     "S"},
    {"uncoupled", 0, POPT_ARG_NONE, &given.uncoupled, 0,
     "ranks do not wait for each other between steps", NULL},
    {"keep-going", 0, POPT_ARG_NONE, &given.keep_going, 0,
     "the others go on when a rank dies", NULL},
    {"wait-commit", 0, POPT_ARG_NONE, &given.wait_commit, 0,
     "each commit waits until it has taken effect, and is timed", NULL},
    {"info", 0, POPT_ARG_STRING, &given.info, 0, "write a nixl_info.json", "FILE"},
    {"ready-fd", 0, POPT_ARG_INT, &given.ready_fd, 0,
     "write the ready line to this descriptor", "FD"},
    {NULL, 0, POPT_ARG_INCLUDE_TABLE, given.trainer.publishing_part, 0,
     "How they publish:", NULL},
    {NULL, 0, POPT_ARG_INCLUDE_TABLE, given.trainer.world_part, 0, "The ranks:", NULL},
    {NULL, 0, POPT_ARG_INCLUDE_TABLE, common_part, 0, "Common options:", NULL},
    POPT_TABLEEND,
};

static int serve_run(const command *self, int argc, const char **argv)
{
    arguments parsed;
    char zero[] = "0";
    char *default_runs[] = {zero};
    rank_options options = {.runs = default_runs, .n_runs = 1};
    source served = {0};
    int code;
    given = (serve_options){.common.timeout_ms = 300000,
                            .update_every = -1,
                            .ready_fd = -1,
                            .first_step = 1};
    trainer_options_init(&given.trainer);
    options_common(&given.common, common_part);
    if (options_parse(self, argc, argv, option_table, &given.common, &parsed, &code)) {
        code = parsed.count > 0 ? failure_usage(self->name, "unexpected argument '%s'",
                                                parsed.positional[0])
                                : serve_resolve(self, &given, &served, &options);
        code = code != 0 ? code : serve_live(&given, &options);
        source_close(&served);
    }
    options_free(&parsed);
    return code;
}

static const char help[] =
    "Examples:\n"
    "  nixl-fetch serve --model llama-3.1-8b --r 16 --world-size 8 --base-port 6000\n"
    "  nixl-fetch serve --adapter-shape small --update-every 5 --info nixl_info.json\n"
    "  nixl-fetch serve --adapter ./my-adapter --run 3 --base-port 6000\n"
    "  nixl-fetch serve --model-dir ./my-model --world-size 4 --base-port 6000\n"
    "  nixl-fetch serve --model qwen3-30b-a3b --full --layers 2 --shrink 8\n"
    "  nixl-fetch serve --adapter-shape moe --device 0,1 --snapshot --cast bf16 "
    "--update-every 100\n"
    "\n"
    "Prints one line that begins with \"ready:\" when all ranks have committed their\n"
    "first step. Then serves until SIGINT or SIGTERM, which end all ranks (exit\n"
    "status 0). A rank that dies ends the others, unless --keep-going is given.\n"
    "Bytes follow a pattern of key, step and place that 'pull --check-pattern'\n"
    "proves; those of --adapter and --model-dir are the files' at every step. A\n"
    "whole model is published as full:R, with config.json in its metadata.";

const command cmd_serve = {
    .name = "serve",
    .arguments = "[OPTION...]",
    .summary = "be a trainer: ranks that hold an adapter or a model and update it",
    .help = help,
    .run = serve_run,
};
