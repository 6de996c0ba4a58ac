/* SPDX-License-Identifier: Apache-2.0 */
/* What a run is at, again and again. */
#include "fetch/command.h"
#include "fetch/failure.h"
#include "fetch/interrupt.h"
#include "fetch/look_view.h"
#include "fetch/output.h"
#include "fetch/progress.h"
#include "fetch/terminal.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

/* ------------------------------------------------------------------- the screen */

typedef enum screen_event {
    SCREEN_TIME,    /**< the time is over */
    SCREEN_QUIT,    /**< q, or Ctrl-\ */
    SCREEN_RESIZED, /**< to be drawn anew, also after the process was stopped */
    SCREEN_LOOK,    /**< a key that asks for a look at once: blank, Enter */
} screen_event;

/* Another page, no cursor, and lines that are too long are cut; and back. */
#define ENTER "\033[?1049h\033[?25l\033[?7l"
#define LEAVE "\033[?7h\033[?25h\033[?1049l"

enum { CTRL_Z = 0x1a, CTRL_BACKSLASH = 0x1c };

static struct {
    bool open, keys;
    struct termios before;
} screen;
static volatile sig_atomic_t resized, continued;
static struct sigaction fatal_before[NSIG];

static void on_change(int number)
{
    *(number == SIGCONT ? &continued : &resized) = 1;
}

/* False: it cannot be written, or the user interrupted while it was stopped by Ctrl-S. */
static bool top_write_all(const char *text, size_t size)
{
    while (size > 0) {
        ssize_t n = write(STDOUT_FILENO, text, size);
        if (n < 0 && (errno != EINTR || interrupt_requested())) {
            return false;
        }
        text += n > 0 ? n : 0;
        size -= n > 0 ? (size_t)n : 0;
    }
    return true;
}

/* Gives it back as it was. Nothing is open: fine. */
static void screen_close(void)
{
    if (!screen.open) {
        return;
    }
    screen.open = false;
    (void)top_write_all(LEAVE, strlen(LEAVE));
    if (screen.keys) {
        tcsetattr(STDIN_FILENO, TCSAFLUSH, &screen.before);
    }
}

static void on_fatal(int number)
{
    screen_close(); /* calls nothing that a handler may not */
    sigaction(number, &fatal_before[number], NULL);
    raise(number);
}

/* What ends a process without its exit handlers. */
static void catch_fatal(void)
{
    static const int fatal[] = {SIGQUIT, SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    struct sigaction action = {.sa_handler = on_fatal};
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof fatal / sizeof fatal[0]; i++) {
        sigaction(fatal[i], &action, &fatal_before[fatal[i]]);
    }
}

static void top_enter(void)
{
    struct termios raw = screen.before;
    raw.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
    raw.c_cc[VSUSP] = raw.c_cc[VQUIT] = _POSIX_VDISABLE; /* they come as keys */
    raw.c_cc[VMIN] = 1;
    raw.c_cc[VTIME] = 0;
    if (screen.keys) {
        tcsetattr(STDIN_FILENO, TCSADRAIN, &raw);
    }
    (void)top_write_all(ENTER, strlen(ENTER));
}

/* Takes standard output's terminal, and keys from standard input if that is one. False, and
   nothing has changed: it is none that lines can be drawn over (TERM unset or dumb). Whichever
   way the program exits, what it was like comes back; but not after SIGKILL. */
static bool screen_open(void)
{
    const char *term = getenv("TERM");
    static bool registered;
    if (term == NULL || term[0] == '\0' || strcmp(term, "dumb") == 0 ||
        !isatty(STDOUT_FILENO)) {
        return false;
    }
    struct sigaction action = {.sa_handler = on_change};
    sigemptyset(&action.sa_mask);
    sigaction(SIGWINCH, &action, NULL);
    sigaction(SIGCONT, &action, NULL);
    screen.keys = isatty(STDIN_FILENO) && tcgetattr(STDIN_FILENO, &screen.before) == 0;
    if (!registered) {
        registered = true;
        atexit(screen_close);
        catch_fatal();
    }
    screen.open = true;
    top_enter();
    return true;
}

/* What there is room for; 80 and 24 if the terminal does not say. */
static void screen_size(int *columns, int *lines)
{
    struct winsize window = {0};
    bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) == 0 && window.ws_col > 0 &&
                 window.ws_row > 0;
    *columns = known ? window.ws_col : 80;
    *lines = known ? window.ws_row : 24;
}

/* Shows text, lines that end in '\n', in place of what was there. False: the terminal has gone,
   or the user interrupted. */
