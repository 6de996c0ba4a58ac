/* SPDX-License-Identifier: Apache-2.0 */
/* What a run is at, again and again: Python draws what the same program, started once more with
   LOOKS in its environment, tells for each line of its standard input: a sentence (not with --json)
   and a line of JSON. */
#include "fetch/failure.h"
#include "fetch/interrupt.h"
#include "fetch/look.h"
#include "fetch/output.h"
#include "fetch/python.h"
#include "fetch/session.h"
#include "clock.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LOOKS "NIXL_FETCH_LOOKS"

enum { LEAST_MS = 100 };

typedef struct top {
    char *max_age, *interval;
    uint32_t max_age_ms, interval_ms, timeout_ms;
    long long count;
    bool json;
    bool reached; /**< somebody has answered at least once */
    look_rates rates;
    fanin_status verdict;
} top;

static int top_check(top *t)
{
    if (t->max_age != NULL && !options_duration(t->max_age, &t->max_age_ms))
        return failure_usage("top", "--max-age '%s' is no time such as 30s or 10m",
                             t->max_age);
    if (t->interval != NULL &&
        (!options_duration(t->interval, &t->interval_ms) || t->interval_ms < LEAST_MS))
        return failure_usage(
            "top", "--interval '%s' is no time of at least 100ms, such as 1s or 500ms",
            t->interval);
    return 0;
}

/* What another look would not mend. */
static bool top_is_final(fanin_status status)
{
    int group = -status / 100;
    return status == FANIN_ERR_CANCELLED || group == 1 || group >= 5;
}

/* Asks the ranks, and tells. 0, or the exit status after a message. */
static int top_look_again(top *t, session *s)
{
    fanin_error error = FANIN_ERROR_INIT;
    look l = {0};
    s->end_ns = deadline_in_ms(t->timeout_ms);
    t->verdict = t->reached ? FANIN_OK : session_try(s, &error);
    if (t->verdict == FANIN_OK) {
        t->reached = true;
        t->verdict = look_take(s, session_left_ms(s), &l, &error);
    }
    if (t->verdict == FANIN_OK) {
        problems found;
        look_rates_take(&t->rates, &l, clock_ns());
        problems_find(&l, &t->rates, t->max_age_ms, &found);
        t->verdict = problems_verdict(&found);
        if (!t->json) {
            char *summary = look_summary(s, &l, &found);
            terminal_print("%s", summary);
            free(summary);
        }
        output_json_line(look_json(s, &l, &found));
        problems_free(&found);
    }
    look_free(&l);
    if (error.status == FANIN_OK)
        return 0;
    if (top_is_final(error.status) || interrupt_requested())
        return session_failure(s, "no status", &error);
    if (!t->json)
        terminal_print("%s: no status: %s%s%s", s->publication, error.message,
                       error.remedy[0] != '\0' ? ": " : "", error.remedy);
    output_json_line(failure_json(&error));
    return 0;
}

/* False: there are no more, or the user interrupted. */
static bool line_comes(void)
{
    enum { MOST_MS = 1000 }; /* a signal that came before the wait */
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    char c = 0;
    ssize_t n = 1;
    while (!interrupt_requested() && n > 0 && c != '\n')
        if (poll(&input, 1, MOST_MS) > 0)
            n = read(STDIN_FILENO, &c, 1);
    return c == '\n';
}

static int top_look(session *s, const invocation *line, void *cookie)
{
    top *t = cookie;
    int code = top_check(t);
    code = code != 0 ? code : session_need_run(s);
    t->timeout_ms = line->common.timeout_ms;
    t->json = line->common.json != 0;
    while (code == 0 && line_comes())
        code = top_look_again(t, s);
    look_rates_free(&t->rates);
    return code != 0               ? code
           : interrupt_requested() ? interrupt_exit_code()
                                   : exit_code_of(t->verdict);
}

/* Becomes Python, which starts this program once more. */
static int top_become(const command *self, const top *t, const common_options *common,
                      const char **words)
{
    const char *plain = getenv("NO_COLOR");
    bool color = !common->no_color && (plain == NULL || plain[0] == '\0');
    python p;
    python_start(&p, self, common);
    python_add(&p, output_require(strdup(output_number((uint64_t)t->count).s)));
    python_add(&p, output_require(strdup(output_number(t->interval_ms).s)));
    python_add(&p, color ? "color" : "");
    python_add_self(&p);
    while (*words != NULL)
        python_add(&p, *words++);
    return python_become(&p);
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
    int code;
    if (getenv(LOOKS) != NULL)
        return session_run(self, argc, argv, &line, table, 0, top_look, &t);
    if (session_parse(self, &line, argc, argv, table, &code)) {
        code = top_check(&t);
        code = code != 0 ? code : top_become(self, &t, &line.common, argv + 1);
    }
    options_free(&line.parsed);
    return code;
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
    .run = run,
};
