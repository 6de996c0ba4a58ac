/* SPDX-License-Identifier: Apache-2.0 */
#include "progress.h"
#include "output.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { BAR_EVERY_MS = 50, BAR_AFTER_MS = 200, LINE_EVERY_MS = 2000 };

uint64_t progress_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

void progress_start(progress *p, const char *what, bool quiet, bool no_color)
{
    const char *term = getenv("TERM");
    const char *plain = getenv("NO_COLOR");
    bool dumb = term == NULL || strcmp(term, "dumb") == 0;
    *p = (progress){.what = what, .off = quiet};
    p->bar = !dumb && isatty(STDERR_FILENO);
    p->color = p->bar && !no_color && (plain == NULL || plain[0] == '\0');
    p->started_ns = p->printed_ns = progress_now_ns();
}

static void print_bar(const progress *p, uint64_t done, uint64_t total,
                      const char *numbers)
{
    enum { WIDEST = 60 };
    struct winsize size = {0};
    int columns = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0
                      ? size.ws_col
                      : 80;
    int room = columns - (int)strlen(p->what) - (int)strlen(numbers) - 6;
    char bar[WIDEST + 1] = "";
    if (room > WIDEST) {
        room = WIDEST;
    }
    if (room >= 8) {
        int full = total > 0 ? (int)((double)done / (double)total * room) : 0;
        memset(bar, '-', (size_t)room);
        memset(bar, '#', (size_t)(full < room ? full : room));
        bar[room] = '\0';
    }
    fprintf(stderr, "\r%s %s[%s]%s %s\033[K", p->what, p->color ? "\033[32m" : "", bar,
            p->color ? "\033[0m" : "", numbers);
    fflush(stderr);
}

void progress_update(void *cookie, uint64_t done, uint64_t total)
{
    progress *p = cookie;
    uint64_t now = progress_now_ns();
    if (done < p->last_done) { /* the pull began anew */
        p->started_ns = now;
    }
    p->last_done = done;
    uint64_t pause = p->bar ? (p->shown ? BAR_EVERY_MS : BAR_AFTER_MS) : LINE_EVERY_MS;
    if (p->off || (now - p->printed_ns) / 1000000 < pause) {
        return;
    }
    uint64_t spent = now - p->started_ns;
    char left[256] = "";
    char numbers[1024];
    if (done > 0 && total >= done) {
        double rest = (double)spent / (double)done * (double)(total - done);
        snprintf(left, sizeof(left), rest < 1e10 ? ", %.1f s left" : ", %.0f s left",
                 rest / 1e9);
    }
    snprintf(numbers, sizeof(numbers), "%3.0f %%  %s of %s, %s%s",
             total > 0 ? 100.0 * (double)done / (double)total : 100.0,
             output_bytes(done).s, output_bytes(total).s, output_rate(done, spent).s,
             left);
    if (p->bar) {
        print_bar(p, done, total, numbers);
    } else {
        fprintf(stderr, "%s: %s\n", p->what, numbers);
    }
    p->shown = true;
    p->printed_ns = now;
}

void progress_end(progress *p)
{
    if (p->shown && p->bar) {
        fputs("\r\033[K", stderr);
        fflush(stderr);
    }
    p->shown = false;
}
