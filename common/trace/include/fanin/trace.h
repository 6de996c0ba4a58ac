/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Traces: what each pull and each update of this process did, and when. A trace is a file that
 * ui.perfetto.dev and chrome://tracing open (the trace event format, JSON). Each thread has a row,
 * and so has each rank that the thread pulls from.
 *
 * A process has one trace. The trace takes less than 1 MiB of memory when it starts, and 24 bytes
 * for each further row. It counts events that find no room (an event "lost"). The file ends at 64
 * MiB.
 *
 * A thread of its own writes the file, so calls do not wait for a file system. The file is whole
 * JSON after each write. The thread writes within a second after a call, and at once after a call
 * that failed. It also writes when a client or server is destroyed, and that call waits at most a
 * second for the write.
 *
 * With FANIN_TRACE=DIR in the environment the first client or server of a process starts a trace.
 * Its file is a new one, DIR/fanin-PID-TIME.json, mode 0600. If that fails, a log line says why
 * (event "trace"). DIR belongs to this process's user or to root, and so does a symbolic link in
 * its place.
 *
 * Fork: a child has no trace. With FANIN_TRACE its first client or server starts a trace of the
 * child's own.
 */
#ifndef FANIN_TRACE_H
#define FANIN_TRACE_H

#include <fanin/error.h>

#ifdef __cplusplus
extern "C" {
#endif

/**
 * Starts the trace in @p file. The function makes the file, mode 0600, and the file must not exist
 * yet. Calls that are under way are missing in the trace, or are there in part. Thread: any. Blocks
 * as long as making a file takes, at most 5 s.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: @p file is NULL or "".
 * - FANIN_ERR_STATE: this process has a trace already, perhaps by FANIN_TRACE. Stop it first.
 * - FANIN_ERR_EXISTS: the file is there already.
 * - FANIN_ERR_IO: the file cannot be made. sys_errno says why; ETIMEDOUT: the file system has not
 *   answered.
 * - FANIN_ERR_LIMIT: the process cannot start a thread.
 * - FANIN_ERR_MEMORY: out of memory.
 */
FANIN_API fanin_status fanin_trace_start(const char *file,
                                         fanin_error *error) FANIN_MUST_CHECK;

/**
 * Writes what is left and ends the trace. Without a trace it does nothing. At the process's exit
 * the library does so itself. Thread: any. Blocks as long as writing less than 2 MiB takes, at most
 * 5 s.
 *
 * Errors:
 * - FANIN_ERR_IO: some events were not written, now or before. sys_errno says why. ETIMEDOUT: the
 *   library writes them when the file system answers again. EFBIG: the file has reached its limit
 *   of 64 MiB. The part that was written before is whole.
 */
FANIN_API fanin_status fanin_trace_stop(fanin_error *error);

#ifdef __cplusplus
}
#endif
#endif
