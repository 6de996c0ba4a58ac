/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Cases that run in a process of their own, since what they load cannot be unloaded or what they do
 * ends the process. A case returns PASSED, FAILED or SKIPPED.
 */
#ifndef OWN_PROCESS_H
#define OWN_PROCESS_H

#include "testing.h"

#include <fanin/error.h>

enum { PASSED = 0, FAILED = 1, SKIPPED = 77 };

typedef struct own_process {
    int (*body)(void);
    int (*before)(void); /**< NULL, or what must have passed */
    int signal;          /**< that ends it; 0: none */
    bool checked;        /**< it ends by exit(), with the checks of leaks and threads */
} own_process;

/** The head of such a case: OWN_PROCESS(name, .signal = SIGABRT) { ... } */
#define OWN_PROCESS(name, ...)                                                         \
    static int name(void);                                                             \
    __attribute__((constructor)) static void add_##name(void)                          \
    {                                                                                  \
        static own_process of = {.body = name, __VA_ARGS__};                           \
        tests_add(#name, own_process_run, NULL, NULL, &of);                            \
    }                                                                                  \
    static int name(void)
void own_process_run(void **state);

extern fanin_error failure; /**< of the case's calls, for CHECK to print */

/** In a case: it has failed unless @p condition. */
#define CHECK(condition)                                                               \
    do {                                                                               \
        if (!(condition)) {                                                            \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition,         \
                    failure.message);                                                  \
            return FAILED;                                                             \
        }                                                                              \
    } while (0)

#endif
