/* SPDX-License-Identifier: Apache-2.0 */
#include "text.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>

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
