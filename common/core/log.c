/* SPDX-License-Identifier: Apache-2.0 */
#include "log.h"

#include <stdarg.h>
#include <stdio.h>

void log_write(const logger *to, fanin_log_level level, const char *event,
               const char *format, ...)
{
    if (!to || !to->fn)
        return;
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    int size = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (size < 0)
        return;
    /* Parts may come from a peer: one message stays one line without control codes. */
    for (char *c = text; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            *c = ' ';
    to->fn(to->cookie, level, event, text);
}
