/* SPDX-License-Identifier: Apache-2.0 */
#include "log.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

bool log_wants(const logger *to, fanin_log_level level)
{
    return to && to->fn && (to->most == 0 || level <= to->most);
}

/* How many bytes at @p c are a character that ends lines, steers terminals or turns text around; 0: none are. */
static size_t steering(const unsigned char *c)
{
    if (*c < 0x20 || *c == 0x7f)
        return 1;
    if (*c == 0xc2 && c[1] >= 0x80 && c[1] <= 0x9f)
        return 2;
    if (*c == 0xe2 && c[1] == 0x80)
        return c[2] == 0x8e || c[2] == 0x8f || (c[2] >= 0xa8 && c[2] <= 0xae) ? 3 : 0;
    return *c == 0xe2 && c[1] == 0x81 && c[2] >= 0xa6 && c[2] <= 0xa9 ? 3 : 0;
}

/* Parts may come from a peer: one message stays one line without control codes. */
static void make_harmless(char *text)
{
    while (*text) {
        size_t bytes = steering((const unsigned char *)text);
        memset(text, ' ', bytes);
        text += bytes ? bytes : 1;
    }
}

void log_write(const logger *to, fanin_log_level level, const char *event,
               const char *format, ...)
{
    if (!log_wants(to, level))
        return;
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    int size = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (size < 0)
        return;
    make_harmless(text);
    to->fn(to->cookie, level, event, text);
}
