/* SPDX-License-Identifier: Apache-2.0 */
/** @file How much memory this process may still take, on its host and in its cgroups. */
#ifndef MEMORY_LEFT_H
#define MEMORY_LEFT_H

#include <stdint.h>

typedef struct memory_left {
    uint64_t bytes; /**< about UINT64_MAX: nobody says */
    char who[160];  /**< who has no more than that: "this host", "the cgroup /a/b" */
} memory_left;

/**
 * What can be had without swapping, and without the end of the process by a cgroup's limit, of
 * version 1 or 2. The page cache counts as free. @p proc and @p sys are "/proc" and "/sys".
 */
memory_left memory_left_find(const char *proc, const char *sys);

#endif
