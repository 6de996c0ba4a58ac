/* SPDX-License-Identifier: Apache-2.0 */
/** @file Spans as the file has them. */
#ifndef TRACE_TEXT_H
#define TRACE_TEXT_H

#include "trace.h"
#include "trace_file.h"
#include "trace_rows.h"
#include <sys/types.h>

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
