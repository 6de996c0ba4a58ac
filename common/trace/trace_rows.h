/* SPDX-License-Identifier: Apache-2.0 */
/** @file The rows of a trace's picture: a thread, or a rank that a thread pulls from. As many as
    there are in the file, of whose size that is a small part. Used by one thread at a time. */
#ifndef TRACE_ROWS_H
#define TRACE_ROWS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct trace_row {
    uint32_t thread; /**< 0: free */
    int32_t rank;    /**< -1: the thread's own */
    uint32_t number; /**< from 0, in the order in which they were first seen */
} trace_row;

typedef struct trace_rows {
    trace_row *table;
    size_t size; /**< 0, or a power of 2 */
    uint32_t used;
} trace_rows;

/** The row of @p thread (not 0; no other thread of the trace has it, also once that has ended) and
    @p rank; valid until the next call. @p is_new: this call has made it. NULL: no memory. */
const trace_row *trace_rows_find(trace_rows *rows, uint32_t thread, int32_t rank,
                                 bool *is_new);
void trace_rows_free(trace_rows *rows);

#endif
