/* SPDX-License-Identifier: Apache-2.0 */
/* What a run is at, again and again. */
#include "fetch/command.h"
#include "fetch/failure.h"
#include "fetch/interrupt.h"
#include "fetch/look_view.h"
#include "fetch/output.h"
#include "fetch/progress.h"
#include "fetch/screen.h"
#include "fetch/terminal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PLAIN_COLUMNS = 200, LEAST_MS = 100 };

typedef struct top {
    char *max_age, *interval;
    uint32_t max_age_ms, interval_ms, timeout_ms;
    long long count;
    bool json, color, drawn; /**< drawn: on a terminal, again and again */
    bool reached;            /**< somebody has answered at least once */
    look_rates rates;
    look look; /**< the last one */
    problems problems;
    fanin_error error; /**< why there was none; status FANIN_OK: there was */
    fanin_status verdict;
} top;

static void forget(top *t)
{
    problems_free(&t->problems);
    look_free(&t->look);
    t->error = (fanin_error)FANIN_ERROR_INIT;
}

/* What another look would not mend. */
static bool is_final(fanin_status status)
{
    int group = -status / 100;
    return status == FANIN_ERR_CANCELLED || group == 1 || group >= 5;
}

/* Asks the ranks. 0, or the exit status after a message. */
static int look_again(top *t, session *s)
{
    forget(t);
    s->end_ns = progress_in_ms(t->timeout_ms);
    fanin_status status = t->reached ? FANIN_OK : session_try(s, &t->error);
    if (status == FANIN_OK) {
        t->reached = true;
        status = look_take(s, session_left_ms(s), &t->look, &t->error);
    }
    t->verdict = status;
    if (status == FANIN_OK) {
        look_rates_take(&t->rates, &t->look, progress_now_ns());
        problems_find(&t->look, &t->rates, t->max_age_ms, &t->problems);
        t->verdict = problems_verdict(&t->problems);
        return 0;
    }
    if (is_final(status) || interrupt_requested()) {
        screen_close();
        return session_failure(s, "no status", &t->error);
    }
    return 0;
}

/* "14:03:59, q ends" */
static void tail_of(bool drawn, char *out, size_t size)
{
    time_t now = time(NULL);
    struct tm local;
    localtime_r(&now, &local);
    snprintf(out, size, "%02d:%02d:%02d%s", local.tm_hour, local.tm_min, local.tm_sec,
             drawn ? ", q ends" : "");
}

static char *text_of(const top *t, const session *s)
{
    char tail[64];
    look_view v = {.look = &t->look,
                   .problems = &t->problems,
                   .rates = &t->rates,
                   .title = s->publication,
                   .tail = tail,
                   .columns = PLAIN_COLUMNS,
                   .color = t->color};
    tail_of(t->drawn, tail, sizeof tail);
    if (t->drawn) {
        screen_size(&v.columns, &v.lines);
    }
    return look_view_text(&v);
}

/* False: nobody can see it any more. */
static bool show(const top *t, const session *s)
{
    if (t->json) {
        output_json_line(t->error.status == FANIN_OK
                             ? look_json(s, &t->look, &t->problems)
                             : failure_json(&t->error));
        return output_errno() == 0;
    }
    char *text = NULL;
    if (t->error.status == FANIN_OK) {
        text = text_of(t, s);
    } else {
        size_t size;
        FILE *stream = output_require(open_memstream(&text, &size));
        terminal_write(stream, "%s: no status: %s%s%s", s->publication,
                       t->error.message, t->error.remedy[0] != '\0' ? ": " : "",
                       t->error.remedy);
        fclose(stream);
    }
    bool good = true;
    if (t->drawn) {
        good = screen_draw(text);
    } else {
        printf("%s\n", text);
        output_flush();
        good = output_errno() == 0;
    }
    free(text);
    return good;
}

/* Until the next look is due. False: the user has had enough. */
static bool pause_until(const top *t, const session *s, uint64_t due_ns)
{
    for (;;) {
        uint32_t left = progress_left_ms(due_ns);
        screen_event event = left > 0 ? screen_wait(left) : screen_wait(0);
        if (event == SCREEN_QUIT || interrupt_requested()) {
            return false;
        }
        if (event == SCREEN_LOOK ||
            (event == SCREEN_TIME && !progress_left_ms(due_ns))) {
            return true;
        }
        if (event == SCREEN_RESIZED && !show(t, s)) {
            return false;
        }
    }
}

static int watch(top *t, session *s)
{
    long long left = t->count;
    bool more = true;
    int code = 0;
    while (more && code == 0) {
        uint64_t due = progress_in_ms(t->interval_ms);
        code = look_again(t, s);
        more = code == 0 && show(t, s) && (t->count == 0 || --left > 0) &&
               pause_until(t, s, due);
    }
    screen_close();
    if (code != 0) {
        return code;
    }
    return interrupt_requested()       ? interrupt_exit_code()
           : t->count > 0 && left == 0 ? exit_code_of(t->verdict)
                                       : 0;
}

static int begin(session *s, const invocation *line, void *cookie)
{
    top *t = cookie;
    const char *plain = getenv("NO_COLOR");
    if (t->max_age != NULL && !options_duration(t->max_age, &t->max_age_ms)) {
        return failure_usage("top", "--max-age '%s' is no time such as 30s or 10m",
                             t->max_age);
    }
    if (t->interval != NULL && (!options_duration(t->interval, &t->interval_ms) ||
                                t->interval_ms < LEAST_MS)) {
        return failure_usage(
            "top", "--interval '%s' is no time of at least 100ms, such as 1s or 500ms",
            t->interval);
    }
    int code = session_need_run(s);
    if (code != 0) {
        return code;
    }
    t->json = line->common.json != 0;
    t->timeout_ms = line->common.timeout_ms;
    t->drawn = !t->json && screen_open();
    t->color =
        t->drawn && !line->common.no_color && (plain == NULL || plain[0] == '\0');
    code = watch(t, s);
    forget(t);
    look_rates_free(&t->rates);
    return code;
}

static int run(const command *self, int argc, const char **argv)
{
    invocation line = {.common.timeout_ms = 1000};
    top t = {.interval_ms = 1000};
    struct poptOption table[] = {
        {"count", 'c', POPT_ARG_LONGLONG, &t.count, 0, "end after so many looks", "N"},
        {"interval", 0, POPT_ARG_STRING, &t.interval, 0,
         "from one look to the next (1s)", "TIME"},
        {"max-age", 0, POPT_ARG_STRING, &t.max_age, 0,
         "fine is whose last commit is no older, whatever it is at now", "TIME"},
        SESSION_TABLE(&line),
        POPT_TABLEEND,
    };
    return session_run(self, argc, argv, &line, table, 0, begin, &t);
}

const command cmd_top = {
    .name = "top",
    .arguments = "TARGET [--run R] [OPTION...]",
    .summary = "status again and again, the worst on top",
    .help =
        "Examples:\n"
        "  nixl-fetch top nixl_info.json\n"
        "  nixl-fetch top 127.0.0.1:6000 --world-size 8 --count 10 >looks.txt\n"
        "\n"
        "Draws what 'nixl-fetch status' tells over the terminal once a second: the "
        "problems,\n"
        "then the ranks, those with problems first. Each rank has the bytes sent\n"
        "since the look before. Takes no lease. q or Ctrl-C ends it, the blank looks "
        "at\n"
        "once. Where standard output is no terminal, it prints a block for each look.\n"
        "\n"
        "--timeout is for each look. After --count looks the exit status is that of\n"
        "'status' for the last one, after q 0.",
    .of_some = true,
    .run = run,
};
