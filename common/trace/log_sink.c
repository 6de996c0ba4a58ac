/* SPDX-License-Identifier: Apache-2.0 */
#include "log_sink.h"

#include "error_set.h"
#include "library_table.h"
#include "thread.h"
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* A kilobyte each, touched as they are needed. */
#define LINES 1024
/* How long the end waits for what is to be written yet. */
#define LEAVE_MS 500

struct log_sink {
    int fd;
    fanin_log_ring *ring;
    pthread_t thread;
    pthread_mutex_t lock; /* of what follows; never held while anything is written */
    pthread_cond_t turn;
    bool left; /* the thread's word */
    bool is_joined;
};

/* Every signal is blocked here: a reader that has gone kills nobody by SIGPIPE. One write a line:
   those of
   processes that append to one file stay whole. A descriptor that somebody has made non-blocking is
   waited for. */
static void write_line(int fd, const char *text, size_t size)
{
    struct pollfd room = {.fd = fd, .events = POLLOUT};
    while (write(fd, text, size) < 0) {
        if (errno == EAGAIN)
            (void)poll(&room, 1, -1);
        else if (errno != EINTR)
            return; /* a disk that is full is no failure */
    }
}

static void log_sink_tell(int fd, const fanin_log_line *line)
{
    static const char *const names[] = {"", "error", "warn", "info", "debug"};
    const time_t seconds = (time_t)(line->time_ns / UINT64_C(1000000000));
    char text[1280], day[32];
    struct tm parts;
    gmtime_r(&seconds, &parts);
    strftime(day, sizeof day, "%Y-%m-%dT%H:%M:%S", &parts);
    int size = snprintf(text, sizeof text, "%s.%03uZ fanin[%d] %s %s: %s\n", day,
                        (unsigned)(line->time_ns / 1000000 % 1000), (int)getpid(),
                        names[line->level], line->event, line->message);
    if (size > 0 && size < (int)sizeof text)
        write_line(fd, text, (size_t)size);
}

static void *log_sink_work(void *cookie)
{
    log_sink *s = cookie;
    fanin_log_line line = FANIN_LOG_LINE_INIT;
    fanin_status status;
    pthread_setname_np(pthread_self(), "fanin-log");
    while ((status = fanin_log_ring_read(s->ring, UINT32_MAX, &line)) == FANIN_OK ||
           status == FANIN_ERR_TIMEOUT)
        if (status == FANIN_OK)
            log_sink_tell(s->fd, &line);
    pthread_mutex_lock(&s->lock);
    s->left = true;
    pthread_cond_signal(&s->turn);
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static void log_sink_release(log_sink *s)
{
    fanin_log_ring_destroy(&s->ring);
    pthread_cond_destroy(&s->turn);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

log_sink *log_sink_new(int fd, fanin_log_level level, fanin_error *error)
{
    log_sink *s = calloc(1, sizeof *s);
    if (!s) {
        (void)error_set_memory(error);
        return NULL;
    }
    s->fd = fd;
    pthread_mutex_init(&s->lock, NULL);
    condition_init(&s->turn);
    pin_own_library(); /* the thread may still wait for a reader when the library is unloaded */
    fanin_status status = fanin_log_ring_create(LINES, level, &s->ring, error);
    if (status == FANIN_OK && worker_thread_start(&s->thread, log_sink_work, s))
        return s;
    const error_place place = {.phase = "log", .remedy = THREAD_REMEDY};
    if (status == FANIN_OK)
        (void)error_set(error, FANIN_ERR_LIMIT, &place,
                        "cannot start the thread that writes the log of FANIN_LOG");
    log_sink_release(s);
    return NULL;
}

fanin_log_ring *log_sink_ring(const log_sink *sink)
{
    return sink->ring;
}

void log_sink_close(log_sink *s)
{
    const deadline until = deadline_in_ms(LEAVE_MS);
    fanin_log_ring_close(s->ring);
    pthread_mutex_lock(&s->lock);
    while (!s->left && condition_wait(&s->turn, &s->lock, until))
        ;
    bool left = s->left;
    pthread_mutex_unlock(&s->lock);
    if (left)
        pthread_join(s->thread, NULL);
    s->is_joined = left;
}

void log_sink_free(log_sink *s)
{
    fanin_log_ring_close(s->ring);
    if (!s->is_joined)
        pthread_join(s->thread, NULL);
    log_sink_release(s);
}
