/* SPDX-License-Identifier: Apache-2.0 */
/** @file Where log messages go: to the caller's function, or where FANIN_LOG says. */
#ifndef LOG_CHOICE_H
#define LOG_CHOICE_H

#include "log.h"

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
