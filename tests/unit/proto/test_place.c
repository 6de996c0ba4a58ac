/* SPDX-License-Identifier: Apache-2.0 */
/** @file Where readers are: which texts are places, and which of them are of one site. */
#include "place.h"
#include "testing.h"

#define LONG "a23456789012345678901234567890123456789012345678901234567890/23"

TEST(a_place_is_a_site_or_a_site_and_a_rack)
{
    static const char *const good[] = {"", "a", "eu-west_1.b", "eu/r12", "0/-", LONG};
    static const char *const bad[] = {"/",     "/r",       "a/",    "a//r",
                                      "a/r/3", "a b",      "a\n",   "a\x7f",
                                      "a;b",   "\xc3\xa9", "a/r\t", LONG "4"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        assert_true(place_valid(good[i]));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_false(place_valid(bad[i]));
}

TEST(racks_of_a_site_are_of_one_site)
{
    assert_true(place_same_site("", ""));
    assert_true(place_same_site("a", "a/r1"));
    assert_true(place_same_site("a/r2", "a/r1"));
    assert_false(place_same_site("", "a"));
    assert_false(place_same_site("a", "ab"));
    assert_false(place_same_site("a/r1", "b/r1"));
    assert_false(place_same_site("a/r1", "ab/r1"));
}
