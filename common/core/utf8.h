/* SPDX-License-Identifier: Apache-2.0 */
/** @file Text from peers and callers. */
#ifndef UTF8_H
#define UTF8_H

#include <stdbool.h>
#include <stddef.h>

/** Whether data[0..size) is UTF-8 (shortest forms, no surrogates) without a NUL. */
bool utf8_valid(const void *data, size_t size);
/** Copies @p from (NULL: nothing), cut between two characters if it is too long, so that a cut text
    is still UTF-8, and a NUL. */
void utf8_copy(char *to, size_t capacity, const char *from);
/** Puts a space in the place of each byte of characters that end lines, steer terminals, turn text
    around or are not seen (Unicode's Default_Ignorable_Code_Point and the rest of its category Cf).
    */
void utf8_make_harmless(char *text);

#endif
