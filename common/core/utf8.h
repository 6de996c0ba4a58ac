/* SPDX-License-Identifier: Apache-2.0 */
/** @file Text from peers and callers. */
#ifndef UTF8_H
#define UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** Whether data[0..size) is UTF-8 (shortest forms, no surrogates) without a NUL. */
bool utf8_valid(const void *data, size_t size);
/** Copies @p from (NULL: nothing), cut between two characters if it is too long, so that a cut text
    is still UTF-8, and a NUL. */
void utf8_copy(char *to, size_t capacity, const char *from);
/** The character that @p text begins with, and how many bytes it has; 0: none, or not UTF-8. */
size_t utf8_next(const char *text, uint32_t *character_out);
/** Whether a character ends lines, steers terminals, turns text around or is not seen (Unicode's
    Default_Ignorable_Code_Point and the rest of its category Cf). */
bool utf8_is_hidden(uint32_t character);
/** Puts spaces in the place of such characters, one a byte: a text stays one line of what is seen. */
void utf8_make_harmless(char *text);

#endif
