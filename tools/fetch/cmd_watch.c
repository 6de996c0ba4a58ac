/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/command.h"
#include "fetch/failure.h"
#include "fetch/interrupt.h"
#include "fetch/output.h"
#include "fetch/progress.h"
#include "fetch/rank_states.h"
#include "fetch/session.h"

#include <stdio.h>
#include <time.h>

typedef struct watcher {
    bool json;
    bool any; /**< an event was seen */
    uint64_t last_step, last_ns;
    long long count, left; /**< 0: endless */
} watcher;

static uint64_t time_of_day_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

/* "14:03:59.120", of the zone that the terminal is in. */
static output_text clock_text(uint64_t unix_ns)
{
    output_text text;
    struct tm local;
    time_t seconds = (time_t)(unix_ns / 1000000000);
    localtime_r(&seconds, &local);
    snprintf(text.s, sizeof(text.s), "%02d:%02d:%02d.%03u", local.tm_hour, local.tm_min,
             local.tm_sec, (unsigned)(unix_ns / 1000000 % 1000));
    return text;
}

static json_t *event_json(const char *name)
{
    json_t *o = json_object();
    output_set_string(o, "event", name);
    output_set_u64(o, "time_ns", time_of_day_ns());
    return o;
}

static void print_event(const watcher *w, const fanin_watch_event *e, uint64_t now)
{
    if (w->json) {
        json_t *o = event_json("step");
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
    printf("%s  step %llu  ranks apart %s", clock_text(time_of_day_ns()).s,
           (unsigned long long)e->step, output_duration(e->spread_ns).s);
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

static bool on_quiet(void *cookie, uint64_t quiet_ms, const fanin_rank_state *ranks,
                     size_t count)
{
    const watcher *w = cookie;
    char text[1024];
    if (w->json) {
        json_t *o = event_json("quiet");
        output_set_u64(o, "quiet_ns", quiet_ms * 1000000);
        json_object_set_new(o, "ranks", rank_states_json(ranks, count));
        output_json_line(o);
    } else {
        rank_states_text(ranks, count, text, sizeof(text));
        printf("%s  no step for %s: %s\n", clock_text(time_of_day_ns()).s,
               output_age(quiet_ms).s, text);
        fflush(stdout);
    }
    return ferror(stdout) == 0;
}

static int watch(session *s, const common_options *common, long long count,
                 long long idle_ms)
{
    fanin_error error = FANIN_ERROR_INIT;
    watcher w = {.json = common->json != 0, .count = count, .left = count};
    int code = session_reach(s);
    if (code != 0) {
        return code;
    }
    fanin_status status;
    do {
        uint32_t limit = common->timeout_given ? session_left_ms(s) : UINT32_MAX;
        status = fanin_client_follow(s->client, s->publication, limit, on_event,
                                     (uint32_t)idle_ms, on_quiet, &w, &error);
    } while (status == FANIN_ERR_TIMEOUT && !common->timeout_given &&
             !interrupt_requested());
    return status == FANIN_OK ? 0 : session_failure(s, "watching ended", &error);
}

static int run(const command *self, int argc, const char **argv)
{
    invocation line = {.common.timeout_ms = 10000};
    long long count = 0, idle_ms = 10000;
    struct poptOption table[] = {
        {"count", 'c', POPT_ARG_LONGLONG, &count, 0, "end after so many steps", "N"},
        {"idle-ms", 0, POPT_ARG_LONGLONG, &idle_ms, 0,
         "tell what the ranks do when no step comes for so long (10000)", "MS"},
        SESSION_TABLE(&line),
        POPT_TABLEEND,
    };
    session s = {0};
    int code;
    const char *where = session_begin(self, &line, argc, argv, table, 0, &code);
    if (where != NULL) {
        code = session_open(&s, self, &line, where, line.run);
        if (code == 0) {
            code = watch(&s, &line.common, count, idle_ms);
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
    .help =
        "Examples:\n"
        "  nixl-fetch watch 127.0.0.1:6000 --world-size 8 --run 0\n"
        "  nixl-fetch watch nixl_info.json --json --count 10\n"
        "\n"
        "Tells how far the ranks' commits of a step are apart and which rank came "
        "last.\n"
        "While no step comes it tells what the ranks do. A run that the ranks do not\n"
        "publish is refused.\n"
        "Ends by Ctrl-C, after --count steps, or when a rank is lost; with "
        "--timeout on\n"
        "the command line also after that time, as a failure.",
    .run = run,
};
