/* SPDX-License-Identifier: Apache-2.0 */
/* The ring of log messages: order, full, level, cut texts, close, time-out, threads. */
#include "clock.h"
#include "testing.h"
#include "text.h"

#include <fanin/log.h>

#include <pthread.h>
#include <time.h>

static fanin_log_ring *ring_of(uint32_t lines, fanin_log_level level)
{
    fanin_log_ring *ring = NULL;
    assert_works(fanin_log_ring_create(lines, level, &ring, ERROR));
    assert_non_null(ring);
    return ring;
}

TEST(messages_come_out_in_order)
{
    fanin_log_ring *ring = ring_of(3, FANIN_LOG_DEBUG);
    fanin_log_line line = FANIN_LOG_LINE_INIT;
    struct timespec before, after;
    clock_gettime(CLOCK_REALTIME, &before);
    /* More than the ring holds, so that its end is passed several times. */
    for (int i = 0; i < 10; i++) {
        char text[32];
        snprintf(text, sizeof text, "message %d", i);
        fanin_log_fn fn = fanin_log_ring_write;
        fn(ring, FANIN_LOG_INFO, "even", text);
        fn(ring, FANIN_LOG_ERROR, "odd", text);
        for (int k = 0; k < 2; k++) {
            memset((char *)&line + sizeof line.struct_size, 0xff,
                   sizeof line - sizeof line.struct_size);
            assert_int_equal(fanin_log_ring_read(ring, 0, &line), FANIN_OK);
            assert_int_equal(line.struct_size, sizeof line);
            assert_int_equal(line.level, k ? FANIN_LOG_ERROR : FANIN_LOG_INFO);
            assert_string_equal(line.event, k ? "odd" : "even");
            assert_string_equal(line.message, text);
            assert_int_equal(line.lost, 0);
        }
    }
    clock_gettime(CLOCK_REALTIME, &after);
    assert_in_range(line.time_ns / 1000000000, before.tv_sec, after.tv_sec);
    assert_int_equal(fanin_log_ring_read(ring, 0, &line), FANIN_ERR_TIMEOUT);
    fanin_log_ring_destroy(&ring);
    assert_null(ring);
}

static void expect_lost(fanin_log_ring *ring, uint32_t count)
{
    fanin_log_line line = FANIN_LOG_LINE_INIT;
    char words[64];
    snprintf(words, sizeof words, "%u log lines were lost", count);
    assert_int_equal(fanin_log_ring_read(ring, 0, &line), FANIN_OK);
    assert_string_equal(line.event, "log-lost");
    assert_int_equal(line.level, FANIN_LOG_WARNING);
    assert_int_equal(line.lost, count);
    assert_memory_equal(line.message, words, strlen(words));
    assert_true(line.time_ns > 0);
}

TEST(full_ring_drops_the_new_and_counts)
{
    fanin_log_ring *ring = ring_of(2, FANIN_LOG_DEBUG);
    fanin_log_line line = FANIN_LOG_LINE_INIT;
    for (int i = 0; i < 5; i++) {
        char text[2] = {(char)('a' + i), 0};
        fanin_log_ring_write(ring, FANIN_LOG_WARNING, "e", text);
    }
    assert_int_equal(fanin_log_ring_read(ring, 0, &line), FANIN_OK);
    assert_string_equal(line.message, "a");
    assert_int_equal(line.lost, 0);
    fanin_log_ring_write(ring, FANIN_LOG_WARNING, "e", "after");
    assert_int_equal(fanin_log_ring_read(ring, 0, &line), FANIN_OK);
    assert_string_equal(line.message, "b");
    assert_int_equal(line.lost, 0);
    expect_lost(ring, 3);
    assert_int_equal(fanin_log_ring_read(ring, 0, &line), FANIN_OK);
    assert_string_equal(line.message, "after");
    assert_int_equal(line.lost, 0);
    fanin_log_ring_write(ring, FANIN_LOG_WARNING, "e", "later");
    assert_int_equal(fanin_log_ring_read(ring, 0, &line), FANIN_OK);
    assert_int_equal(line.lost, 0);
    fanin_log_ring_destroy(&ring);
}

/* Nobody has to log once more for it. */
TEST(what_was_dropped_last_is_told_too)
{
    fanin_log_ring *ring = ring_of(1, FANIN_LOG_DEBUG);
    fanin_log_line line = FANIN_LOG_LINE_INIT;
    for (int i = 0; i < 3; i++)
        fanin_log_ring_write(ring, FANIN_LOG_INFO, "e", "one");
    fanin_log_ring_close(ring);
    assert_int_equal(fanin_log_ring_read(ring, 0, &line), FANIN_OK);
    assert_string_equal(line.message, "one");
    expect_lost(ring, 2);
    assert_int_equal(fanin_log_ring_read(ring, 0, &line), FANIN_ERR_CLOSED);
    fanin_log_ring_destroy(&ring);
}

