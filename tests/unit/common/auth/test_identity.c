/* SPDX-License-Identifier: Apache-2.0 */
#include "pem.h"
#include "testing.h"

static bool parse(const char *text, identity *out)
{
    return identity_parse(text, strlen(text), out);
}

TEST(names_are_read_and_written)
{
    static const char *const good[] = {
        "fanin://job/reader",
        "fanin://job/rank/0",
        "fanin://job/rank/4294967295",
        "fanin://A-z_0.9/rank/*",
    };
    char text[IDENTITY_URI_MOST];
    identity id;
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        assert_true(parse(good[i], &id));
        identity_text(&id, text);
        assert_string_equal(text, good[i]);
    }
}

TEST(others_are_none)
{
    static const char *const bad[] = {
        "",
        "fanin://",
        "fanin:///reader",
        "fanin://job",
        "fanin://job/",
        "fanin://job/readers",
        "fanin://job/reader/",
        "fanin://job/Reader",
        "Fanin://job/reader",
        "fanin://job/rank/",
        "fanin://job/rank/01",
        "fanin://job/rank/-1",
        "fanin://job/rank/+1",
        "fanin://job/rank/1x",
        "fanin://job/rank/**",
        "fanin://job/rank/4294967296",
        "fanin://job/rank/99999999999999999999999999",
        "fanin://j*b/reader",
        "fanin://j b/reader",
        "fanin://*/rank/*",
        "spiffe://job/reader",
    };
    char longest[] =
        "fanin://aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa/"
        "reader";
    identity id;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_false(parse(bad[i], &id));
    assert_true(parse(longest, &id));
    assert_int_equal(strlen(id.job), JOB_MOST);
    assert_false(parse(
        "fanin://aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa/"
        "reader",
        &id));
    assert_false(identity_parse("fanin://job/reader\0", 19, &id));
    assert_false(identity_parse("fanin://j\0b/reader", 18, &id));
}

static bool may(const char *has, const char *wanted)
{
    identity a, b;
    assert_true(parse(has, &a) && parse(wanted, &b));
    return identity_suffices(&a, &b);
}

TEST(each_is_good_for_itself_alone)
{
    assert_true(may("fanin://j/reader", "fanin://j/reader"));
    assert_true(may("fanin://j/rank/3", "fanin://j/rank/3"));
    assert_true(may("fanin://j/rank/*", "fanin://j/rank/3"));
    assert_true(may("fanin://j/rank/3", "fanin://j/rank/*"));
    assert_false(may("fanin://j/rank/3", "fanin://j/rank/4"));
    assert_false(may("fanin://j/rank/*", "fanin://j/reader"));
    assert_false(may("fanin://j/rank/3", "fanin://j/reader"));
    assert_false(may("fanin://j/reader", "fanin://j/rank/*"));
    assert_false(may("fanin://j/reader", "fanin://jj/reader"));
    assert_false(may("fanin://jj/rank/*", "fanin://j/rank/3"));
    assert_true(may("fanin://j/relay/worker-7", "fanin://j/relay/any"));
    assert_false(may("fanin://j/relay/0", "fanin://jj/relay/0"));
    assert_false(may("fanin://j/relay/0", "fanin://j/rank/0"));
    assert_false(may("fanin://j/relay/0", "fanin://j/reader"));
    assert_false(may("fanin://j/rank/*", "fanin://j/relay/0"));
    assert_false(may("fanin://j/reader", "fanin://j/relay/0"));
}
