/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/child.h"
#include "fetch/interrupt.h"
#include "fetch/output.h"
#include "fetch/progress.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* What it is given: where its outputs go, and a pipe that is closed when it ends. */
typedef struct ends {
    int out, err, alive[2];
} ends;

static void become(const char *program, const char *const *words, const ends *e,
                   pid_t parent)
{
    char *const *argv = (char *const *)(uintptr_t)words;
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) {
        _exit(CHILD_ABSENT); /* the parent was faster */
    }
    if (null >= 0 && dup2(null, STDIN_FILENO) >= 0 &&
        dup2(e->out, STDOUT_FILENO) >= 0 && dup2(e->err, STDERR_FILENO) >= 0 &&
        fcntl(e->alive[1], F_SETFD, 0) == 0) {
        (void)(program != NULL ? execvp(program, argv) : execv("/proc/self/exe", argv));
    }
    _exit(CHILD_ABSENT);
}

static char *child_read_back(int file, size_t *size_out)
{
    struct stat st;
    size_t size = fstat(file, &st) == 0 ? (size_t)st.st_size : 0;
    size = size < CHILD_OUTPUT ? size : CHILD_OUTPUT;
    char *text = output_require(malloc(size + 1));
    size_t done = 0;
    while (done < size) {
        ssize_t n = pread(file, text + done, size - done, (off_t)done);
        if (n <= 0) {
            break;
        }
        done += (size_t)n;
    }
    text[done] = '\0';
    *size_out = done;
    return text;
}

/* Whether it ended by itself. A signal that comes before the wait ends it too. */
static bool child_wait_for(const ends *e, uint64_t end_ns)
{
    struct pollfd ended = {.fd = e->alive[0]};
    uint32_t left_ms;
    sigset_t all, before;
    int n = 0;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &before);
    while (n == 0 && !interrupt_requested() &&
           (left_ms = progress_left_ms(end_ns)) > 0) {
        const struct timespec left = {left_ms / 1000, left_ms % 1000 * 1000000L};
        n = ppoll(&ended, 1, &left, &before);
        n = n < 0 && errno == EINTR ? 0 : n;
    }
    sigprocmask(SIG_SETMASK, &before, NULL);
    return n > 0;
}

static void child_main(const char *program, const char *const *words, const ends *e,
                       uint32_t limit_ms, child *out)
{
    int status = 0;
    uint64_t started = progress_now_ns();
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) {
        become(program, words, e, parent);
    }
    close(e->alive[1]);
    if (pid < 0) {
        snprintf(out->why, sizeof out->why, "cannot be started: %s", strerror(errno));
        return;
    }
    bool ended = child_wait_for(e, started + (uint64_t)limit_ms * 1000000);
    if (!ended) {
        kill(pid, SIGKILL);
    }
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    out->ns = progress_now_ns() - started;
    if (!ended && interrupt_requested()) {
        snprintf(out->why, sizeof out->why, "interrupted");
    } else if (!ended) {
        snprintf(out->why, sizeof out->why, "did not end within %.60s",
                 output_age(limit_ms).s);
    } else if (WIFEXITED(status)) {
        out->status = WEXITSTATUS(status);
    } else {
        snprintf(out->why, sizeof out->why, "ended by signal %d", WTERMSIG(status));
    }
}

void child_run(const char *program, const char *const *words, uint32_t limit_ms,
               child *out)
{
    ends e = {.out = memfd_create("out", MFD_CLOEXEC),
              .err = memfd_create("err", MFD_CLOEXEC)};
    *out = (child){.status = -1};
    if (e.out < 0 || e.err < 0 || pipe2(e.alive, O_CLOEXEC) != 0) {
        snprintf(out->why, sizeof out->why, "cannot be started: %s", strerror(errno));
    } else {
        child_main(program, words, &e, limit_ms, out);
        close(e.alive[0]);
        out->out = child_read_back(e.out, &out->out_size);
        out->err = child_read_back(e.err, &out->err_size);
    }
    if (e.out >= 0) {
        close(e.out);
    }
    if (e.err >= 0) {
        close(e.err);
    }
}

void child_free(child *c)
{
    free(c->out);
    free(c->err);
    *c = (child){.status = -1};
}
