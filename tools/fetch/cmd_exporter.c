/* SPDX-License-Identifier: Apache-2.0 */
/* What a run is at, for Prometheus: Python serves what `nixl-fetch status --json` tells. */
#include "fetch/python.h"
#include "fetch/session.h"

static int serve(session *s, const invocation *line, void *cookie)
{
    char *const *listen = cookie;
    python p;
    int code = session_need_run(s);
    if (code != 0)
        return code;
    python_start(&p, s->command, &line->common);
    python_add(&p, *listen != NULL ? *listen : "127.0.0.1:9470");
    python_add(&p, s->publication);
    python_add_looks(&p, s, line);
    return python_become(&p);
}

static int run(const command *self, int argc, const char **argv)
{
    invocation line = {.common.timeout_ms = 2000};
    char *listen = NULL;
    struct poptOption table[] = {
        {"listen", 0, POPT_ARG_STRING, &listen, 0,
         "where scrapers ask (127.0.0.1:9470)", "ADDRESS:PORT"},
        SESSION_TABLE(&line),
        POPT_TABLEEND,
    };
    return session_run(self, argc, argv, &line, table, 0, serve, &listen);
}

static const char help[] =
    "Examples:\n"
    "  nixl-fetch exporter nixl_info.json\n"
    "  nixl-fetch exporter 127.0.0.1:6000 --world-size 8 --listen 0.0.0.0:9470\n"
    "\n"
    "Answers GET /metrics with what 'nixl-fetch status' tells: all ranks are asked\n"
    "when a scrape comes, at most once a second. Takes no lease. Everybody who can\n"
    "reach the address may ask. Ends by Ctrl-C or SIGTERM; the exit status is then\n"
    "0. The first python3 of the PATH serves the page; it must have fanin's package.";

const command cmd_exporter = {
    .name = "exporter",
    .arguments = "TARGET [--run R] [OPTION...]",
    .summary = "every rank's state, for Prometheus",
    .help = help,
    .of_some = true,
    .untraced = true,
    .run = run,
};
