/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/screen.h"
#include "fetch/interrupt.h"
#include "fetch/output.h"
#include "fetch/progress.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

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

/* False: it cannot be written, or the user interrupted while it was stopped by Ctrl-S. */
static bool write_all(const char *text, size_t size)
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

static void enter(void)
{
    struct termios raw = screen.before;
    raw.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
    raw.c_cc[VSUSP] = raw.c_cc[VQUIT] = _POSIX_VDISABLE; /* they come as keys */
    raw.c_cc[VMIN] = 1;
    raw.c_cc[VTIME] = 0;
    if (screen.keys) {
        tcsetattr(STDIN_FILENO, TCSADRAIN, &raw);
    }
    (void)write_all(ENTER, strlen(ENTER));
}

bool screen_open(void)
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
    enter();
    return true;
}

void screen_close(void)
{
    if (!screen.open) {
        return;
    }
    screen.open = false;
    (void)write_all(LEAVE, strlen(LEAVE));
    if (screen.keys) {
        tcsetattr(STDIN_FILENO, TCSAFLUSH, &screen.before);
    }
}

void screen_size(int *columns, int *lines)
{
    struct winsize window = {0};
    bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) == 0 && window.ws_col > 0 &&
                 window.ws_row > 0;
    *columns = known ? window.ws_col : 80;
    *lines = known ? window.ws_row : 24;
}

bool screen_draw(const char *text)
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
    bool good = write_all(frame, size);
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
    enter();
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

screen_event screen_wait(uint32_t ms)
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
            enter(); /* a shell may have changed it while the process was stopped */
        }
        event = (resized || continued) && screen.open ? SCREEN_RESIZED : event;
        resized = continued = 0;
    } while (event == SCREEN_TIME && !interrupt_requested() &&
             progress_left_ms(end) > 0);
    return event;
}
