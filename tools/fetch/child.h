/* SPDX-License-Identifier: Apache-2.0 */
/** @file A program, mostly this one once more, as a process of its own that has a deadline. */
#ifndef CHILD_H
#define CHILD_H

#include <stddef.h>
#include <stdint.h>

enum { CHILD_OUTPUT = 64 << 20 }; /**< bytes that are kept of each output */

/** What became of it; zero before. */
typedef struct child {
    char *out, *err; /**< ended by a NUL, which is not counted */
    size_t out_size, err_size;
    int status;    /**< exit status; -1: it has none */
    char why[160]; /**< why it has none, "" if it has */
    uint64_t ns;   /**< how long it took */
} child;

enum { CHILD_ABSENT = 127 }; /**< exit status where there is no such program */

/** Runs @p program of the PATH (NULL: this one) with WORDS (its name first, NULL at the end) to its
    end, or kills it after @p limit_ms, or when interrupt_requested(). Ends with this process.
    child_free() in any case. */
void child_run(const char *program, const char *const *words, uint32_t limit_ms,
               child *out);
void child_free(child *c);

#endif
