/* SPDX-License-Identifier: Apache-2.0 */
/** @file The function that libFuzzer and replay.c call, which every fuzz target defines. */
#ifndef FUZZ_H
#define FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/** Runs the code under test on bytes that nobody checked. Returns 0. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/** Ends the process unless what must hold does, and says what. */
#define check(good)                                                                    \
    do {                                                                               \
        if (!(good))                                                                   \
            does_not_hold(__FILE__, __LINE__, #good);                                  \
    } while (0)

static inline _Noreturn void does_not_hold(const char *file, int line, const char *what)
{
    fprintf(stderr, "%s:%d: this does not hold: %s\n", file, line, what);
    abort();
}

#endif
