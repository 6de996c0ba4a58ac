/* SPDX-License-Identifier: Apache-2.0 */
/** @file Log messages written to a descriptor by a thread of their own: who logs never waits for
    the reader of a pipe. */
#ifndef LOG_SINK_H
#define LOG_SINK_H

#include <fanin/log.h>

typedef struct log_sink log_sink;

/** With its thread. @p fd: stays the caller's. NULL: no memory or no thread, *@p error says so
    (FANIN_ERR_MEMORY, FANIN_ERR_LIMIT). */
log_sink *log_sink_new(int fd, fanin_log_level level, fanin_error *error);
/** Where to log: fanin_log_ring_write's cookie. */
fanin_log_ring *log_sink_ring(const log_sink *sink);
/** The thread writes what there is and ends; waits half a second at most for it, so also if the
    reader of a pipe has stopped. Nothing is freed: others may log yet, and are not heard. */
void log_sink_close(log_sink *sink);
/** The same of a sink that nobody has logged to, which is freed. */
void log_sink_free(log_sink *sink);

#endif