static bool screen_draw(const char *text)
{
    char *frame = NULL;
    size_t size = 0;
    FILE *stream = output_require(open_memstream(&frame, &size));
    fputs("\033[H", stream);
    for (const char *line = text; *line != '\0';) {
        int length = (int)strcspn(line, "\n");
        fprintf(stream, "%s%.*s\033[K", line == text ? "" : "\r\n", length, line);
        line += length + (line[length] == '\n');
    }
    fputs("\033[J", stream);
    if (fclose(stream) != 0) {
        output_require(NULL);
    }
    bool good = top_write_all(frame, size);
    free(frame);
    return good;
}

/* Ctrl-Z: the shell gets its terminal as it was. */
static screen_event stop(void)
{
    screen_close();
    raise(SIGTSTP);
    continued = 0;
    screen.open = true;
    top_enter();
    return SCREEN_RESIZED;
}

static screen_event take_key(void)
{
    char key = 0;
    ssize_t n = read(STDIN_FILENO, &key, 1);
    if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN)) {
        screen.keys = false; /* nobody types any more */
    }
    if (n != 1) {
        return SCREEN_TIME;
    }
    switch (key) {
    case 'q':
    case 'Q':
    case CTRL_BACKSLASH:
        return SCREEN_QUIT;
    case ' ':
    case '\n':
        return SCREEN_LOOK;
    default:
        return key == CTRL_Z ? stop() : SCREEN_TIME;
    }
}

/* Signals come while it waits, and at no other moment: none is overlooked. */
static int wait_once(struct pollfd *keys, uint32_t ms)
{
    struct timespec left = {.tv_sec = ms / 1000,
                            .tv_nsec = (long)(ms % 1000) * 1000000};
    sigset_t all, before;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &before);
    int got = -1;
    if (!interrupt_requested() && !resized && !continued) {
        got = ppoll(keys, 1, &left, &before);
    }
    sigprocmask(SIG_SETMASK, &before, NULL);
    return got;
}

/* Waits ms for a key or another size; at once SCREEN_TIME if the user interrupted. Nothing needs
   to be open: then it only waits. */
static screen_event screen_wait(uint32_t ms)
{
    uint64_t end = progress_in_ms(ms);
    screen_event event = SCREEN_TIME;
    do {
        struct pollfd keys = {screen.open && screen.keys ? STDIN_FILENO : -1, POLLIN,
                              0};
        if (wait_once(&keys, progress_left_ms(end)) > 0) {
            event = take_key();
        }
        if (continued && screen.open) {
            top_enter(); /* a shell may have changed it while the process was stopped */
        }
        event = (resized || continued) && screen.open ? SCREEN_RESIZED : event;
        resized = continued = 0;
    } while (event == SCREEN_TIME && !interrupt_requested() &&
             progress_left_ms(end) > 0);
    return event;
}

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

static void top_forget(top *t)
{
    problems_free(&t->problems);
    look_free(&t->look);
    t->error = (fanin_error)FANIN_ERROR_INIT;
}

/* What another look would not mend. */
static bool top_is_final(fanin_status status)
{
    int group = -status / 100;
    return status == FANIN_ERR_CANCELLED || group == 1 || group >= 5;
}

/* Asks the ranks. 0, or the exit status after a message. */
static int top_look_again(top *t, session *s)
{
    top_forget(t);
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
    if (top_is_final(status) || interrupt_requested()) {
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

static char *top_text_of(const top *t, const session *s)
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
static bool top_show(const top *t, const session *s)
{
    if (t->json) {
        output_json_line(t->error.status == FANIN_OK
                             ? look_json(s, &t->look, &t->problems)
                             : failure_json(&t->error));
        return output_errno() == 0;
    }
    char *text = NULL;
    if (t->error.status == FANIN_OK) {
        text = top_text_of(t, s);
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
        if (event == SCREEN_RESIZED && !top_show(t, s)) {
            return false;
        }
    }
}

static int top_watch(top *t, session *s)
{
    long long left = t->count;
    bool more = true;
    int code = 0;
    while (more && code == 0) {
        uint64_t due = progress_in_ms(t->interval_ms);
        code = top_look_again(t, s);
        more = code == 0 && top_show(t, s) && (t->count == 0 || --left > 0) &&
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

static int top_begin(session *s, const invocation *line, void *cookie)
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
    code = top_watch(t, s);
    top_forget(t);
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
    return session_run(self, argc, argv, &line, table, 0, top_begin, &t);
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
