/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/command.h"
#include "fetch/interrupt.h"
#include "fetch/output.h"
#include "fetch/missing.h"
#include "fetch/session.h"
#include "clock.h"

#include <inttypes.h>
#include <stdio.h>
#include <time.h>

typedef struct watcher {
    bool json;
    bool any; /**< an event was seen */
    uint64_t last_step, last_ns;
    long long count, left; /**< 0: endless */
    long long idle_ms;     /**< without a step until the ranks' states are told */
} watcher;

/* "14:03:59.120", of the zone that the terminal is in. */
static output_text clock_text(uint64_t unix_ns)
{
    output_text text;
    struct tm local;
    time_t seconds = (time_t)(unix_ns / 1000000000);
    localtime_r(&seconds, &local);
    snprintf(text.s, sizeof text.s, "%02d:%02d:%02d.%03u", local.tm_hour, local.tm_min,
             local.tm_sec, (unsigned)(unix_ns / 1000000 % 1000));
    return text;
}

static void print_event(const watcher *w, const fanin_watch_event *e, uint64_t now)
{
    if (w->json) {
        json_t *o = output_object(
            "event", output_string("step"), "time_ns", output_u64(clock_unix_ns()),
            "step", output_u64(e->step), "step_newest", output_u64(e->step_newest),
            "spread_ns", output_u64(e->spread_ns), "slowest_rank",
            output_rank(e->slowest_rank), NULL);
        if (w->any)
            output_set(o, "since_last_ns", output_u64(now - w->last_ns), NULL);
        output_json_line(o);
        return;
    }
    printf("%s  step %" PRIu64 "  ranks apart %s", clock_text(clock_unix_ns()).s,
           e->step, output_duration(e->spread_ns).s);
    if (e->slowest_rank >= 0)
        printf("  slowest rank %d", (int)e->slowest_rank);
    if (e->step_newest != e->step)
        printf("  furthest rank at step %" PRIu64, e->step_newest);
    if (w->any)
        printf("  after %s", output_duration(now - w->last_ns).s);
    putchar('\n');
    fflush(stdout);
}

static bool watch_on_event(void *cookie, const fanin_watch_event *event)
{
    watcher *w = cookie;
    if (w->any && event->step == w->last_step)
        return true; /* the watch was taken up again */
    uint64_t now = clock_ns();
    print_event(w, event, now);
    w->any = true;
    w->last_step = event->step;
    w->last_ns = now;
    return ferror(stdout) == 0 && (w->count == 0 || --w->left > 0);
}

static bool on_quiet(void *cookie, uint64_t quiet_ms, const fanin_rank_state *ranks,
                     size_t count)
{
    const watcher *w = cookie;
    char text[1024];
    if (w->json) {
        output_json_line(output_object("event", output_string("quiet"), "time_ns",
                                       output_u64(clock_unix_ns()), "quiet_ns",
                                       output_u64(quiet_ms * 1000000), "ranks",
                                       rank_states_json(ranks, count), NULL));
    } else {
        rank_states_text(ranks, count, text, sizeof text);
        printf("%s  no step for %s: %s\n", clock_text(clock_unix_ns()).s,
               output_age(quiet_ms).s, text);
        fflush(stdout);
    }
    return ferror(stdout) == 0;
}

static int watch_target(session *s, const invocation *line, void *cookie)
{
    watcher *w = cookie;
    const common_options *common = &line->common;
    fanin_error error = FANIN_ERROR_INIT;
    w->json = common->json != 0;
    w->left = w->count;
    int code = session_need_run(s);
    code = code != 0 ? code : session_reach(s);
    if (code != 0)
        return code;
    fanin_status status;
    do {
        uint32_t limit = common->timeout_given ? session_left_ms(s) : UINT32_MAX;
        status = fanin_client_follow(s->client, s->publication, limit, watch_on_event,
                                     (uint32_t)w->idle_ms, on_quiet, w, &error);
    } while (status == FANIN_ERR_TIMEOUT && !common->timeout_given &&
             !interrupt_requested());
    return status == FANIN_OK ? 0 : session_failure(s, "watching ended", &error);
}

static int run(const command *self, int argc, const char **argv)
{
    invocation line = {.common.timeout_ms = 10000};
    watcher w = {.idle_ms = 10000};
    struct poptOption table[] = {
        {"count", 'c', POPT_ARG_LONGLONG, &w.count, 0, "end after so many steps", "N"},
        {"idle-ms", 0, POPT_ARG_LONGLONG, &w.idle_ms, 0,
         "tell what the ranks do when no step comes for so long (10000)", "MS"},
        SESSION_TABLE(&line),
        POPT_TABLEEND,
    };
    return session_run(self, argc, argv, &line, table, 0, watch_target, &w);
}

static const char help[] =
    "Examples:\n"
    "  nixl-fetch watch 127.0.0.1:6000 --world-size 8 --run 0\n"
    "  nixl-fetch watch nixl_info.json --json --count 10\n"
    "\n"
    "Tells how far the ranks' commits of a step are apart and which rank came last.\n"
    "While no step comes it tells what the ranks do. A run that the ranks do not\n"
    "publish is refused. Ends by Ctrl-C, after --count steps, or when a rank is\n"
    "lost; with --timeout on the command line also after that time, as a failure.";

const command cmd_watch = {
    .name = "watch",
    .arguments = "TARGET [--run R] [OPTION...]",
    .summary = "print a line for every committed step",
    .help = help,
    .run = run,
};
