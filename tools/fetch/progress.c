/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/progress.h"
#include "fetch/output.h"
#include "fetch/missing.h"
#include "clock.h"
#include "thread.h"

#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { BAR_EVERY_MS = 50, BAR_AFTER_MS = 200, LINE_EVERY_MS = 2000 };

void progress_start(progress *p, const char *what, bool quiet, bool no_color)
{
    const char *term = getenv("TERM");
    const char *plain = getenv("NO_COLOR");
    bool dumb = term == NULL || strcmp(term, "dumb") == 0;
    *p = (progress){.what = what, .off = quiet};
    p->bar = !dumb && isatty(STDERR_FILENO);
    p->color = p->bar && !no_color && (plain == NULL || plain[0] == '\0');
    p->started_ns = p->printed_ns = clock_ns();
}

/* ", rank 5 10.0.0.3:6005: 0 B of 2.10 GB, no byte for 12 s", or less of it. */
static void append_waited_for(const fanin_rank_progress *r, bool all, char *out,
                              size_t size)
{
    output_append(out, size, ", rank %d", (int)r->rank);
    if (all)
        output_append(out, size, " %s: %s of %s", r->address,
                      output_bytes(r->bytes_done).s, output_bytes(r->bytes_total).s);
    output_append(out, size, "%s no byte for %" PRIu64 " s", all ? "," : ":",
                  r->quiet_ms / 1000);
}

/* " 45 %  1.2 MB of 3.4 MB, 5.6 GB/s, 0.1 s left", or the beginning of it; while a rank is waited
   for that one instead of rate and time. */
static void progress_text(const progress_state *at, progress_parts parts, char *out,
                          size_t size)
{
    double share = at->total > 0 ? (double)at->done / (double)at->total : 1.0;
    snprintf(out, size, "%3.0f %%", 100.0 * share);
    if (parts >= PROGRESS_AMOUNT)
        output_append(out, size, "  %s of %s", output_bytes(at->done).s,
                      output_bytes(at->total).s);
    if (at->waits_for != NULL && parts >= PROGRESS_RATE) {
        append_waited_for(at->waits_for, parts == PROGRESS_LEFT, out, size);
        return;
    }
    if (parts >= PROGRESS_RATE)
        output_append(out, size, ", %s", output_rate(at->done, at->spent_ns).s);
    if (parts == PROGRESS_LEFT && at->done > 0 && at->total >= at->done) {
        double rest =
            (double)at->spent_ns / (double)at->done * (double)(at->total - at->done);
        output_append(out, size, rest < 1e10 ? ", %.1f s left" : ", %.0f s left",
                      rest / 1e9);
    }
}

void progress_line(const char *what, const progress_state *at, int columns, bool color,
                   char *out, size_t size)
{
    enum { NARROWEST_BAR = 8, WIDEST_BAR = 60, FRAME = 4 }; /* two blanks, brackets */
    char numbers[PROGRESS_TEXT];
    char bar[WIDEST_BAR + 1] = "";
    int name = (int)strlen(what) + 1;
    int parts = PROGRESS_LEFT;
    columns--; /* the last one would wrap some terminals */
    progress_text(at, (progress_parts)parts, numbers, sizeof numbers);
    while (parts > PROGRESS_SHARE && name + (int)strlen(numbers) > columns)
        progress_text(at, (progress_parts)--parts, numbers, sizeof numbers);
    if (name + (int)strlen(numbers) > columns)
        name = 0;
    int room = columns - name - (int)strlen(numbers) - FRAME + 1;
    if (name == 0 || room < NARROWEST_BAR) {
        snprintf(out, size, "%s%s%.*s", name > 0 ? what : "", name > 0 ? " " : "",
                 columns > name ? columns - name : 0, numbers);
        return;
    }
    room = room < WIDEST_BAR ? room : WIDEST_BAR;
    double share = at->total > 0 ? (double)at->done / (double)at->total : 0.0;
    int full = (int)(share * room);
    memset(bar, '-', (size_t)room);
    memset(bar, '#', (size_t)(full < room ? full : room));
    snprintf(out, size, "%s %s[%s]%s %s", what, color ? "\033[32m" : "", bar,
             color ? "\033[0m" : "", numbers);
}

static int terminal_columns(void)
{
    struct winsize window = {0};
    return ioctl(STDERR_FILENO, TIOCGWINSZ, &window) == 0 && window.ws_col > 0
               ? window.ws_col
               : 80;
}

