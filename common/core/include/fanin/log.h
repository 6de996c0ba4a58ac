/* SPDX-License-Identifier: Apache-2.0 */
/** @file Log messages. The library writes to no descriptor; it calls the caller's function. */
#ifndef FANIN_LOG_H
#define FANIN_LOG_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t fanin_log_level;
enum {
    FANIN_LOG_ERROR = 1,
    FANIN_LOG_WARNING = 2,
    FANIN_LOG_INFO = 3,
    FANIN_LOG_DEBUG = 4,
};

/**
 * Receives one message. @p event is a static identifier ("session-open"), @p message one
 * line without a newline; both are valid only during the call. Called from any thread of
 * the library, several at once. Must not block for long and must not call fanin.
 */
typedef void (*fanin_log_fn)(void *cookie, fanin_log_level level, const char *event,
                             const char *message);

#ifdef __cplusplus
}
#endif
#endif
