/* SPDX-License-Identifier: Apache-2.0 */
/** @file Where log messages go: to the caller's function, or where FANIN_LOG says. */
#ifndef LOG_CHOICE_H
#define LOG_CHOICE_H

#include "log.h"

/**
 * If there is no function (*@p fn NULL), that of FANIN_LOG in the environment, which writes to standard
 * error or a file and lives as long as the process. FANIN_ERR_ARGUMENT: it says something else;
 * FANIN_ERR_AUTH: the file is another user's; FANIN_ERR_IO. Thread: any.
 */
fanin_status log_choose(fanin_log_fn *fn, void **cookie, fanin_error *error);
/** A logger of both, which knows what they drop anyhow. */
logger log_of(fanin_log_fn fn, void *cookie);

#endif