void progress_update(progress *p, uint64_t done, uint64_t total,
                     const fanin_rank_progress *waits_for)
{
    uint64_t now = clock_ns();
    char text[PROGRESS_TEXT];
    if (done < p->last_done) /* the pull began anew */
        p->started_ns = now;
    p->last_done = done;
    uint64_t pause = p->bar ? (p->shown ? BAR_EVERY_MS : BAR_AFTER_MS) : LINE_EVERY_MS;
    if (p->off || (now - p->printed_ns) / 1000000 < pause)
        return;
    const progress_state at = {done, total, now - p->started_ns, waits_for};
    if (p->bar) {
        progress_line(p->what, &at, terminal_columns(), p->color, text, sizeof text);
        fprintf(stderr, "\r%s\033[K", text);
        fflush(stderr);
    } else {
        progress_text(&at, PROGRESS_LEFT, text, sizeof text);
        terminal_tell("%s: %s", p->what, text);
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

enum { TELL_EVERY_MS = 2000, ASK_MS = 1000 };

struct waiting {
    const session *session;
    session own; /**< the same target with another client */
    uint64_t step;
    pthread_t thread;
    int ended; /**< an eventfd: the thread is to end */
    atomic_bool hushed;
};

typedef struct behind {
    const waiting *waiting;
    fanin_rank_state *ranks; /**< room for all */
    size_t count;
} behind;

static bool waiting_on_publication(void *cookie, const fanin_publication_info *info)
{
    behind *b = cookie;
    const waiting *w = b->waiting;
    bool there = info->state == FANIN_PUBLICATION_STABLE && info->step >= w->step;
    if (!there && strcmp(info->name, w->session->publication) == 0 &&
        b->count < w->session->target.count)
        b->ranks[b->count++] = (fanin_rank_state){.struct_size = sizeof b->ranks[0],
                                                  .rank = info->rank,
                                                  .state = info->state,
                                                  .step = info->step,
                                                  .state_age_ms = info->state_age_ms};
    return true;
}

static void tell_missing(const waiting *w)
{
    missing m;
    missing_gather(&w->own, &m);
    for (uint32_t i = 0; i < m.count; i++)
        terminal_tell("nixl-fetch: waiting for %s: %s", missing_name(&m.ranks[i]).s,
                      m.ranks[i].message);
    missing_free(&m);
}

static void waiting_tell(const waiting *w)
{
    behind b = {.waiting = w,
                .ranks = calloc(w->session->target.count + 1, sizeof b.ranks[0])};
    char text[1024];
    if (b.ranks != NULL &&
        fanin_client_list(w->own.client, ASK_MS, waiting_on_publication, &b, NULL) ==
            FANIN_OK &&
        !atomic_load(&w->hushed)) {
        rank_states_text(b.ranks, b.count, text, sizeof text);
        if (b.count > 0)
            terminal_tell("nixl-fetch: waiting for step %" PRIu64 " of %s: %s", w->step,
                          w->session->publication, text);
        tell_missing(w);
    }
    free(b.ranks);
}

/* False: the pull is over. */
static bool pause_ms(waiting *w, int ms)
{
    struct pollfd ended = {w->ended, POLLIN, 0};
    return poll(&ended, 1, ms) <= 0 && !atomic_load(&w->hushed);
}

static void *waiting_run(void *cookie)
{
    waiting *w = cookie;
    fanin_error error = FANIN_ERROR_INIT;
    bool connected = false;
    while (pause_ms(w, TELL_EVERY_MS)) {
        w->own.end_ns = deadline_in_ms(ASK_MS);
        connected = connected || session_try(&w->own, &error) == FANIN_OK;
        if (connected)
            waiting_tell(w);
    }
    return NULL;
}

static void destroy(waiting *w)
{
    fanin_client_destroy(&w->own.client);
    if (w->ended >= 0)
        close(w->ended);
    free(w);
}

waiting *waiting_start(const session *s, uint64_t step)
{
    waiting *w = calloc(1, sizeof *w);
    fanin_client_config config = s->config; /* but for what it has no use of */
    config.no_ucx = true;
    config.path = FANIN_PATH_AUTO;
    config.log = NULL;
    config.log_cookie = NULL;
    if (w == NULL)
        return NULL;
    w->session = s;
    w->own.target = s->target; /* the session's; it outlives the thread */
    w->step = step > 0 ? step : 1;
    w->ended = eventfd(0, EFD_CLOEXEC);
    if (w->ended < 0 ||
        fanin_client_create(&config, &w->own.client, NULL) != FANIN_OK ||
        thread_start(&w->thread, "waiting", waiting_run, w, NULL) != FANIN_OK) {
        destroy(w);
        return NULL;
    }
    return w;
}

void waiting_hush(waiting *w)
{
    if (w != NULL)
        atomic_store(&w->hushed, true);
}

void waiting_end(waiting **w_inout)
{
    waiting *w = *w_inout;
    if (w == NULL)
        return;
    (void)eventfd_write(w->ended, 1);
    waiting_hush(w);
    fanin_client_cancel(w->own.client);
    pthread_join(w->thread, NULL);
    destroy(w);
    *w_inout = NULL;
}
