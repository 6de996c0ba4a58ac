/* SPDX-License-Identifier: Apache-2.0 */
/** @file Strikes secrets out of what is to be shown to others. */
#ifndef STRIKE_H
#define STRIKE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

/** What the lines before leave behind; zero before the first one of a text. */
typedef struct striking {
    bool in_block; /**< of PEM, whose end has not come */
    bool in_rows;  /**< of a block whose beginning was not seen */
} striking;

/**
 * Writes a line without its end; what would steer a terminal is escaped. "***" stands instead of
 * - the rest of a line behind the first name with SECRET, KEY, TOKEN, PASSWORD, PASSWD, CREDENTIAL,
 * AUTHORIZATION or
 *   COOKIE in it, in any case, that '=' or ':' follows, perhaps after a quote or blanks, or that is
 *   an option with a value;
 *   behind BEARER; behind "://" of a URL with a user;
 * - the word behind such a name, of which no sentence about secrets is made: any behind PASSWORD,
 * PASSWD and CREDENTIAL,
 *   else one with a digit or of mixed case, but no path;
 * - a block of PEM, and lines that are nothing but base64 or hexadecimal digits.
 */
void strike_line(striking *s, FILE *stream, const char *line, size_t length);

#endif
