/* SPDX-License-Identifier: Apache-2.0 */
/** @file The function that libFuzzer and replay.c call, which every fuzz target defines. */
#ifndef FUZZ_H
#define FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

/** Runs the code under test on bytes that nobody checked. Returns 0. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/** Ends the process unless what must hold does. */
static inline void check(bool good)
{
    if (!good)
        abort();
}

#endif
