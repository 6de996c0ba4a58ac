/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Text on its way to a terminal. What others wrote (ranks, files, the command line) may not
 * steer it, and a line is one write(2), so that lines of several processes do not mix.
 */
#ifndef TERMINAL_H
#define TERMINAL_H

#include <stdio.h>

/** Writes @p text; control characters, marks that turn the direction of writing and bytes that
    are not UTF-8 become \xHH. */
void terminal_put(FILE *stream, const char *text);

/** Formats, makes harmless as terminal_put() does, adds a newline. */
void terminal_write(FILE *stream, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/** The same on standard output. */
void terminal_print(const char *format, ...) __attribute__((format(printf, 1, 2)));

/** The same on standard error, at once. */
void terminal_tell(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