TEST(lesser_levels_are_left_out)
{
    fanin_log_ring *ring = ring_of(8, FANIN_LOG_WARNING);
    fanin_log_line line = FANIN_LOG_LINE_INIT;
    fanin_log_ring_write(ring, FANIN_LOG_DEBUG, "e", "debug");
    fanin_log_ring_write(ring, FANIN_LOG_INFO, "e", "info");
    fanin_log_ring_write(ring, FANIN_LOG_WARNING, "e", "warning");
    fanin_log_ring_write(ring, FANIN_LOG_ERROR, "e", "error");
    assert_int_equal(fanin_log_ring_read(ring, 0, &line), FANIN_OK);
    assert_string_equal(line.message, "warning");
    assert_int_equal(line.lost, 0);
    assert_int_equal(fanin_log_ring_read(ring, 0, &line), FANIN_OK);
    assert_string_equal(line.message, "error");
    assert_int_equal(fanin_log_ring_read(ring, 0, &line), FANIN_ERR_TIMEOUT);
    fanin_log_ring_destroy(&ring);
}

TEST(long_texts_are_cut_between_characters)
{
    fanin_log_ring *ring = ring_of(4, FANIN_LOG_DEBUG);
    fanin_log_line line = FANIN_LOG_LINE_INIT;
    char text[2001], event[101];
    for (size_t i = 0; i + 2 < sizeof text; i += 2)
        memcpy(text + i, "\xc3\xa4", 2);
    text[sizeof text - 1] = '\0';
    memset(event, 'e', sizeof event - 1);
    event[sizeof event - 1] = '\0';
    fanin_log_ring_write(ring, FANIN_LOG_INFO, event, text);
    assert_int_equal(fanin_log_ring_read(ring, 0, &line), FANIN_OK);
    assert_int_equal(strlen(line.event), sizeof line.event - 1);
    assert_int_equal(strlen(line.message), sizeof line.message - 2);
    assert_true(utf8_valid(line.message, strlen(line.message)));
    fanin_log_ring_write(ring, FANIN_LOG_INFO, NULL, NULL);
    assert_int_equal(fanin_log_ring_read(ring, 0, &line), FANIN_OK);
    assert_string_equal(line.event, "");
    assert_string_equal(line.message, "");
    fanin_log_ring_destroy(&ring);
}

TEST(shorter_line_of_an_older_caller)
{
    fanin_log_ring *ring = ring_of(4, FANIN_LOG_DEBUG);
    fanin_log_ring_write(ring, FANIN_LOG_INFO, "event", "message");
    fanin_log_line line;
    memset(&line, 0x55, sizeof line);
    line.struct_size = offsetof(fanin_log_line, message);
    assert_int_equal(fanin_log_ring_read(ring, 0, &line), FANIN_OK);
    assert_string_equal(line.event, "event");
    for (size_t i = 0; i < sizeof line.message; i++)
        assert_int_equal(line.message[i], 0x55);
    fanin_log_ring_destroy(&ring);
}

TEST(wrong_arguments_are_refused)
{
    fanin_log_ring *ring = NULL;
    fanin_error error = FANIN_ERROR_INIT;
    assert_int_equal(fanin_log_ring_create(0, FANIN_LOG_INFO, &ring, &error),
                     FANIN_ERR_ARGUMENT);
    assert_non_null(strstr(error.message, "0 lines"));
    assert_int_equal(fanin_log_ring_create(65537, FANIN_LOG_INFO, &ring, &error),
                     FANIN_ERR_ARGUMENT);
    assert_int_equal(fanin_log_ring_create(4, 0, &ring, &error), FANIN_ERR_ARGUMENT);
    assert_int_equal(fanin_log_ring_create(4, FANIN_LOG_DEBUG + 1, &ring, &error),
                     FANIN_ERR_ARGUMENT);
    assert_int_equal(fanin_log_ring_create(4, FANIN_LOG_INFO, NULL, &error),
                     FANIN_ERR_ARGUMENT);
    assert_null(ring);
    fanin_log_line line = FANIN_LOG_LINE_INIT;
    assert_int_equal(fanin_log_ring_read(NULL, 0, &line), FANIN_ERR_ARGUMENT);
    ring = ring_of(1, FANIN_LOG_INFO);
    assert_int_equal(fanin_log_ring_read(ring, 0, NULL), FANIN_ERR_ARGUMENT);
    line.struct_size = 0;
    assert_int_equal(fanin_log_ring_read(ring, 0, &line), FANIN_ERR_ARGUMENT);
    fanin_log_ring_write(NULL, FANIN_LOG_INFO, "e", "nowhere");
    fanin_log_ring_close(NULL);
    fanin_log_ring_destroy(&ring);
    fanin_log_ring_destroy(&ring);
    fanin_log_ring_destroy(NULL);
}

TEST(closed_ring_is_read_to_its_end)
{
    fanin_log_ring *ring = ring_of(4, FANIN_LOG_DEBUG);
    fanin_log_line line = FANIN_LOG_LINE_INIT;
    fanin_log_ring_write(ring, FANIN_LOG_INFO, "e", "before");
    fanin_log_ring_close(ring);
    fanin_log_ring_close(ring);
    fanin_log_ring_write(ring, FANIN_LOG_INFO, "e", "after");
    assert_int_equal(fanin_log_ring_read(ring, 60000, &line), FANIN_OK);
    assert_string_equal(line.message, "before");
    assert_int_equal(fanin_log_ring_read(ring, 60000, &line), FANIN_ERR_CLOSED);
    assert_int_equal(fanin_log_ring_read(ring, 0, &line), FANIN_ERR_CLOSED);
    fanin_log_ring_destroy(&ring);
}

