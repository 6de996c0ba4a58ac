/* SPDX-License-Identifier: Apache-2.0 */
/* What a run is at, for Prometheus. */
#include "fetch/command.h"
#include "fetch/failure.h"
#include "fetch/http.h"
#include "fetch/look_metrics.h"
#include "fetch/look_rates.h"
#include "fetch/output.h"
#include "fetch/progress.h"
#include "fetch/terminal.h"

#include <stdio.h>
#include <stdlib.h>

#define FRESH_NS UINT64_C(1000000000) /* scrapes that come sooner get the same */

typedef struct exporter {
    session *session;
    char *listen;
    uint32_t timeout_ms;
    bool reached; /**< somebody has answered at least once */
    char *text;   /**< the last page; NULL: none yet */
    look_rates rates;
    uint64_t taken_ns;
} exporter;

static char *page_of(exporter *e)
{
    session *s = e->session;
    fanin_error error = FANIN_ERROR_INIT;
    look l = {0};
    problems p = {0};
    s->end_ns = progress_in_ms(e->timeout_ms);
    fanin_status status = e->reached ? FANIN_OK : session_try(s, &error);
    e->reached = status == FANIN_OK;
    if (e->reached) {
        status = look_take(s, session_left_ms(s), &l, &error);
    }
    if (status == FANIN_OK) {
        look_rates_take(&e->rates, &l, progress_now_ns());
        problems_find(&l, &e->rates, 0, &p);
    } else {
        look_free(&l); /* ranks that do not belong together may have one number */
    }
    char *ranks = look_metrics(s, &l, &p), *text = NULL;
    size_t size = 0;
    FILE *stream = output_require(open_memstream(&text, &size));
    if (status != FANIN_OK) { /* one line, whatever ranks say: a comment ends there */
        terminal_write(stream, "# no status: %s: %s", error.message, error.remedy);
    }
    fprintf(stream,
            "# HELP fanin_run_up Whether any rank answered, and all belong together.\n"
            "# TYPE fanin_run_up gauge\n"
            "fanin_run_up{publication=\"%s\"} %d\n%s",
            s->publication, status == FANIN_OK, ranks);
    if (fclose(stream) != 0) {
        output_require(NULL);
    }
    free(ranks);
    problems_free(&p);
    look_free(&l);
    return text;
}

static const char *page(void *cookie)
{
    exporter *e = cookie;
    uint64_t now = progress_now_ns();
    if (e->text == NULL || now - e->taken_ns >= FRESH_NS) {
        free(e->text);
        e->text = page_of(e);
        e->taken_ns = progress_now_ns();
    }
    return e->text;
}

static int serve(session *s, const invocation *line, void *cookie)
{
    exporter *e = cookie;
    fanin_error error = FANIN_ERROR_INIT;
    const char *address = e->listen != NULL ? e->listen : "127.0.0.1:9470";
    int fd;
    unsigned port;
    int code = session_need_run(s);
    if (code != 0) {
        return code;
    }
    if (http_listen(address, &fd, &port, &error) != FANIN_OK) {
        return error.status == FANIN_ERR_ARGUMENT
                   ? failure_usage("exporter", "%s: %s", error.message, error.remedy)
                   : failure_report("no exporter", &error);
    }
    e->session = s;
    e->timeout_ms = line->common.timeout_ms;
    if (line->common.json) {
        output_json_line(output_object("listening", output_string(address), "port",
                                       output_u64(port), NULL));
    } else {
        terminal_print("listening on %s, port %u: /metrics", address, port);
        output_flush();
    }
    http_serve(fd, page, e);
    free(e->text);
    look_rates_free(&e->rates);
    return 0;
}

static int run(const command *self, int argc, const char **argv)
{
    invocation line = {.common.timeout_ms = 2000};
    exporter e = {0};
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
        "address may ask. Ends by Ctrl-C or SIGTERM; the exit status is then 0.",
    .of_some = true,
    .run = run,
};
