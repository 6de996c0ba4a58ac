/* SPDX-License-Identifier: Apache-2.0 */
/* Where FANIN_LOG's lines go: readers that leave kill nobody, and each process has its own. What
   other users own test_log.py shows. */
#include "log_choice.h"
#include "testing.h"
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

/* The choice is the process's for good: each case makes it in a child of its own. */
static char folder[] = "/tmp/log-choice-XXXXXX", place[sizeof folder + 8], choice[80];
static int reader; /* of the child's */

static int set_up(void **state)
{
    strcpy(folder + sizeof folder - 7, "XXXXXX");
    assert_non_null(mkdtemp(folder));
    snprintf(place, sizeof place, "%s/pipe", folder);
    snprintf(choice, sizeof choice, "info,%s", place);
    assert_int_equal(mkfifo(place, 0600), 0);
    return 0;
}

static int tear_down(void **state)
{
    unlink(place);
    return rmdir(folder);
}

#define CASE(name) TEST_WITH(name, set_up, tear_down)

/* Runs @p what in a child, which alone reads the pipe and has the default for SIGPIPE; it returns
   true. */
static void expect_in_child(bool (*what)(void))
{
    int status;
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        signal(SIGPIPE, SIG_DFL);
        setenv("FANIN_LOG", choice, 1);
        reader = open(place, O_RDONLY | O_NONBLOCK);
        exit(reader >= 0 && what() ? 0 : 1);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_false(WIFSIGNALED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

static bool choose(logger *out)
{
    fanin_log_fn fn = NULL;
    void *cookie = NULL;
    if (log_choose(&fn, &cookie, NULL) != FANIN_OK)
        return false;
    *out = log_of(fn, cookie);
    return true;
}

/* Within ten seconds. */
static bool has_come(const char *text)
{
    char line[256] = "";
    struct pollfd come = {.fd = reader, .events = POLLIN};
    return poll(&come, 1, 10000) == 1 && read(reader, line, sizeof line - 1) > 0 &&
           strstr(line, text);
}

/* A fork while a thread begins would leave a sanitizer's allocator locked in the child. */
static bool choose_and_hear(logger *out)
{
    if (!choose(out))
        return false;
    log_write(out, FANIN_LOG_INFO, "begun", "the thread writes");
    return has_come("info begun: the thread writes\n");
}

/* The end of the process waits for what is to be written. */
static bool write_to_nobody(void)
{
    logger log;
    if (!choose(&log))
        return false;
    log_write(&log, FANIN_LOG_INFO, "first", "somebody reads");
    bool came = has_come("info first: somebody reads\n");
    close(reader);
    log_write(&log, FANIN_LOG_INFO, "second", "nobody does");
    return came;
}

/* The thread that writes stays with the parent: a child has its own, and so does a child's child.
   */
static bool write_in_children(void)
{
    logger log;
    if (!choose_and_hear(&log))
        return false;
    for (int generation = 1; generation <= 2; generation++) {
        pid_t child = fork();
        int status = 1;
        if (child != 0)
            return waitpid(child, &status, 0) == child && status == 0;
        log_write(&log, FANIN_LOG_INFO, "parents", "which is not heard here");
        char words[64];
        snprintf(words, sizeof words, "fanin[%d] info born: here\n", (int)getpid());
        if (!choose(&log))
            exit(2);
        log_write(&log, FANIN_LOG_INFO, "born", "here");
        if (!has_come(words))
            exit(3);
    }
    exit(0);
}

/* As a daemon does: all that it had is closed, and the numbers are its own. */
static bool begin_anew(void)
{
    logger log;
    for (int fd = 3; fd < 64; fd++)
        close(fd);
    reader = open(place, O_RDONLY | O_NONBLOCK);
    while (open("/dev/null", O_RDONLY) < 63)
        ;
    if (!choose(&log))
        return false;
    bool all = true;
    for (int fd = 3; fd < 64; fd++)
        all = all && fcntl(fd, F_GETFD) >= 0;
    return all;
}

static bool begin_anew_in_a_child(void)
{
    logger log;
    int status = 1;
    if (!choose_and_hear(&log))
        return false;
    pid_t child = fork();
    if (child == 0)
        exit(begin_anew() ? 0 : 1);
    return waitpid(child, &status, 0) == child && status == 0;
}

CASE(a_reader_that_leaves_kills_nobody)
{
    expect_in_child(write_to_nobody);
}

/* Whose own children begin a thread each. */
static void expect_of_children(bool (*what)(void))
{
#ifdef __has_feature
#if __has_feature(thread_sanitizer)
    skip(); /* it lets no child of several threads begin one */
#endif
#endif
    expect_in_child(what);
}

CASE(a_forked_child_has_a_log_of_its_own)
{
    expect_of_children(write_in_children);
}

CASE(what_a_daemon_opens_is_its_own)
{
    expect_of_children(begin_anew_in_a_child);
}
