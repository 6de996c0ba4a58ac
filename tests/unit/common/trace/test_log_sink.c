/* SPDX-License-Identifier: Apache-2.0 */
/* A log whose reader has stopped: nobody who logs waits for it, and what is missing is told when it
   goes on. */
#include "clock.h"
#include "log_choice.h"
#include "testing.h"
#include <fcntl.h>
#include <pthread.h>

/* More than a pipe of a megabyte and the ring hold. */
enum { LINES = 20000, LONGEST_S = 30 };

static int ends[2];

static int set_up(void **state)
{
    return pipe(ends);
}

static int tear_down(void **state)
{
    close(ends[0]);
    return 0;
}

#define CASE(name) TEST_WITH(name, set_up, tear_down)

static log_sink *sink_of(fanin_log_level level)
{
    fanin_error error = FANIN_ERROR_INIT;
    log_sink *sink = log_sink_new(ends[1], level, &error);
    assert_ok(error.status, error);
    assert_non_null(sink);
    return sink;
}

static void write_lines(log_sink *sink)
{
    for (int i = 0; i < LINES; i++) {
        char text[32];
        snprintf(text, sizeof text, "number %d", i);
        fanin_log_ring_write(log_sink_ring(sink), FANIN_LOG_WARNING, "line", text);
    }
}

/* Who read, until the pipe's other end was closed: lines that came, in order and whole, and how
   many were told to be missing. */
typedef struct reading {
    long came, lost;
    bool wrong;
} reading;

static void *read_all(void *cookie)
{
    reading *r = cookie;
    char line[2048];
    int next = 0, number;
    FILE *from = fdopen(dup(ends[0]), "r");
    while (fgets(line, sizeof line, from)) {
        const char *at = strstr(line, " warn line: number ");
        const char *lost = strstr(line, " warn log-lost: ");
        if (at && sscanf(at, " warn line: number %d\n", &number) == 1 &&
            number >= next) {
            next = number + 1;
            r->came++;
        } else if (lost && strstr(lost, " log lines were lost")) {
            r->lost += strtol(lost + strlen(" warn log-lost: "), NULL, 10);
        } else {
            r->wrong = true;
        }
    }
    fclose(from);
    return NULL;
}

static void expect_all(log_sink *sink, reading *r)
{
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, read_all, r), 0);
    log_sink_free(sink);
    close(ends[1]);
    pthread_join(thread, NULL);
    assert_false(r->wrong);
    assert_int_equal(r->came + r->lost, LINES);
}

CASE(nobody_waits_for_a_reader_that_has_stopped)
{
    reading r = {0};
    log_sink *sink = sink_of(FANIN_LOG_INFO);
    const uint64_t began = clock_ns();
    write_lines(sink);
    assert_true(clock_ns() - began < LONGEST_S * UINT64_C(1000000000));
    expect_all(sink, &r);
    assert_true(r.lost > 0 && r.came > 0);
}

/* As a parent's may be that gave it as standard error. */
CASE(a_pipe_that_does_not_block_loses_nothing_uncounted)
{
    reading r = {0};
    assert_int_equal(fcntl(ends[1], F_SETFL, O_NONBLOCK), 0);
    log_sink *sink = sink_of(FANIN_LOG_INFO);
    write_lines(sink);
    expect_all(sink, &r);
}

/* The pipe holds less than the ring does, of which all may be left when the end comes. */
CASE(the_end_waits_half_a_second)
{
    assert_true(fcntl(ends[1], F_SETPIPE_SZ, 4096) > 0);
    log_sink *sink = sink_of(FANIN_LOG_INFO);
    write_lines(sink);
    const uint64_t began = clock_ns();
    log_sink_close(sink);
    const uint64_t took = clock_ns() - began;
    assert_true(took >= UINT64_C(400000000) && took < UINT64_C(10000000000));
    reading r = {0};
    expect_all(sink, &r);
}

CASE(a_level_and_a_line_as_they_are_written)
{
    char text[256] = "";
    log_sink *sink = sink_of(FANIN_LOG_INFO);
    fanin_log_ring_write(log_sink_ring(sink), FANIN_LOG_DEBUG, "fine", "print");
    fanin_log_ring_write(log_sink_ring(sink), FANIN_LOG_ERROR, "event",
                         "what happened");
    log_sink_close(sink);
    log_sink_free(sink);
    close(ends[1]);
    assert_true(read(ends[0], text, sizeof text - 1) > 0);
    char words[64];
    snprintf(words, sizeof words, "Z fanin[%d] error event: what happened\n",
             (int)getpid());
    assert_non_null(strstr(text, words));
    assert_null(strstr(text, "fine"));
    assert_int_equal(strspn(text, "0123456789-:.T"), strlen("2026-01-01T00:00:00.000"));
}
