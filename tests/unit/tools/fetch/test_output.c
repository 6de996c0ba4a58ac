/* SPDX-License-Identifier: Apache-2.0 */
/* JSON on standard output: texts of others, and where memory ends. */
#include "fetch/failure.h"
#include "fetch/output.h"
#include "testing.h"

/* What output_require(NULL) writes in a process of its own, whose exit status is that of
   FANIN_ERR_MEMORY. */
static void run_out_of_memory(bool json, char *out, char *err, size_t size)
{
    int streams[2][2];
    char *texts[2] = {out, err};
    assert_true(pipe(streams[0]) == 0 && pipe(streams[1]) == 0);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        dup2(streams[0][1], STDOUT_FILENO);
        dup2(streams[1][1], STDERR_FILENO);
        output_use_json(json);
        output_require(NULL);
        _exit(0);
    }
    assert_int_equal(tests_await(child), exit_code_of(FANIN_ERR_MEMORY));
    for (size_t i = 0; i < 2; i++) {
        close(streams[i][1]);
        ssize_t n = read(streams[i][0], texts[i], size - 1);
        assert_true(n >= 0);
        texts[i][n] = '\0';
        close(streams[i][0]);
    }
}

TEST(who_lacks_memory_says_so_as_every_failure_is_told)
{
    char out[1024], err[1024];
    fanin_error error = FANIN_ERROR_INIT;
    run_out_of_memory(false, out, err, sizeof out);
    assert_string_equal(err, "nixl-fetch: out of memory: free memory\n");
    assert_string_equal(out, "");
    run_out_of_memory(true, out, err, sizeof out);
    assert_string_equal(err, "nixl-fetch: out of memory: free memory\n");
    failure_set(&error, FANIN_ERR_MEMORY, "free memory", "out of memory");
    json_t *told = json_loads(out, JSON_REJECT_DUPLICATES, NULL);
    json_t *as_ever = failure_json(&error);
    json_object_set_new(as_ever, "schema", json_integer(1));
    assert_true(json_equal(told, as_ever));
    json_decref(told);
    json_decref(as_ever);
}

static void expect_shown(const char *text, const char *shown)
{
    json_t *value = output_string(text);
    assert_string_equal(json_string_value(value), shown);
    json_decref(value);
}

TEST(only_bytes_that_are_no_utf8_are_replaced)
{
    expect_shown("\xc3\xa4\xe2\x82\xac", "\xc3\xa4\xe2\x82\xac");
    expect_shown("\xc3\xa4 \xff \xe2\x82\xac", "\xc3\xa4 ? \xe2\x82\xac");
    expect_shown("\xe2\x82", "??");
    expect_shown("a\xc3", "a?");
    expect_shown("\xed\xa0\x80", "???");              /* a half of a surrogate pair */
    expect_shown("\xf4\x90\x80\x80\x1b", "????\x1b"); /* beyond the last character */
    json_t *empty = output_string("");
    assert_true(json_is_null(empty));
    json_decref(empty);
}
