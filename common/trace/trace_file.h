/* SPDX-License-Identifier: Apache-2.0 */
/** @file The file of a trace: made safely, appended to, whole JSON between two writes. */
#ifndef TRACE_FILE_H
#define TRACE_FILE_H

#include <fanin/error.h>
#include <stdint.h>

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
/** Appends an object to the list of events. */
void trace_file_add(trace_file *f, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/** The same, put together of pieces, of which none may be longer than is left of 1 KiB: formats
    cost more than all else that a span does. */
void trace_file_begin(trace_file *f);
void trace_file_text(trace_file *f, const char *text);
void trace_file_number(trace_file *f, uint64_t number);
/** Nanoseconds as microseconds with three digits behind the point. */
void trace_file_micros(trace_file *f, uint64_t ns);
/** Writes what was added. */
void trace_file_flush(trace_file *f);

/** Writes @p from as JSON has it in quotation marks, cut at @p size. */
void trace_escape(char *out, size_t size, const char *from);

#endif
