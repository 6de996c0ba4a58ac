/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/check.h"
#include "fetch/command.h"
#include "fetch/failure.h"
#include "fetch/interrupt.h"
#include "fetch/missing.h"
#include "fetch/output.h"
#include "fetch/progress.h"
#include "fetch/report.h"
#include "fetch/session.h"
#include "clock.h"

#include <inttypes.h>
#include <stdio.h>

typedef struct pull_options {
    char *out, *dtype, *delta_from;
    const char *directory; /**< --out, or the word behind the run */
    long long step, min_step, max_bytes, max_file_bytes;
    int prove, max_attempts, spare_file, trust_config, verify, progress;
    fanin_dtype half; /**< what dtype says */
    check_pattern pattern;
} pull_options;

/* --check-pattern needs a publication that follows the pattern: asked before the pull. */
static int demand_pattern(session *s, check_pattern *out)
{
    fanin_error error = FANIN_ERROR_INIT;
    if (check_ask(s->client, s->publication, session_left_ms(s), out, &error) !=
        FANIN_OK)
        return session_failure(s, "cannot pull", &error);
    if (!out->follows)
        return failure_local("cannot pull", FANIN_ERR_UNSUPPORTED,
                             "leave out --check-pattern, or use 'nixl-fetch verify'",
                             "%s does not say that its bytes follow the pattern",
                             s->publication);
    return 0;
}

static void tell_delta(const fanin_result_info *info, const char *from)
{
    if (info->whole_because != NULL)
        terminal_print("%-9s nothing of %s was used: %s", "delta", from,
                       info->whole_because);
    else
        terminal_print("%-9s %s of patches since step %" PRIu64
                       ", %.1f %% of the whole",
                       "delta", output_bytes(info->patch_bytes).s, info->base_step,
                       100.0 * (double)info->patch_bytes /
                           (double)(info->bytes > 0 ? info->bytes : 1));
}

static int pull_tell(const session *s, const common_options *common,
                     const pull_options *o, const fanin_result_info *info,
                     uint64_t checked)
{
    if (common->json) {
        json_t *object = report_json(info);
        output_set(object, "publication", output_string(s->publication), "directory",
                   output_string(o->directory), NULL);
        if (o->delta_from != NULL && !info->reused) {
            bool whole = info->whole_because != NULL;
            output_set(object, "base_step",
                       whole ? json_null() : output_u64(info->base_step), "patch_bytes",
                       output_u64(info->patch_bytes), "whole_because",
                       whole ? output_string(info->whole_because) : json_null(), NULL);
        }
        if (o->prove)
            output_set(object, "pattern", output_string("equal"), "pattern_bytes",
                       output_u64(checked), NULL);
        (o->progress ? output_json_line : output_json)(object);
        return 0;
    }
    terminal_print("%-9s %s%s", "directory", o->directory,
                   info->reused
                       ? " (was there already, and is unchanged: nothing was pulled)"
                       : "");
    terminal_print("%-9s %s", "run", s->run);
    report_print(info, o->delta_from != NULL && info->whole_because == NULL);
    if (o->delta_from != NULL && !info->reused)
        tell_delta(info, o->delta_from);
    if (o->prove)
        printf("%-9s all %" PRIu64 " bytes are those of step %" PRIu64 "\n", "pattern",
               checked, info->step);
    return 0;
}

/* What a pull tells while it goes on. */
typedef struct telling {
    progress bar;
    waiting *waiting; /**< until the first read; NULL: quiet */
    bool lines;       /**< --json --progress: a line of JSON every LINE_MS */
    uint64_t line_ns; /**< when the next one is due */
} telling;

enum { LINE_MS = 1000 };

static void print_line(const fanin_pull_progress *p)
{
    json_t *ranks = json_array();
    for (size_t i = 0; i < p->n_ranks; i++) {
        const fanin_rank_progress *r = p->ranks[i];
        json_array_append_new(
            ranks,
            json_pack("{s:o,s:o,s:o,s:o,s:o,s:o}", "rank", output_rank(r->rank),
                      "address", output_string(r->address), "path",
                      output_string(fanin_path_name(r->path)), "bytes_done",
                      output_u64(r->bytes_done), "bytes", output_u64(r->bytes_total),
                      "quiet_ns", output_u64(r->quiet_ms * 1000000)));
    }
    output_json_line(output_object(
        "event", output_string("progress"), "bytes_done", output_u64(p->bytes_done),
        "bytes", output_u64(p->bytes_total), "slowest_rank",
        output_rank(p->slowest != NULL ? p->slowest->rank : -1), "ranks", ranks, NULL));
}

