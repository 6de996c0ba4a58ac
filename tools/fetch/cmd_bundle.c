/* SPDX-License-Identifier: Apache-2.0 */
/* What somebody else needs to know of a run that is in trouble, in one file: Python packs it. */
#include "fetch/output.h"
#include "fetch/python.h"
#include "fetch/session.h"

typedef struct bundler {
    char *out;
    char **logs;
    int no_pull;
} bundler;

/* Wrong words are told here, once, and not by every part. */
static int bundle(session *s, const invocation *line, void *cookie)
{
    const bundler *b = cookie;
    python p;
    size_t n_logs = 0;
    while (b->logs != NULL && b->logs[n_logs] != NULL)
        n_logs++;
    const output_text left = output_number(line->common.timeout_ms);
    const output_text count = output_number(n_logs);
    python_start(&p, s->command, &line->common);
    python_add_self(&p);
    python_add(&p, s->publication);
    python_add(&p, left.s);
    python_add(&p, b->out);
    python_add(&p, b->no_pull ? "no-pull" : "");
    python_add(&p, count.s);
    for (size_t i = 0; i < n_logs; i++)
        python_add(&p, b->logs[i]);
    python_add_target(&p, s, line);
    return python_become(&p);
}

static int run(const command *self, int argc, const char **argv)
{
    invocation line = {.common.timeout_ms = 60000};
    bundler b = {0};
    struct poptOption table[] = {
        {"out", 'o', POPT_ARG_STRING, &b.out, 0,
         "the file; must not exist (default: nixl-fetch-TIME.tar)", "FILE"},
        {"log", 'l', POPT_ARG_ARGV, &b.logs, 0,
         "also the last lines of this file; may be repeated", "FILE"},
        {"no-pull", 0, POPT_ARG_NONE, &b.no_pull, 0, "without a pull to memory", NULL},
        SESSION_TABLE(&line),
        POPT_TABLEEND,
    };
    return session_run(self, argc, argv, &line, table, 0, bundle, &b);
}

static const char help[] =
    "Examples:\n"
    "  nixl-fetch bundle nixl_info.json\n"
    "  nixl-fetch bundle nixl_info.json --run 0 --log engine.log -o trouble.tar\n"
    "\n"
    "A tar of what version, doctor, status, ping, list and one pull to memory say,\n"
    "with the pull's trace and the last lines of logs. It has these variables of the\n"
    "environment: FANIN_*, NIXL_*, UCX_*, NCCL_*, CUDA_VISIBLE_DEVICES. It strikes\n"
    "out users of URLs, and values whose names have SECRET, KEY, TOKEN, PASSWORD or\n"
    "CREDENTIAL in them. Each part has a deadline; manifest.json says which failed,\n"
    "and why. The exit status is 0 if the file was written, whatever it says.";

const command cmd_bundle = {
    .name = "bundle",
    .arguments = "TARGET [RUN] [OPTION...]",
    .summary = "one file with all that others need to know of a run's trouble",
    .help = help,
    .untraced = true,
    .run = run,
};
