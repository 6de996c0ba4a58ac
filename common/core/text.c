/* SPDX-License-Identifier: Apache-2.0 */
#include "text.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* --------------------------------------------------------------------------- utf8 */

/* Eight bytes of ASCII without a NUL at once: tensor names are nothing else. */
static bool plain8(const uint8_t *p)
{
    const uint64_t ones = UINT64_C(0x0101010101010101), high = ones << 7;
    uint64_t word;
    memcpy(&word, p, sizeof word);
    return !(word & high) && !((word - ones) & ~word & high);
}

/* Length of the sequence at p (NUL excluded), 0: invalid. */
static size_t sequence(const uint8_t *p, size_t left)
{
    uint8_t lead = p[0], low = 0x80, high = 0xbf;
    size_t size;
    if (lead < 0x80)
        return lead != 0;
    if (lead >= 0xc2 && lead <= 0xdf)
        size = 2;
    else if ((lead & 0xf0) == 0xe0)
        size = 3;
    else if (lead >= 0xf0 && lead <= 0xf4)
        size = 4;
    else
        return 0;
    /* The second byte's range excludes overlong forms, surrogates and > U+10FFFF. */
    if (lead == 0xe0)
        low = 0xa0;
    else if (lead == 0xed)
        high = 0x9f;
    else if (lead == 0xf0)
        low = 0x90;
    else if (lead == 0xf4)
        high = 0x8f;
    if (left < size || p[1] < low || p[1] > high)
        return 0;
    for (size_t i = 2; i < size; i++)
        if ((p[i] & 0xc0) != 0x80)
            return 0;
    return size;
}

bool utf8_valid(const void *data, size_t size)
{
    const uint8_t *p = data;
    for (size_t i = 0; i < size;) {
        if (size - i >= 8 && plain8(p + i)) {
            i += 8;
            continue;
        }
        size_t step = sequence(p + i, size - i);
        if (step == 0)
            return false;
        i += step;
    }
    return true;
}

void utf8_copy(char *to, size_t capacity, const char *from)
{
    size_t size = from ? strnlen(from, capacity) : 0;
    if (size == capacity) {
        size--;
        while (size > 0 && ((unsigned char)from[size] & 0xc0) == 0x80)
            size--;
    }
    if (size)
        memcpy(to, from, size);
    to[size] = '\0';
}

static bool utf8_is_hidden(uint32_t c)
{
    static const uint32_t ranges[][2] = {
        {0x0, 0x1f},        {0x7f, 0x9f},       {0xad, 0xad},       {0x34f, 0x34f},
        {0x600, 0x605},     {0x61c, 0x61c},     {0x6dd, 0x6dd},     {0x70f, 0x70f},
        {0x890, 0x891},     {0x8e2, 0x8e2},     {0x115f, 0x1160},   {0x17b4, 0x17b5},
        {0x180b, 0x180f},   {0x200b, 0x200f},   {0x2028, 0x202e},   {0x2060, 0x206f},
        {0x3164, 0x3164},   {0xfe00, 0xfe0f},   {0xfeff, 0xfeff},   {0xffa0, 0xffa0},
        {0xfff0, 0xfffb},   {0x110bd, 0x110bd}, {0x110cd, 0x110cd}, {0x13430, 0x1343f},
        {0x1bca0, 0x1bca3}, {0x1d173, 0x1d17a}, {0xe0000, 0xe0fff},
    };
    size_t i = 0, n = sizeof ranges / sizeof *ranges;
    while (i < n && ranges[i][1] < c)
        i++;
    return i < n && ranges[i][0] <= c;
}

size_t utf8_next(const char *text, bool *hidden_out)
{
    static const uint8_t bits[] = {0, 0x7f, 0x1f, 0x0f, 0x07};
    const uint8_t *p = (const uint8_t *)text;
    size_t size = sequence(p, 4); /* the NUL ends it too */
    uint32_t value = p[0] & bits[size];
    for (size_t i = 1; i < size; i++)
        value = value << 6 | (p[i] & 0x3fu);
    *hidden_out = size > 0 && utf8_is_hidden(value);
    return size;
}

void utf8_make_harmless(char *text)
{
    while (*text) {
        bool hidden;
        size_t size = utf8_next(text, &hidden);
        if (hidden)
            memset(text, ' ', size);
        text += size ? size : 1;
    }
}

/* --------------------------------------------------------------------------- text */

text text_in(char *chars, size_t size)
{
    if (size > 0)
        chars[0] = '\0';
    return (text){.chars = chars, .size = size};
}

/* How long it is; as much of it as there is room for stands behind the text. */
static size_t write_behind(text *t, const char *format, va_list arguments)
{
    size_t room = t->used < t->size ? t->size - t->used : 0;
    int n = vsnprintf(room ? t->chars + t->used : NULL, room, format, arguments);
    return n > 0 ? (size_t)n : 0;
}

void text_add(text *t, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    t->used += write_behind(t, format, arguments);
    va_end(arguments);
}

bool text_add_whole(text *t, size_t spare, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    size_t n = write_behind(t, format, arguments);
    va_end(arguments);
    bool fits =
        t->used < t->size && n < t->size - t->used && spare < t->size - t->used - n;
    if (fits)
        t->used += n;
    else if (t->used < t->size)
        t->chars[t->used] = '\0';
    return fits;
}

void text_add_shape(text *t, const uint64_t *shape, uint32_t n_dims)
{
    text_add(t, "[");
    for (uint32_t i = 0; i < n_dims; i++)
        text_add(t, "%s%" PRIu64, i ? ", " : "", shape[i]);
    text_add(t, "]");
}

bool text_switched_on(const char *variable)
{
    static const char *const words[] = {"1", "true", "yes"};
    const char *value = getenv(variable);
    bool on = false;
    for (size_t i = 0; i < sizeof words / sizeof words[0] && value; i++)
        on = on || strcasecmp(value, words[i]) == 0;
    return on;
}
