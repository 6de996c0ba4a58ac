/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Traces: what each pull and each update of this process did when, as a file that
 * ui.perfetto.dev and chrome://tracing open (the trace event format, JSON). A row a thread, and one
 * a rank that the thread pulls from.
 *
 * One trace a process. Its memory is taken when it starts (less than 1 MiB, and as it grows 24
 * bytes for each row of the picture); what finds no room is counted (an event "lost"). A thread of
 * its own writes the file, so that calls wait for no file system: it is whole JSON after each
 * write, within a second after a call, at once for one that failed, and when a client or server is
 * destroyed, which waits a second for it at most. It ends at 64 MiB.
 *
 * With FANIN_TRACE=DIR in the environment the first client or server of a process starts one in a
 * new file DIR/fanin-PID-TIME.json, mode 0600; if it cannot, a log line says why (event "trace").
 * DIR belongs to this process's user or to root, and so does a symbolic link in its place.
 *
 * Fork: a child has no trace; with FANIN_TRACE its first client or server starts one of its own.
 */
#ifndef FANIN_TRACE_H
#define FANIN_TRACE_H

#include <fanin/error.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Starts the trace in @p file, which is made, mode 0600, and must not be there. Calls that are
 * under way are not in it, or in part. Thread: any. Blocks for as long as making a file does, 5 s
 * at most.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: @p file is NULL or "".
 * - FANIN_ERR_STATE: this process has a trace already, perhaps by FANIN_TRACE. Stop it first.
 * - FANIN_ERR_EXISTS: the file is there already. FANIN_ERR_IO: it cannot be made; sys_errno says
 * why (ETIMEDOUT: the file
 *   system has not answered).
 * - FANIN_ERR_LIMIT: no thread can be had.
 * - FANIN_ERR_MEMORY: out of memory.
 */
FANIN_API fanin_status fanin_trace_start(const char *file,
                                         fanin_error *error) FANIN_MUST_CHECK;

/**
 * Writes what is left and ends the trace; without one it does nothing. At the process's exit the
 * library does so itself. Thread: any. Blocks for as long as writing less than 2 MiB does, 5 s at
 * most.
 *
 * Errors:
 * - FANIN_ERR_IO: not all could be written, now or before (sys_errno says why; ETIMEDOUT: not yet,
 * what is missing
 *   comes when the file system answers again), or the file has reached its limit of 64 MiB (EFBIG).
 *   What was written before is whole.
 */
FANIN_API fanin_status fanin_trace_stop(fanin_error *error);

#ifdef __cplusplus
}
#endif
#endif