static void pull_on_progress(void *cookie, const fanin_pull_progress *p)
{
    telling *t = cookie;
    waiting_hush(t->waiting);
    if (t->lines && deadline_passed(t->line_ns)) {
        print_line(p);
        t->line_ns = deadline_in_ms(LINE_MS);
    }
    progress_update(&t->bar, p->bytes_done, p->bytes_total, p->slowest);
}

/* Ranks that do not answer have to do with it, or are worth knowing of. They may be about to, where
   the call itself was wrong, or this host. */
static bool is_of_ranks(fanin_status status)
{
    return status == FANIN_OK ||
           (status <= FANIN_ERR_STALE && status >= FANIN_ERR_MISMATCH &&
            status != FANIN_ERR_LIMIT);
}

static int pull_target(session *s, const common_options *common, const pull_options *o)
{
    fanin_error error = FANIN_ERROR_INIT;
    fanin_pull_options options;
    fanin_result_info info = {.struct_size = sizeof info};
    fanin_result *result = NULL;
    telling telling = {.lines = common->json && o->progress != 0};
    uint64_t checked = 0;
    fanin_pull_options_init(&options, sizeof options);
    options.publication = s->publication;
    options.timeout_ms = session_left_ms(s);
    options.max_attempts = (uint32_t)o->max_attempts;
    options.dtype = o->half;
    options.spare_file = o->spare_file != 0;
    options.trust_config = o->trust_config != 0;
    options.max_bytes = (uint64_t)o->max_bytes;
    options.max_file_bytes = (uint64_t)o->max_file_bytes;
    options.verify = o->verify != 0;
    options.delta_from = o->delta_from;
    options.rank_progress = pull_on_progress;
    options.progress_cookie = &telling;
    if (o->step >= 0) {
        options.rule = FANIN_STEP_EXACT;
        options.step = (uint64_t)o->step;
    } else if (o->min_step >= 0) {
        options.rule = FANIN_STEP_AT_LEAST;
        options.step = (uint64_t)o->min_step;
    }
    if (telling.lines)
        interrupt_with_output();
    progress_start(&telling.bar, s->publication, common->quiet != 0,
                   common->no_color != 0);
    telling.waiting = common->quiet ? NULL : waiting_start(s, options.step);
    fanin_status status =
        (options_is_model(s->publication) ? fanin_client_pull_model
                                          : fanin_client_pull_adapter)(
            s->client, &options, o->directory, &result, &error);
    waiting_end(&telling.waiting);
    progress_end(&telling.bar);
    if (is_of_ranks(status))
        missing_warn(s);
    if (status != FANIN_OK)
        return session_failure(s, "cannot pull", &error);
    fanin_result_get(result, &info);
    if (o->prove) {
        /* A second list of all tensors is made: not on top of the catalog and the plan. */
        session_disconnect(s);
        status = check_directory(&o->pattern, o->directory, s->publication, info.step,
                                 &checked, &error);
    }
    int code = status != FANIN_OK ? failure_report("the pattern is broken", &error)
                                  : pull_tell(s, common, o, &info, checked);
    fanin_result_free(&result);
    return code;
}

static int pull_check_usage(const session *s, const invocation *line, pull_options *o)
{
    const command *self = s->command;
    bool model = options_is_model(s->publication);
    const char *alien =
        options_given(&line->parsed, model ? "spare-file" : "max-file-bytes");
    if (!model && o->delta_from != NULL)
        alien = "delta-from";
    if (alien != NULL)
        return failure_usage(self->name, "--%s is for %s, not for %s", alien,
                             model ? "adapters" : "models (full:R)", s->publication);
    if (o->out != NULL && line->words[0] != NULL)
        return failure_usage(self->name, "--out and '%s' are two directories",
                             line->words[0]);
    const char *out = o->out != NULL ? o->out : line->words[0];
    o->directory = out;
    if (o->dtype != NULL && (o->half = options_half(o->dtype)) == 0)
        return failure_usage(self->name, "--dtype is bf16 or f16, not '%s'", o->dtype);
    if (o->progress && !line->common.json)
        return failure_usage(self->name,
                             "--progress is for --json; without it progress "
                             "goes to standard error by itself");
    if (out == NULL)
        return failure_usage(self->name, "--out DIR is needed");
    if (o->step >= 0 && o->min_step >= 0)
        return failure_usage(self->name, "--step and --min-step exclude each other");
    return 0;
}

