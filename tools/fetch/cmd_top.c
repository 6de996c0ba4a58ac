/* SPDX-License-Identifier: Apache-2.0 */
/* What a run is at, again and again: Python draws what `nixl-fetch status --json` tells. */
#include "fetch/failure.h"
#include "fetch/output.h"
#include "fetch/python.h"
#include "fetch/session.h"

#include <stdlib.h>

enum { LEAST_MS = 100 };

typedef struct top {
    char *max_age, *interval;
    long long count;
} top;

static int top_become(session *s, const invocation *line, void *cookie)
{
    const top *t = cookie;
    uint32_t interval_ms = 1000, max_age_ms;
    const char *plain = getenv("NO_COLOR");
    bool color = !line->common.no_color && (plain == NULL || plain[0] == '\0');
    if (t->max_age != NULL && !options_duration(t->max_age, &max_age_ms))
        return failure_usage("top", "--max-age '%s' is no time such as 30s or 10m",
                             t->max_age);
    if (t->interval != NULL &&
        (!options_duration(t->interval, &interval_ms) || interval_ms < LEAST_MS))
        return failure_usage(
            "top", "--interval '%s' is no time of at least 100ms, such as 1s or 500ms",
            t->interval);
    int code = session_need_run(s);
    if (code != 0)
        return code;
    const output_text count = output_number((uint64_t)t->count);
    const output_text interval = output_number(interval_ms);
    python p;
    python_start(&p, s->command, &line->common);
    python_add(&p, count.s);
    python_add(&p, interval.s);
    python_add(&p, color ? "color" : "");
    python_add(&p, s->publication);
    python_add_looks(&p, s, line);
    if (t->max_age != NULL) {
        python_add(&p, "--max-age");
        python_add(&p, t->max_age);
    }
    return python_become(&p);
}

static int run(const command *self, int argc, const char **argv)
{
    invocation line = {.common.timeout_ms = 1000};
    top t = {0};
    struct poptOption table[] = {
        {"count", 'c', POPT_ARG_LONGLONG, &t.count, 0, "end after so many looks", "N"},
        {"interval", 0, POPT_ARG_STRING, &t.interval, 0,
         "from one look to the next (1s)", "TIME"},
        {"max-age", 0, POPT_ARG_STRING, &t.max_age, 0,
         "fine is whose last commit is no older, whatever it is at now", "TIME"},
        SESSION_TABLE(&line),
        POPT_TABLEEND,
    };
    return session_run(self, argc, argv, &line, table, 0, top_become, &t);
}

static const char help[] =
    "Examples:\n"
    "  nixl-fetch top nixl_info.json\n"
    "  nixl-fetch top 127.0.0.1:6000 --world-size 8 --count 10 >looks.txt\n"
    "\n"
    "Draws what 'nixl-fetch status' tells over the terminal once a second: the\n"
    "problems, then the ranks, those with problems first. Each rank has the bytes\n"
    "sent since the look before. Takes no lease. q or Ctrl-C ends it, the blank\n"
    "looks at once. Where standard output is no terminal, it prints a block for each\n"
    "look.\n"
    "\n"
    "--timeout is for each look. After --count looks the exit status is that of\n"
    "'status' for the last one, after q 0.";

const command cmd_top = {
    .name = "top",
    .arguments = "TARGET [--run R] [OPTION...]",
    .summary = "status again and again, the worst on top",
    .help = help,
    .of_some = true,
    .untraced = true,
    .run = run,
};
