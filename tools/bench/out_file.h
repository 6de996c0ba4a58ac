/* SPDX-License-Identifier: Apache-2.0 */
/** @file A file that appears whole or not at all. */
#ifndef OUT_FILE_H
#define OUT_FILE_H

#include <stdbool.h>
#include <stdio.h>

/** Zero: none. */
typedef struct out_file {
    FILE *stream;
    const char *path; /**< the caller's */
    bool is_new;      /**< nothing is written over */
    char temporary[4200];
} out_file;

/** Makes a file beside @p path, which tells early that none can be made. @p is_new: it refuses a
    file that is there. 0, or an exit status after a message. */
int out_file_open(out_file *file, const char *path, bool is_new);
/** It gets its name, in the place of one that had it unless it has to be new, and is closed. 0, or
    an exit status after a message: nothing is left then, and what was there is untouched. */
int out_file_commit(out_file *file);
/** Takes it away if it has no name yet. */
void out_file_discard(out_file *file);

#endif
