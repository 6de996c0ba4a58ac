/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Cases that run in a process of their own, since what they load cannot be unloaded or what they do
 * ends the process. A case returns PASSED, FAILED or SKIPPED.
 */
#ifndef OWN_PROCESS_H
#define OWN_PROCESS_H

#include <fanin/error.h>
#include <stdbool.h>
#include <stdio.h>

enum { PASSED = 0, FAILED = 1, SKIPPED = 77 };

typedef struct own_process {
    int (*body)(void);
    int (*before)(void); /**< NULL, or what must have passed */
    int signal;          /**< that ends it; 0: none */
    bool checked;        /**< it ends by exit(), with the checks of leaks and threads */
} own_process;

/** own_process_test(body, .signal = SIGABRT) */
#define own_process_test(name, ...)                                                    \
    {                                                                                  \
#name, own_process_run, NULL, NULL, &(own_process)                             \
        {                                                                              \
            .body = name, __VA_ARGS__                                                  \
        }                                                                              \
    }
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
