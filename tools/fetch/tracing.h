/* SPDX-License-Identifier: Apache-2.0 */
/** @file --trace: a command's trace from before it connects until its client is gone. */
#ifndef TRACING_H
#define TRACING_H

/** Starts the trace, if @p file is not NULL. 0, or the exit status. */
int tracing_start(const char *file);
/** Ends it. @p code, or if that is 0 and the trace is not whole the exit status. */
int tracing_stop(const char *file, int code);

#endif
