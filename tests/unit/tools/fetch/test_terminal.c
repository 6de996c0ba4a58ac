/* SPDX-License-Identifier: Apache-2.0 */
/* What reaches a terminal: text that steers nothing, progress that fits. */
#include "fetch/failure.h"
#include "fetch/progress.h"
#include "fetch/session.h"
#include "fetch/output.h"
#include "testing.h"

#include <sys/socket.h>

static void expect(const char *text, const char *shown)
{
    char *out = NULL;
    size_t size = 0;
    FILE *stream = open_memstream(&out, &size);
    assert_non_null(stream);
    terminal_put(stream, text);
    assert_int_equal(fclose(stream), 0);
    assert_string_equal(out, shown);
    free(out);
}

TEST(text_is_shown_as_it_is)
{
    expect("", "");
    expect("lora:0 100 % \\ 'a'", "lora:0 100 % \\ 'a'");
    expect("\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80",
           "\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80");
}

TEST(what_steers_is_escaped)
{
    expect("\x1b[31mred\x07", "\\x1b[31mred\\x07");
    expect("one\ntwo\r\t", "one\\x0atwo\\x0d\\x09");
    expect("a\x7f", "a\\x7f");
    expect("\xc2\x9b"
           "31m",
           "\\xc2\\x9b31m"); /* CSI as one character */
    expect("\xe2\x80\xae"
           "txt",
           "\\xe2\\x80\\xaetxt"); /* writes backwards */
    expect("\xe2\x81\xa6", "\\xe2\\x81\\xa6");
}

TEST(what_is_not_seen_is_escaped)
{
    expect("lora:0\xe2\x80\x8b", "lora:0\\xe2\\x80\\x8b"); /* a space of no width */
    expect("\xc2\xad\xd8\x9c", "\\xc2\\xad\\xd8\\x9c");
    expect("\xef\xbb\xbf", "\\xef\\xbb\\xbf");
    expect("\xf3\xa0\x81\xa1", "\\xf3\\xa0\\x81\\xa1"); /* a letter among tags */
}

TEST(what_is_not_utf8_is_escaped)
{
    expect("\x9b"
           "31m",
           "\\x9b31m");
    expect("\xff\xfe", "\\xff\\xfe");
    expect("\xc3", "\\xc3");
    expect("\xe2\x82", "\\xe2\\x82");
    expect("\xc0\x9b", "\\xc0\\x9b");                   /* too long for what it says */
    expect("\xed\xa0\x80", "\\xed\\xa0\\x80");          /* a half of a surrogate pair */
    expect("\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80"); /* beyond the last character */
}

/* Bytes that move the cursor; colours do not. */
static size_t width(const char *line)
{
    size_t n = 0;
    for (; *line != '\0'; line++) {
        if (*line == '\033') {
            line = strchr(line, 'm');
            continue;
        }
        n++;
    }
    return n;
}

TEST(progress_fits_every_terminal)
{
    static const fanin_rank_progress slow = {.struct_size = sizeof slow,
                                             .rank = 5,
                                             .address = "10.0.0.3:6005",
                                             .bytes_total = UINT64_C(2100000000),
                                             .quiet_ms = 12900};
    static const progress_state states[] = {{0, 0, 0, NULL},
                                            {0, 1000, 5, NULL},
                                            {450, 1000, 1000000, NULL},
                                            {UINT64_C(123456789012),
                                             UINT64_C(999999999999),
                                             UINT64_C(3600000000000), &slow}};
    char line[PROGRESS_TEXT];
    for (size_t i = 0; i < 8; i++) {
        for (int columns = 1; columns <= 300; columns++) {
            progress_line("lora:run-42", &states[i % 4], columns, i < 4, line,
                          sizeof(line));
            if (width(line) >= (size_t)columns && width(line) > 0)
                fail_msg("%d columns: '%s'", columns, line);
            if (columns > 6 && strchr(line, '%') == NULL)
                fail_msg("%d columns: '%s' says no share", columns, line);
            if (columns >= 24 && strstr(line, "lora:run-42 ") != line)
                fail_msg("%d columns: '%s' has no name", columns, line);
        }
    }
    progress_line("lora:0", &states[2], 120, false, line, sizeof(line));
    assert_non_null(strstr(line, "[####"));
    assert_non_null(strstr(line, "450 B of 1.00 kB"));
    progress_line("lora:0", &states[2], 31, false, line, sizeof(line));
    assert_string_equal(line, "lora:0  45 %  450 B of 1.00 kB");
    progress_line("full:0", &states[3], 100, false, line, sizeof(line));
    assert_non_null(strstr(line,
                           "123 GB of 1.00 TB, rank 5 10.0.0.3:6005: 0 B of 2.10 GB, "
                           "no byte for 12 s"));
    progress_line("full:0", &states[3], 80, false, line, sizeof(line));
    assert_non_null(strstr(line, ", rank 5: no byte for 12 s"));
}

