/* SPDX-License-Identifier: Apache-2.0 */
/** @file Formatting messages for the caller's log function. */
#ifndef LOG_H
#define LOG_H

#include <fanin/log.h>

/** Where messages go; copied by value into everything that logs. fn NULL: nowhere. */
typedef struct logger {
    fanin_log_fn fn;
    void *cookie;
} logger;

/** Formats (cut at 1 KiB) and calls to->fn, if any. Thread: any. */
void log_write(const logger *to, fanin_log_level level, const char *event,
               const char *format, ...) __attribute__((format(printf, 4, 5)));

#endif
