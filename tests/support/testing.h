/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * cmocka, the headers that most tests include, and the list of a program's cases. A file has its
 * cases as TEST(name) { ... }; main() stands in testing.c and runs them in their order.
 */
#ifndef TESTING_H
#define TESTING_H

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef __cplusplus
extern "C" {
#endif

#include <cmocka.h>

/** Before main(): one more case. @p given: what its *state is. */
void tests_add(const char *name, CMUnitTestFunction run, CMFixtureFunction set_up,
               CMFixtureFunction tear_down, void *given);

/** Before main(): what is done before the first case and after the last. */
void tests_between(CMFixtureFunction first, CMFixtureFunction last);

/** Runs all cases, or those that @p filter matches. A program with its own main() calls it. */
int tests_run(const char *filter);

/** Waits for a child process: its exit status, or minus the signal that ended it. */
int tests_await(pid_t child);

#ifdef __cplusplus
}
#endif

/** The head of a case: TEST(name) { ... } */
#define TEST(name) TEST_WITH(name, NULL, NULL)
#define TEST_WITH(name, set_up, tear_down)                                             \
    TEST_ADDED(name, tests_add(#name, name, set_up, tear_down, NULL))                  \
    static void name(void **state)
/** add: the call of tests_add() for it. */
#define TEST_ADDED(name, add)                                                          \
    static void name(void **state);                                                    \
    __attribute__((constructor)) static void add_##name(void)                          \
    {                                                                                  \
        add;                                                                           \
    }
#define TESTS_BETWEEN(first, last)                                                     \
    __attribute__((constructor)) static void add_fixtures(void)                        \
    {                                                                                  \
        tests_between(first, last);                                                    \
    }

#ifndef __cplusplus
#include <fanin/error.h>

/** As assert_ok() of a call whose error nobody else looks at: assert_works(f(..., ERROR)). */
#define assert_works(call) assert_ok(call, tests_error)
#define ERROR (tests_error = (fanin_error)FANIN_ERROR_INIT, &tests_error)
extern _Thread_local fanin_error tests_error;
#endif

/** Fails the test with the error's own words. */
#define assert_ok(call, error)                                                         \
    do {                                                                               \
        if ((call) != 0)                                                               \
            fail_msg("%s: %s (%s)", #call, (error).message, (error).remedy);           \
    } while (0)

/** Fails the test unless @p text has @p words in it. */
static inline void assert_says(const char *text, const char *words)
{
    if (!strstr(text, words))
        fail_msg("\"%s\" does not say \"%s\"", text, words);
}

#endif
