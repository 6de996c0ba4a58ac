/* SPDX-License-Identifier: Apache-2.0 */
#include "command.h"
#include "failure.h"
#include "interrupt.h"
#include "output.h"
#include "progress.h"
#include "session.h"

#include <stdio.h>

typedef struct watcher {
    bool json;
    bool any; /**< an event was seen */
    uint64_t last_step, last_ns;
    long long count, left; /**< 0: endless */
} watcher;

static void print_event(const watcher *w, const fanin_watch_event *e, uint64_t now)
{
    if (w->json) {
        json_t *o = json_object();
        output_set_u64(o, "step", e->step);
        output_set_u64(o, "step_newest", e->step_newest);
        output_set_u64(o, "spread_ns", e->spread_ns);
        json_object_set_new(o, "slowest_rank",
                            e->slowest_rank >= 0 ? json_integer(e->slowest_rank)
                                                 : json_null());
        if (w->any) {
            output_set_u64(o, "since_last_ns", now - w->last_ns);
        }
        output_json_line(o);
        return;
    }
    printf("step %llu  ranks apart %s", (unsigned long long)e->step,
           output_duration(e->spread_ns).s);
    if (e->slowest_rank >= 0) {
        printf("  slowest rank %d", (int)e->slowest_rank);
    }
    if (e->step_newest != e->step) {
        printf("  furthest rank at step %llu", (unsigned long long)e->step_newest);
    }
    if (w->any) {
        printf("  after %s", output_duration(now - w->last_ns).s);
    }
    putchar('\n');
    fflush(stdout);
}

static bool on_event(void *cookie, const fanin_watch_event *event)
{
    watcher *w = cookie;
    if (w->any && event->step == w->last_step) {
        return true; /* the watch was taken up again */
    }
    uint64_t now = progress_now_ns();
    print_event(w, event, now);
    w->any = true;
    w->last_step = event->step;
    w->last_ns = now;
    return ferror(stdout) == 0 && (w->count == 0 || --w->left > 0);
}

static int watch(session *s, const common_options *common, long long count)
{
    fanin_error error = FANIN_ERROR_INIT;
    watcher w = {.json = common->json != 0, .count = count, .left = count};
    int code = session_connect(s, common->timeout_ms);
    if (code != 0) {
        return code;
    }
    fanin_status status;
    do {
        uint32_t limit = common->timeout_given ? common->timeout_ms : UINT32_MAX;
        status =
            fanin_client_watch(s->client, s->publication, limit, on_event, &w, &error);
    } while (status == FANIN_ERR_TIMEOUT && !common->timeout_given &&
             !interrupt_requested());
    return status == FANIN_OK ? 0 : failure_report("watching ended", &error);
}

static int run(const command *self, int argc, const char **argv)
{
    invocation line = {.common.timeout_ms = 10000};
    long long count = 0;
    struct poptOption table[] = {
        {"count", 'c', POPT_ARG_LONGLONG, &count, 0, "end after so many steps", "N"},
        SESSION_TABLE(&line),
        POPT_TABLEEND,
    };
    session s = {0};
    int code;
    const char *where = session_begin(self, &line, argc, argv, table, 0, &code);
    if (where != NULL) {
        code = session_open(&s, self, &line, where, line.run);
        if (code == 0) {
            code = watch(&s, &line.common, count);
        }
        session_close(&s);
    }
    session_end(&line);
    return code;
}

const command cmd_watch = {
    .name = "watch",
    .arguments = "TARGET [--run R] [OPTION...]",
    .summary = "print a line for every committed step",
    .help = "Examples:\n"
            "  nixl-fetch watch 127.0.0.1:6000 --world-size 8 --run 0\n"
            "  nixl-fetch watch nixl_info.json --json --count 10\n"
            "\n"
            "Tells how far the ranks' commits of a step are apart and which rank came "
            "last.\n"
            "Ends by Ctrl-C, after --count steps, or when a rank is lost; with "
            "--timeout on\n"
            "the command line also after that time, as a failure.",
    .run = run,
};
