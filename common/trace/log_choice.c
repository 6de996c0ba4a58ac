/* SPDX-License-Identifier: Apache-2.0 */
#include "log_choice.h"
#include "error_set.h"
#include "load_lock.h"
#include "thread.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* ----------------------------------------------------------------------- log sink */

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

/* --------------------------------------------------------------------- log choice */

/* Of a process: what FANIN_LOG said when it was first asked for. Stays until the process ends. */
typedef struct choice {
    pid_t pid;
    int fd; /* -1: standard error */
    log_sink *sink;
    struct choice *parents; /* whose sink is not this process's */
} choice;

static _Atomic(choice *) chosen;

/* The level in front of the comma; 0: it is none. */
static fanin_log_level log_choice_level_of(const char *text, size_t size)
{
    static const struct {
        const char *name;
        fanin_log_level level;
    } levels[] = {{"debug", FANIN_LOG_DEBUG},
                  {"info", FANIN_LOG_INFO},
                  {"warn", FANIN_LOG_WARNING}};
    for (size_t i = 0; i < sizeof levels / sizeof *levels; i++) {
        if (strlen(levels[i].name) == size && strncmp(levels[i].name, text, size) == 0)
            return levels[i].level;
    }
    return 0;
}

static fanin_status log_choice_refuse_file(const char *file, int code,
                                           fanin_error *error)
{
    const error_place place = {
        .phase = "log",
        .remedy = error_remedy(code, "let FANIN_LOG name a file that can be written")};
    return error_set_errno(error, FANIN_ERR_IO, code, &place,
                           "cannot append to FANIN_LOG's file %.200s", file);
}

/* Nothing is told to another user's file or pipe, nor where that one's link leads to. Terminals and
   /dev/null belong to whom they may: the kernel says who writes there. A pipe that nobody reads is
   not waited for; once it is open, who writes there is. */
static fanin_status log_choice_open_file(const char *file, int *out, fanin_error *error)
{
    const error_place place = {.phase = "log",
                               .remedy = "let FANIN_LOG name a file of this user"};
    struct stat there;
    int fd = open(file,
                  O_WRONLY | O_APPEND | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK |
                      O_NOCTTY,
                  0600);
    if (fd < 0 || fstat(fd, &there) != 0) {
        int code = errno;
        if (fd >= 0)
            close(fd);
        return log_choice_refuse_file(file, code, error);
    }
    if (!S_ISCHR(there.st_mode) && there.st_uid != geteuid() && there.st_uid != 0) {
        close(fd);
        return error_set(error, FANIN_ERR_AUTH, &place,
                         "FANIN_LOG's file %.200s belongs to another user", file);
    }
    (void)fcntl(fd, F_SETFL, O_APPEND);
    *out = fd;
    return FANIN_OK;
}

fanin_status fanin_log_choice(const char *text, fanin_log_level *level, int *descriptor,
                              fanin_error *error)
{
    const error_place place = {.phase = "log",
                               .remedy = "set it to debug, info or warn, or to such as "
                                         "info,FILE; or unset it"};
    if (!text || !level || !descriptor)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "no text, or no place for the level or descriptor, is given");
    size_t size = strcspn(text, ",");
    fanin_log_level most = log_choice_level_of(text, size);
    if (most == 0 || (text[size] == ',' && !text[size + 1]))
        return error_set(error, FANIN_ERR_ARGUMENT, &place,
                         "FANIN_LOG=%.200s is not debug, info or warn, with or without "
                         "a file after a comma",
                         text);
    standard_descriptors_hold();
    int fd = -1;
    fanin_status status = text[size] == ','
                              ? log_choice_open_file(text + size + 1, &fd, error)
                              : FANIN_OK;
    if (status == FANIN_OK) {
        *level = most;
        *descriptor = fd;
    }
    return status;
}

static void close_choice(choice *c)
{
    if (c->sink)
        log_sink_free(c->sink);
    if (c->fd >= 0)
        close(c->fd);
    free(c);
}

static fanin_status make_choice(const char *text, choice **out, fanin_error *error)
{
    fanin_log_level level = 0;
    choice *made = calloc(1, sizeof *made);
    if (!made)
        return error_set_memory(error);
    made->pid = getpid();
    made->fd = -1;
    fanin_error why = FANIN_ERROR_INIT;
    fanin_status status = fanin_log_choice(text, &level, &made->fd, &why);
    if (status == FANIN_OK) {
        made->sink =
            log_sink_new(made->fd >= 0 ? made->fd : STDERR_FILENO, level, &why);
        status = why.status;
    }
    if (status == FANIN_OK) {
        *out = made;
        return FANIN_OK;
    }
    close_choice(made);
    error_copy(error, &why);
    return status;
}

static bool is_same_file(int one, int other)
{
    struct stat a, b;
    return fstat(one, &a) == 0 && fstat(other, &b) == 0 && a.st_dev == b.st_dev &&
           a.st_ino == b.st_ino;
}

/* Whoever is first, for all: no lock, which a forked child could find held. The thread that writes
   stayed with the parent, so that a child makes its own. */
static fanin_status log_choice_choose(const char *text, choice **out,
                                      fanin_error *error)
{
    choice *now = atomic_load(&chosen), *made = NULL;
    if (now && now->pid == getpid()) {
        *out = now;
        return FANIN_OK;
    }
    fanin_status status = make_choice(text, &made, error);
    if (status != FANIN_OK)
        return status;
    made->parents = now;
    if (atomic_compare_exchange_strong(&chosen, &now, made)) {
        /* The child may have closed it, and use the number for what is its own. */
        if (now && is_same_file(now->fd, made->fd))
            close(now->fd);
        *out = made;
        return FANIN_OK;
    }
    close_choice(made);
    *out = now;
    return FANIN_OK;
}

fanin_status log_choose(fanin_log_fn *fn, void **cookie, fanin_error *error)
{
    const char *text = getenv("FANIN_LOG");
    choice *is = NULL;
    if (*fn || !text || !text[0])
        return FANIN_OK;
    fanin_status status = log_choice_choose(text, &is, error);
    if (status != FANIN_OK)
        return status;
    *fn = fanin_log_ring_write;
    *cookie = log_sink_ring(is->sink);
    return FANIN_OK;
}

logger log_of(fanin_log_fn fn, void *cookie)
{
    logger log = {.fn = fn, .cookie = cookie};
    if (fn == fanin_log_ring_write && cookie)
        log.most = log_ring_level(cookie);
    return log;
}

/* At exit, and when the library is unloaded. */
__attribute__((destructor)) static void finish(void)
{
    choice *is = atomic_load(&chosen);
    if (is && is->pid == getpid())
        log_sink_close(is->sink);
}
