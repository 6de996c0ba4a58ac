/* SPDX-License-Identifier: Apache-2.0 */
#include "log.h"
#include "text.h"

#include <stdarg.h>
#include <stdio.h>

bool log_wants(const logger *to, fanin_log_level level)
{
    return to && to->fn && (to->most == 0 || level <= to->most);
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
    utf8_make_harmless(text); /* parts may come from a peer */
    to->fn(to->cookie, level, event, text);
}
