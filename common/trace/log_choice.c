/* SPDX-License-Identifier: Apache-2.0 */
#include "log_choice.h"

#include "error_set.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* Of the process: what FANIN_LOG said when it was first asked for. */
typedef struct sink {
    int fd;
    fanin_log_level most;
} sink;

static _Atomic(sink *) chosen;

/* A pipe whose reader has gone ends no program that did not ask for a log there: the signal, which is the calling
   thread's, is taken back. One that waited before is the program's. */
static void write_quietly(int fd, const char *line, size_t size)
{
    const struct timespec none = {0};
    sigset_t broken, waiting, before;
    sigemptyset(&broken);
    sigaddset(&broken, SIGPIPE);
    sigpending(&waiting);
    pthread_sigmask(SIG_BLOCK, &broken, &before);
    ssize_t n = write(fd, line, size); /* a log that is full is no failure */
    if (n < 0 && errno == EPIPE && sigismember(&waiting, SIGPIPE) == 0)
        while (sigtimedwait(&broken, NULL, &none) < 0 && errno == EINTR)
            ;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* One write() a line: lines of several threads, and of processes that append to one file, stay whole. */
static void write_line(void *cookie, fanin_log_level level, const char *event,
                       const char *message)
{
    static const char *const names[] = {"", "error", "warn", "info", "debug"};
    const sink *to = cookie;
    char line[1280], day[32];
    struct timespec now;
    struct tm parts;
    if (level > to->most)
        return;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &parts);
    strftime(day, sizeof day, "%Y-%m-%dT%H:%M:%S", &parts);
    int size =
        snprintf(line, sizeof line, "%s.%03ldZ fanin[%d] %s %s: %s\n", day,
                 now.tv_nsec / 1000000, (int)getpid(), names[level], event, message);
    int saved = errno;
    if (size > 0 && size < (int)sizeof line)
        write_quietly(to->fd, line, (size_t)size);
    errno = saved;
}

/* The level in front of the comma; 0: it is none. */
static fanin_log_level level_of(const char *text, size_t size)
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

static fanin_status refuse_file(const char *file, int code, fanin_error *error)
{
    const error_place place = {
        .phase = "log", .remedy = "let FANIN_LOG name a file that can be written"};
    return error_set_errno(error, FANIN_ERR_IO, code, &place,
                           "cannot append to FANIN_LOG's file %.200s", file);
}

/* Nothing is told to another user's file or pipe, nor where that one's link leads to. Terminals and /dev/null
   belong to whom they may: the kernel says who writes there. */
static fanin_status open_file(const char *file, int *out, fanin_error *error)
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
        return refuse_file(file, code, error);
    }
    if (!S_ISCHR(there.st_mode) && there.st_uid != geteuid() && there.st_uid != 0) {
        close(fd);
        return error_set(error, FANIN_ERR_AUTH, &place,
                         "FANIN_LOG's file %.200s belongs to another user", file);
    }
    *out = fd;
    return FANIN_OK;
}

static fanin_status read_choice(const char *text, sink *out, fanin_error *error)
{
    const error_place place = {.phase = "log",
                               .remedy = "set it to debug, info or warn, or to such as "
                                         "info,FILE; or unset it"};
    size_t size = strcspn(text, ",");
    fanin_log_level most = level_of(text, size);
    int fd = STDERR_FILENO;
    if (most == 0 || (text[size] == ',' && !text[size + 1]))
        return error_set(error, FANIN_ERR_ARGUMENT, &place,
                         "FANIN_LOG=%.200s is not debug, info or warn, with or without "
                         "a file after a comma",
                         text);
    fanin_status status =
        text[size] == ',' ? open_file(text + size + 1, &fd, error) : FANIN_OK;
    if (status == FANIN_OK)
        *out = (sink){fd, most};
    return status;
}

/* Whoever is first, for all: no lock, which a forked child could find held. */
static fanin_status make_choice(const char *text, sink **out, fanin_error *error)
{
    sink *none = NULL, *made = malloc(sizeof *made);
    fanin_status status =
        made ? read_choice(text, made, error) : error_set_memory(error);
    if (status == FANIN_OK && atomic_compare_exchange_strong(&chosen, &none, made)) {
        *out = made;
        return FANIN_OK;
    }
    if (status == FANIN_OK && made->fd != STDERR_FILENO)
        close(made->fd);
    free(made);
    *out = none;
    return status;
}

fanin_status log_choose(fanin_log_fn *fn, void **cookie, fanin_error *error)
{
    const char *text = getenv("FANIN_LOG");
    if (*fn || !text || !text[0])
        return FANIN_OK;
    sink *to = atomic_load(&chosen);
    fanin_status status = to ? FANIN_OK : make_choice(text, &to, error);
    if (status != FANIN_OK)
        return status;
    *fn = write_line;
    *cookie = to;
    return FANIN_OK;
}

logger log_of(fanin_log_fn fn, void *cookie)
{
    logger log = {.fn = fn, .cookie = cookie};
    if (fn == write_line)
        log.most = ((const sink *)cookie)->most;
    else if (fn == fanin_log_ring_write && cookie)
        log.most = log_ring_level(cookie);
    return log;
}
