/* SPDX-License-Identifier: Apache-2.0 */
/** @file Formatting messages for the caller's log function. */
#ifndef LOG_H
#define LOG_H

#include <fanin/log.h>
#include <stdbool.h>

/** Where messages go; copied by value into everything that logs. fn NULL: nowhere. */
typedef struct logger {
    fanin_log_fn fn;
    void *cookie;
    fanin_log_level most; /**< what is beyond is dropped there anyhow; 0: not known */
} logger;

/** Whether lines of this level go anywhere. */
bool log_wants(const logger *to, fanin_log_level level);
/** The level that a ring was made for. */
fanin_log_level log_ring_level(const fanin_log_ring *ring);
/** Formats (cut at 1 KiB) and calls to->fn, if any. Thread: any. */
void log_write(const logger *to, fanin_log_level level, const char *event,
               const char *format, ...) __attribute__((format(printf, 4, 5)));

#endif
