/* SPDX-License-Identifier: Apache-2.0 */
/** @file The file of a trace: made safely, appended to, whole JSON between two writes. */
#ifndef TRACE_FILE_H
#define TRACE_FILE_H

#include "trace.h"
#include <fanin/error.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* The rows of a trace's picture: a thread, or a rank that a thread pulls from. As many as
    there are in the file, of whose size that is a small part. Used by one thread at a time. */

typedef struct trace_row {
    uint32_t thread;
    int32_t rank;    /**< -1: the thread's own */
    uint32_t number; /**< from 0, in the order in which they were first seen */
} trace_row;

/** By thread and rank; zeroed: none. `all` is for free(). */
typedef struct trace_rows {
    trace_row *all;
    size_t n, room;
} trace_rows;

typedef struct trace_file {
    int fd;        /* -1: none */
    uint64_t size; /* without what closes the JSON */
    int failed;    /* errno of the first write that failed; EFBIG: the limit */
    size_t used;
    char text[65536]; /* to be written; room for what closes it */
} trace_file;

/** Makes @p path and writes what begins it. FANIN_ERR_IO. */
fanin_status trace_file_make(trace_file *f, const char *path, fanin_error *error);
/** Makes a file of this process in @p folder. FANIN_ERR_IO, FANIN_ERR_AUTH: the folder is another
    user's. */
fanin_status trace_file_make_in(trace_file *f, const char *folder, fanin_error *error);
/** Writes what was added. */
void trace_file_flush(trace_file *f);

/* Spans as the file has them. */

/** A thread as the trace knows it. */
typedef struct trace_thread {
    uint32_t number; /**< from 1, no other's of this trace */
    uint32_t tid;    /**< the kernel's, which it may give to another one later */
    char name[16];
} trace_thread;

/** Adds @p s, and its row where it is a new one. False: no memory. */
bool trace_text_span(trace_file *f, trace_rows *rows, pid_t pid,
                     const trace_thread *thread, const trace_span *s);
/** Adds how many spans found no room. */
void trace_text_lost(trace_file *f, pid_t pid, uint64_t at_ns, uint64_t spans);

#endif
