/* SPDX-License-Identifier: Apache-2.0 */
/** @file Where log messages go: to the caller's function, or where FANIN_LOG says. */
#ifndef LOG_CHOICE_H
#define LOG_CHOICE_H

#include "log.h"
#include <fanin/log.h>

/* Log messages written to a descriptor by a thread of their own: who logs never waits for
    the reader of a pipe. */

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

/**
 * If there is no function (*@p fn NULL), that of FANIN_LOG in the environment, whose lines a thread
 * of the process writes to standard error or a file; the cookie lives as long as the process.
 * fanin_log_choice()'s errors; FANIN_ERR_LIMIT: no thread; FANIN_ERR_MEMORY. Thread: any. Blocks
 * for as long as opening the file does, the first time.
 */
fanin_status log_choose(fanin_log_fn *fn, void **cookie, fanin_error *error);
/** A logger of both, which knows what they drop anyhow. */
logger log_of(fanin_log_fn fn, void *cookie);

#endif
