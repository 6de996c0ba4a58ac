/* SPDX-License-Identifier: Apache-2.0 */
/* What reaches a terminal: text that steers nothing. */
#include "terminal.h"
#include "testing.h"

#include <stdlib.h>
#include <string.h>

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

static void text_is_shown_as_it_is(void **state)
{
    (void)state;
    expect("", "");
    expect("lora:0 100 % \\ 'a'", "lora:0 100 % \\ 'a'");
    expect("\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80",
           "\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80");
}

static void what_steers_is_escaped(void **state)
{
    (void)state;
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

static void what_is_not_utf8_is_escaped(void **state)
{
    (void)state;
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_is_shown_as_it_is),
        cmocka_unit_test(what_steers_is_escaped),
        cmocka_unit_test(what_is_not_utf8_is_escaped),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