TEST(wait_ends_at_its_time)
{
    fanin_log_ring *ring = ring_of(4, FANIN_LOG_DEBUG);
    fanin_log_line line = FANIN_LOG_LINE_INIT;
    uint64_t start = clock_ns();
    assert_int_equal(fanin_log_ring_read(ring, 30, &line), FANIN_ERR_TIMEOUT);
    assert_true(clock_ns() - start >= UINT64_C(30000000));
    fanin_log_ring_destroy(&ring);
}

typedef struct reading {
    fanin_log_ring *ring;
    fanin_status status;
    uint64_t count, lost, wrong;
    pthread_barrier_t started;
} reading;

static void *read_once(void *cookie)
{
    reading *r = cookie;
    fanin_log_line line = FANIN_LOG_LINE_INIT;
    pthread_barrier_wait(&r->started);
    r->status = fanin_log_ring_read(r->ring, 3600000, &line);
    return NULL;
}

/* Whether the reader waits already or comes later, it must not wait for its time-out, which is
   beyond the test's. */
TEST(close_and_write_wake_a_reader)
{
    for (int round = 0; round < 50; round++) {
        reading r = {.ring = ring_of(2, FANIN_LOG_DEBUG)};
        pthread_barrier_init(&r.started, NULL, 2);
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, read_once, &r), 0);
        pthread_barrier_wait(&r.started);
        if (round % 2)
            fanin_log_ring_close(r.ring);
        else
            fanin_log_ring_write(r.ring, FANIN_LOG_INFO, "e", "wake");
        pthread_join(thread, NULL);
        assert_int_equal(r.status, round % 2 ? FANIN_ERR_CLOSED : FANIN_OK);
        pthread_barrier_destroy(&r.started);
        fanin_log_ring_destroy(&r.ring);
    }
}

enum { WRITERS = 4, MESSAGES = 5000 };

static void *read_all(void *cookie)
{
    reading *r = cookie;
    int last[WRITERS] = {0};
    fanin_log_line line = FANIN_LOG_LINE_INIT;
    while ((r->status = fanin_log_ring_read(r->ring, 60000, &line)) == FANIN_OK) {
        int writer = -1, number = -1;
        r->lost += line.lost;
        if (line.lost > 0)
            continue;
        if (sscanf(line.message, "%d %d", &writer, &number) != 2 || writer < 0 ||
            writer >= WRITERS || number <= last[writer])
            r->wrong++;
        else
            last[writer] = number;
        r->count++;
    }
    return NULL;
}

typedef struct writing {
    fanin_log_ring *ring;
    int number;
} writing;

static void *write_many(void *cookie)
{
    writing *w = cookie;
    for (int i = 1; i <= MESSAGES; i++) {
        char text[32];
        snprintf(text, sizeof text, "%d %d", w->number, i);
        fanin_log_ring_write(w->ring, FANIN_LOG_INFO, "e", text);
    }
    return NULL;
}

TEST(writers_and_a_reader_lose_nothing_uncounted)
{
    reading r = {.ring = ring_of(16, FANIN_LOG_DEBUG)};
    pthread_t reader, threads[WRITERS];
    writing writers[WRITERS];
    assert_int_equal(pthread_create(&reader, NULL, read_all, &r), 0);
    for (int i = 0; i < WRITERS; i++) {
        writers[i] = (writing){r.ring, i};
        assert_int_equal(pthread_create(&threads[i], NULL, write_many, &writers[i]), 0);
    }
    for (int i = 0; i < WRITERS; i++)
        pthread_join(threads[i], NULL);
    fanin_log_ring_close(r.ring);
    pthread_join(reader, NULL);
    assert_int_equal(r.status, FANIN_ERR_CLOSED);
    assert_int_equal(r.wrong, 0);
    assert_true(r.count >= 16);
    assert_int_equal(r.count + r.lost, (uint64_t)WRITERS * MESSAGES);
    fanin_log_ring_destroy(&r.ring);
}

TEST(forked_child_leaves_the_ring_alone)
{
    fanin_log_ring *ring = ring_of(4, FANIN_LOG_DEBUG);
    pid_t child = fork();
    assert_int_not_equal(child, -1);
    if (child == 0) {
        fanin_log_line line = FANIN_LOG_LINE_INIT;
        fanin_log_ring_write(ring, FANIN_LOG_INFO, "e", "child");
        fanin_log_ring_close(ring);
        fanin_status status = fanin_log_ring_read(ring, 0, &line);
        fanin_log_ring_destroy(&ring);
        _exit(status == FANIN_ERR_FORKED && !ring ? 0 : 1);
    }
    assert_int_equal(tests_await(child), 0);
    fanin_log_ring_destroy(&ring);
}
