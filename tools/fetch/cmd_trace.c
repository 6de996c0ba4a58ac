/* SPDX-License-Identifier: Apache-2.0 */
/* What took how long in traces: Python reads and tells it. */
#include "fetch/failure.h"
#include "fetch/output.h"
#include "fetch/python.h"

typedef struct trace_options {
    char *svg, *merge;
    long long pull;
    common_options common;
    struct poptOption common_part[COMMON_OPTIONS];
    arguments parsed;
} trace_options;

static int trace_become(const command *self, const trace_options *o)
{
    python p;
    const output_text pull = output_number((uint64_t)o->pull);
    if (o->parsed.count == 0)
        return failure_usage(self->name,
                             "give a FILE of --trace or FANIN_TRACE, or several");
    python_start(&p, self, &o->common);
    python_add(&p, o->svg);
    python_add(&p, o->merge);
    python_add(&p, pull.s);
    for (int i = 0; i < o->parsed.count; i++)
        python_add(&p, o->parsed.positional[i]);
    return python_become(&p);
}

static int run(const command *self, int argc, const char **argv)
{
    trace_options o = {.common.timeout_ms = 1000};
    options_common(&o.common, o.common_part);
    struct poptOption table[] = {
        {"svg", 0, POPT_ARG_STRING, &o.svg, 0,
         "also draw the longest pull, or that of --pull, rank by rank", "FILE"},
        {"merge", 0, POPT_ARG_STRING, &o.merge, 0,
         "also write all files as one trace, on the first one's clock", "FILE"},
        {"pull", 0, POPT_ARG_LONGLONG, &o.pull, 0, "this pull alone, counted from 1",
         "N"},
        {NULL, 0, POPT_ARG_INCLUDE_TABLE, o.common_part, 0, "Common options:", NULL},
        POPT_TABLEEND,
    };
    int code = 0;
    if (options_parse(self, argc, argv, table, &o.common, &o.parsed, &code))
        code = trace_become(self, &o);
    options_free(&o.parsed);
    return code;
}

static const char help[] =
    "Examples:\n"
    "  nixl-fetch pull nixl_info.json --out adapter --trace pull.json\n"
    "  nixl-fetch trace pull.json --svg pull.svg\n"
    "  nixl-fetch trace /tmp/me/fanin-*.json --merge all.json\n"
    "\n"
    "FILE is what --trace or FANIN_TRACE has written. A row for each phase of the\n"
    "calls (-) and of each rank (?: one that has not said which it is), with the\n"
    "slowest rank of a phase marked. Files of several processes are laid on one\n"
    "clock: that of the host, or of other hosts by the time of day.";

const command cmd_trace = {
    .name = "trace",
    .arguments = "FILE... [OPTION...]",
    .summary = "say what took how long in traces, rank by rank",
    .help = help,
    .run = run,
};
