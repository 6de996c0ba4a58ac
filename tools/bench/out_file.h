/* SPDX-License-Identifier: Apache-2.0 */
/** @file A file that appears whole or not at all. */
#ifndef OUT_FILE_H
#define OUT_FILE_H

#include <stdio.h>

/** Zero: none. */
typedef struct out_file {
    FILE *stream;
    const char *path; /**< the caller's */
    char temporary[4200];
} out_file;

/** Makes a file beside @p path, which tells early that none can be made, or that one is there. 0,
    or an exit status after a message. */
int out_file_open(out_file *file, const char *path);
/** It gets its name, unless another has it by now, and is closed. 0, or an exit status after a
    message: nothing is left then. */
int out_file_commit(out_file *file);
/** Takes it away if it has no name yet. */
void out_file_discard(out_file *file);

#endif
