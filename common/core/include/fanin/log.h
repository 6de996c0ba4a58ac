/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Log messages. The library calls the caller's function, or keeps the messages in a ring that one
 * thread of the caller reads. It writes to no descriptor then.
 *
 * Without a function FANIN_LOG in the environment counts. "debug", "info" or "warn" makes servers
 * and clients write lines of that level and graver ones to standard error. "info,FILE" appends the
 * lines to FILE. The library makes the file (mode 0600) if it is missing. It refuses a link, and
 * another user's file or pipe.
 *
 * A thread of the process writes the lines, so no call waits for a full pipe or a slow disk. The
 * library drops lines while 1024 others wait. A later line says how many were dropped (event
 * "log-lost"). A line that cannot be written is lost, and raises no SIGPIPE. At the process's exit
 * the thread has half a second for the lines that wait. _exit() and death by a signal lose these
 * lines.
 *
 * The library reads FANIN_LOG with the first server or client of the process. If its value is
 * wrong, that creation fails with an error of fanin_log_choice().
 *
 * A client tells each pull in one line (information, event "pull", at most ten a second). The line
 * has trace id and number of the pull, publication, step, ranks, tensors, bytes, path and
 * milliseconds by phase. It also has restarts, stale attempts, and the error of a failed pull. The
 * server's lines of its connection (events "session-open", "session-close") name the same trace id.
 * Phases have lines of their own (debug, event "phase").
 */
#ifndef FANIN_LOG_H
#define FANIN_LOG_H

#include <fanin/error.h>

#include <stddef.h>
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
 * Receives one message. @p event is a static identifier ("session-open"). @p message is one line
 * without a newline. Both are valid only during the call. Any threads of the library call it,
 * several at once. It must not block for long and must not call fanin.
 */
typedef void (*fanin_log_fn)(void *cookie, fanin_log_level level, const char *event,
                             const char *message);

/**
 * Parses a value of FANIN_LOG, for callers that log elsewhere by the same rule. @p text is the
 * value, such as "info,FILE". Sets *level, and sets *descriptor to the file's descriptor, opened to
 * append. The caller closes it; -1: standard error. Thread: any. Blocks as long as opening the file
 * takes.
 *
 * Errors (*level and *descriptor stay as they are):
 * - FANIN_ERR_ARGUMENT: @p text has another form, or an argument is NULL.
 * - FANIN_ERR_IO: the file cannot be opened, or is a link; sys_errno says why.
 * - FANIN_ERR_AUTH: the file is another user's.
 */
FANIN_API fanin_status fanin_log_choice(const char *text, fanin_log_level *level,
                                        int *descriptor,
                                        fanin_error *error) FANIN_MUST_CHECK;

/**
 * Messages that wait for a reader. For callers in whose language a call from a foreign thread is
 * slow or can deadlock. Any number of handles log by fanin_log_ring_write() with the ring as its
 * cookie, and one thread of the caller reads.
 */
typedef struct fanin_log_ring fanin_log_ring;

/** One message. Strings end in a NUL; those that are too long are cut. */
typedef struct fanin_log_line {
    size_t struct_size; /**< sizeof(fanin_log_line), set by the caller */
    fanin_log_level level;
    uint32_t lost;    /**< event "log-lost": messages dropped in its place; else 0 */
    uint64_t time_ns; /**< CLOCK_REALTIME of the message */
    char event[48];
    char message[976];
} fanin_log_line;

/** Initializer for a fanin_log_line on the stack. */
#define FANIN_LOG_LINE_INIT                                                            \
    {                                                                                  \
        sizeof(fanin_log_line), 0, 0, 0, "", ""                                        \
    }

/**
 * Makes a ring of @p lines (1 to 65536, 1 KiB each). The ring keeps messages of @p level and graver
 * ones. The caller owns *out. Thread: any. Does not block.
 *
 * Errors:
 * - FANIN_ERR_ARGUMENT: @p lines or @p level is out of range, or @p out is NULL.
 * - FANIN_ERR_MEMORY: out of memory.
 */
FANIN_API fanin_status fanin_log_ring_create(uint32_t lines, fanin_log_level level,
                                             fanin_log_ring **out,
                                             fanin_error *error) FANIN_MUST_CHECK;

/**
 * A fanin_log_fn whose cookie is the ring; NULL: it drops the message. It does not wait for the
 * reader. A full ring drops the new message. The reader gets a warning in its place that says how
 * many were dropped (event "log-lost"). After fanin_log_ring_close(), and in a forked child, it
 * drops everything. Thread: any, several at once.
 */
FANIN_API void fanin_log_ring_write(void *ring, fanin_log_level level,
                                    const char *event, const char *message);

/**
 * Takes the oldest message, waiting at most @p timeout_ms for one (0: does not block). Thread: any;
 * several readers share the messages.
 *
 * Errors:
 * - FANIN_ERR_TIMEOUT: no message came.
 * - FANIN_ERR_CLOSED: the ring is closed, and empty.
 * - FANIN_ERR_ARGUMENT: no ring or line is given, or the line's struct_size is not set.
 * - FANIN_ERR_FORKED: the ring belongs to the parent process.
 */
FANIN_API fanin_status fanin_log_ring_read(fanin_log_ring *ring, uint32_t timeout_ms,
                                           fanin_log_line *line) FANIN_MUST_CHECK;

/** Ends the ring and wakes its readers. Thread: any. Does not block. NULL and twice: fine. */
FANIN_API void fanin_log_ring_close(fanin_log_ring *ring);

/**
 * Frees *ring and sets it to NULL. Call it when every handle that logs into the ring is
 * destroyed and no read is under way. NULL and a pointer to NULL are fine.
 */
FANIN_API void fanin_log_ring_destroy(fanin_log_ring **ring);

#ifdef __cplusplus
}
#endif
#endif
