/* SPDX-License-Identifier: Apache-2.0 */
/** @file Text that is put together in a place of fixed size. */
#ifndef TEXT_H
#define TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Text from peers and callers. */

/** Whether data[0..size) is UTF-8 (shortest forms, no surrogates) without a NUL. */
bool utf8_valid(const void *data, size_t size);
/** Copies @p from (NULL: nothing), cut between two characters if it is too long, so that a cut text
    is still UTF-8, and a NUL. */
void utf8_copy(char *to, size_t capacity, const char *from);
/** Puts a space in the place of each byte of characters that end lines, steer terminals, turn text
    around or are not seen (Unicode's Default_Ignorable_Code_Point and the rest of its category Cf).
    */
void utf8_make_harmless(char *text);
/** How many bytes the character has that @p text begins with; 0: it is a NUL, or not UTF-8.
    *@p hidden_out: it is one of those. */
size_t utf8_next(const char *text, bool *hidden_out);

typedef struct text {
    char *chars; /**< always ends with a NUL, unless size is 0 */
    size_t size;
    size_t used; /**< of all that was added, less the NUL; >= size: it was cut */
} text;

/** Empty, in @p size bytes at @p chars. */
text text_in(char *chars, size_t size);
/** Appends what fits and counts the rest. */
void text_add(text *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
/** Appends all of it if @p spare bytes are left behind it; else nothing: false. */
bool text_add_whole(text *t, size_t spare, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/** Appends a tensor's shape, "[4096, 16]". */
void text_add_shape(text *t, const uint64_t *shape, uint32_t n_dims);

/** Whether the environment variable of this name switches something on: "1", "true" or "yes", in
    any case. What it switches takes less care, so that other words do not. */
bool text_switched_on(const char *variable);

#endif
