/* SPDX-License-Identifier: Apache-2.0 */
#include "thread.h"
#include "ucx_internal.h"
#include <stdio.h>

/* UCX's log handlers have no cookie, so the logger of the call that is being made is kept
   per thread. Nothing is shared between threads. */
static _Thread_local const logger *current_log;

ucx_scope ucx_scope_enter(const logger *log, bool threads)
{
    ucx_scope scope = {.outer = current_log, .threads = threads};
    current_log = log;
    if (threads)
        scope.signals = signals_block();
    return scope;
}

void ucx_scope_leave(const ucx_scope *scope)
{
    if (scope->threads)
        signals_restore(&scope->signals);
    current_log = scope->outer;
}

/* Whatever fails is also returned to the caller, who decides how bad that is: hence UCX's
   errors are warnings here. */
static fanin_log_level ucx_log_level_of(int level)
{
    if (level == UCX_LOG_FATAL)
        return FANIN_LOG_ERROR;
    return level <= UCX_LOG_WARN ? FANIN_LOG_WARNING : FANIN_LOG_DEBUG;
}

static void log_message(int level, const char *format, va_list arguments)
    __attribute__((format(printf, 2, 0)));

static void log_message(int level, const char *format, va_list arguments)
{
    char text[768];
    if (vsnprintf(text, sizeof(text), format, arguments) < 0)
        return;
    for (char *c = text; *c; c++)
        if (*c == '\n')
            *c = ' ';
    log_write(current_log, ucx_log_level_of(level), "ucx", "%s", text);
}

/* Outside of our calls messages come from UCX's own thread or from another user of the same
   library. If it was there before us, its user has decided where they go. */
static int on_foreign_ucx(const char *file, unsigned line, const char *function,
                          int level, const void *component, const char *format,
                          va_list arguments)
{
    (void)file, (void)line, (void)function, (void)component;
    if (!current_log)
        return UCX_LOG_CONTINUE;
    log_message(level, format, arguments);
    return UCX_LOG_STOP;
}

static int on_own_ucx(const char *file, unsigned line, const char *function, int level,
                      const void *component, const char *format, va_list arguments)
{
    (void)on_foreign_ucx(file, line, function, level, component, format, arguments);
    return UCX_LOG_STOP;
}

void ucx_log_install(const ucx *u)
{
    u->ucs_log_push_handler(u->ours ? on_own_ucx : on_foreign_ucx);
}