/* Each write(2) to a datagram socket is one datagram. */
TEST(a_line_is_one_write)
{
    int ends[2];
    char line[4096];
    char text[2000];
    fanin_error error = FANIN_ERROR_INIT;
    assert_int_equal(socketpair(AF_UNIX, SOCK_DGRAM, 0, ends), 0);
    int saved = dup(STDERR_FILENO);
    assert_true(saved >= 0 && dup2(ends[1], STDERR_FILENO) >= 0);
    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    terminal_tell("%s\n%s", text, text);
    failure_warn("a %s", "b");
    failure_set(&error, FANIN_ERR_IO, "do something", "it broke");
    (void)failure_report("cannot do it", &error);
    session_log(&error, FANIN_LOG_INFO, "event", "message\033[0m");
    assert_true(dup2(saved, STDERR_FILENO) >= 0);
    ssize_t n = recv(ends[0], line, sizeof(line), MSG_DONTWAIT);
    assert_int_equal(n, 2 * (sizeof(text) - 1) + 5);
    static const char *const lines[] = {
        "nixl-fetch: warning: a b\n",
        "nixl-fetch: cannot do it: it broke: do something\n",
        "nixl-fetch: info: event: message\\x1b[0m\n",
    };
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        n = recv(ends[0], line, sizeof(line) - 1, MSG_DONTWAIT);
        assert_true(n > 0);
        line[n] = '\0';
        assert_string_equal(line, lines[i]);
    }
    assert_int_equal(recv(ends[0], line, sizeof(line), MSG_DONTWAIT), -1);
    close(saved);
    close(ends[0]);
    close(ends[1]);
}

/* What failure_report() writes of an error with this message and key. */
static void expect_failure(const char *message, const char *key, const char *line)
{
    int ends[2];
    char told[512];
    fanin_error error = FANIN_ERROR_INIT;
    failure_set(&error, FANIN_ERR_MISMATCH, "do something", "%s", message);
    snprintf(error.key, sizeof error.key, "%s", key);
    assert_int_equal(socketpair(AF_UNIX, SOCK_DGRAM, 0, ends), 0);
    int saved = dup(STDERR_FILENO);
    assert_true(saved >= 0 && dup2(ends[1], STDERR_FILENO) >= 0);
    (void)failure_report("cannot", &error);
    assert_true(dup2(saved, STDERR_FILENO) >= 0);
    ssize_t n = recv(ends[0], told, sizeof told - 1, MSG_DONTWAIT);
    assert_true(n > 0);
    told[n] = '\0';
    assert_string_equal(told, line);
    close(saved);
    close(ends[0]);
    close(ends[1]);
}

TEST(the_key_is_told_once)
{
    expect_failure("another shape", "w.1",
                   "nixl-fetch: cannot: another shape (key 'w.1'): do something\n");
    expect_failure("'w.1' has another shape", "w.1",
                   "nixl-fetch: cannot: 'w.1' has another shape: do something\n");
    expect_failure("w.10 lies beside xw.1", "w.1",
                   "nixl-fetch: cannot: w.10 lies beside xw.1 (key 'w.1'): do "
                   "something\n");
    expect_failure("w.10 lies beside w.1", "w.1",
                   "nixl-fetch: cannot: w.10 lies beside w.1: do something\n");
}
