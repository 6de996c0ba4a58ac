/* SPDX-License-Identifier: Apache-2.0 */
/** @file Strikes secrets out of what is to be shown to others. */
#ifndef STRIKE_H
#define STRIKE_H

#include <stddef.h>
#include <stdio.h>

/** Writes a line without its end; behind the first name with SECRET, KEY, TOKEN, PASSWORD, PASSWD or
    CREDENTIAL in it, in any case, that '=' or ':' follows, perhaps after a quote or blanks, the rest is "***". What would steer a terminal is escaped. */
void strike_line(FILE *stream, const char *line, size_t length);

#endif
