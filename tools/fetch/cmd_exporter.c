/* SPDX-License-Identifier: Apache-2.0 */
/* What a run is at, for Prometheus: Python serves what `nixl-fetch status --json` tells. */
#include "fetch/command.h"
#include "fetch/failure.h"
#include "fetch/output.h"
#include "fetch/session.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PYTHON "python3"
#define REMEDY                                                                         \
    "put a " PYTHON " first into the PATH that has fanin's package, of this version"

static const char program[] =
    "import sys\n"
    "try:\n"
    "    from fanin._exporter import main\n"
    "except ImportError as error:\n"
    "    sys.exit(f\"nixl-fetch: no exporter: {error}: " REMEDY "\")\n"
    "main(*sys.argv[1:])\n";

typedef struct exporter {
    char *listen;
    const char **argv;
} exporter;

/* The words of the command line for `status`: all but --listen. */
static void exporter_take_words(const char **from, const char **to)
{
    while (*from != NULL) {
        if (strcmp(*from, "--listen") == 0) {
            from += 2;
        } else if (strncmp(*from, "--listen=", strlen("--listen=")) == 0) {
            from++;
        } else {
            *to++ = *from++;
        }
    }
}

static int serve(session *s, const invocation *line, void *cookie)
{
    (void)line;
    exporter *e = cookie;
    size_t count = 0;
    char self[PATH_MAX] = "";
    int code = session_need_run(s);
    if (code != 0) {
        return code;
    }
    if (readlink("/proc/self/exe", self, sizeof self - 1) < 0) {
        return failure_local("no exporter", FANIN_ERR_IO, "mount /proc",
                             "cannot find this program: %s", strerror(errno));
    }
    while (e->argv[count] != NULL) {
        count++;
    }
    const char *const first[] = {
        PYTHON,         "-c", program, e->listen != NULL ? e->listen : "127.0.0.1:9470",
        s->publication, self,
    };
    size_t n_first = sizeof first / sizeof *first;
    const char **words = output_require(calloc(n_first + count + 1, sizeof *words));
    memcpy(words, first, sizeof first);
    exporter_take_words(e->argv + 1, words + n_first);
    setenv("PYTHONSAFEPATH", "1", 1); /* modules are not the working directory's */
    execvp(PYTHON, (char *const *)words);
    code = failure_local("no exporter", FANIN_ERR_IO, REMEDY,
                         "cannot run " PYTHON ": %s", strerror(errno));
    free(words);
    return code;
}

static int run(const command *self, int argc, const char **argv)
{
    invocation line = {.common.timeout_ms = 2000};
    exporter e = {.argv = argv};
    struct poptOption table[] = {
        {"listen", 0, POPT_ARG_STRING, &e.listen, 0,
         "where scrapers ask (127.0.0.1:9470)", "ADDRESS:PORT"},
        SESSION_TABLE(&line),
        POPT_TABLEEND,
    };
    return session_run(self, argc, argv, &line, table, 0, serve, &e);
}

const command cmd_exporter = {
    .name = "exporter",
    .arguments = "TARGET [--run R] [OPTION...]",
    .summary = "every rank's state, for Prometheus",
    .help =
        "Examples:\n"
        "  nixl-fetch exporter nixl_info.json\n"
        "  nixl-fetch exporter 127.0.0.1:6000 --world-size 8 --listen 0.0.0.0:9470\n"
        "\n"
        "Answers GET /metrics with what 'nixl-fetch status' tells: all ranks are asked "
        "when\n"
        "a scrape comes, at most once a second. Takes no lease. Everybody who can "
        "reach the\n"
        "address may ask. Ends by Ctrl-C or SIGTERM; the exit status is then 0. The "
        "first\n"
        "python3 of the PATH serves the page; it must have fanin's package.",
    .of_some = true,
    .run = run,
};
