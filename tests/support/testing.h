/* SPDX-License-Identifier: Apache-2.0 */
/** @file cmocka with the headers that it needs before its own. */
#ifndef TESTING_H
#define TESTING_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

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