static int pull_to_directory(session *s, const invocation *line, void *cookie)
{
    pull_options *o = cookie;
    int code = session_need_run(s);
    code = code != 0 ? code : pull_check_usage(s, line, o);
    session_be_patient(s, line);
    code = code != 0 ? code : session_reach(s);
    if (code == 0 && o->prove)
        code = demand_pattern(s, &o->pattern);
    return code != 0 ? code : pull_target(s, &line->common, o);
}

static int pull_command(const command *self, int argc, const char **argv)
{
    invocation line = {.common.timeout_ms = 60000};
    pull_options o = {.step = -1, .min_step = -1};
    struct poptOption table[] = {
        {"out", 'o', POPT_ARG_STRING, &o.out, 0,
         "directory to be made; must not exist or be empty", "DIR"},
        {"step", 's', POPT_ARG_LONGLONG, &o.step, 0, "exactly this step; waits for it",
         "N"},
        {"min-step", 0, POPT_ARG_LONGLONG, &o.min_step, 0, "this step or a later one",
         "N"},
        {"check-pattern", 0, POPT_ARG_NONE, &o.prove, 0,
         "prove every byte of the file (ranks of 'nixl-fetch serve')", NULL},
        {"dtype", 0, POPT_ARG_STRING, &o.dtype, 0,
         "write F32 tensors as bf16 or f16 (default: as published)", "DTYPE"},
        {"spare-file", 0, POPT_ARG_NONE, &o.spare_file, 0,
         "keep a file of that size ready for the next pull of this process", NULL},
        {"trust-config", 0, POPT_ARG_NONE, &o.trust_config, 0,
         "keep all fields of the trainer's configuration, also those that can load "
         "code",
         NULL},
        {"max-bytes", 0, POPT_ARG_LONGLONG, &o.max_bytes, 0,
         "refuse more bytes (default: of an adapter a quarter of DIR's file system)",
         "N"},
        {"max-file-bytes", 0, POPT_ARG_LONGLONG, &o.max_file_bytes, 0,
         "bytes of tensors in one file of a model (default 5000000000)", "N"},
        {"verify", 0, POPT_ARG_NONE, &o.verify, 0,
         "compare with digests that the ranks make under their leases", NULL},
        {"delta-from", 0, POPT_ARG_STRING, &o.delta_from, 0,
         "read what has changed since a pull of a model into OLD, which may be DIR: it "
         "is "
         "then replaced",
         "OLD"},
        {"progress", 0, POPT_ARG_NONE, &o.progress, 0,
         "with --json: before the result, a line a second of what each rank has "
         "brought",
         NULL},
        {"max-attempts", 0, POPT_ARG_INT, &o.max_attempts, 0,
         "give up after so many stale attempts (default: by time only)", "N"},
        SESSION_TABLE(&line),
        POPT_TABLEEND,
    };
    return session_run(self, argc, argv, &line, table, 0, pull_to_directory, &o);
}

static const char help[] =
    "Examples:\n"
    "  nixl-fetch pull 127.0.0.1:6000 --world-size 8 --run 0 --out /dev/shm/me/step\n"
    "  nixl-fetch pull nixl_info.json --min-step 100 --timeout 2m --out adapter-100\n"
    "  nixl-fetch pull nixl_info.json full:0 /data/me/model-100 --step 100\n"
    "  nixl-fetch pull nixl_info.json full:0 /data/me/model --delta-from "
    "/data/me/model\n"
    "\n"
    "Makes DIR with adapter_model.safetensors, adapter_config.json and fanin.json,\n"
    "whole or not at all, of the newest step that all ranks have committed; of a\n"
    "whole model (full:R) with model.safetensors, or several files and their index,\n"
    "and config.json. A directory that holds this very identity is left as it is; of\n"
    "a step whose ranks were started again since it is pulled again. Any other\n"
    "content is refused. Ctrl-C leaves nothing behind (exit status 130).";

const command cmd_pull = {
    .name = "pull",
    .arguments = "TARGET [RUN] [DIR] [OPTION...]",
    .summary = "pull a run as the directory of a PEFT adapter or of a model",
    .help = help,
    .takes_directory = true,
    .run = pull_command,
};
