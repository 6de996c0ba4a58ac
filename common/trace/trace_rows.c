/* SPDX-License-Identifier: Apache-2.0 */
#include "trace_rows.h"

#include <stdlib.h>

#define LEAST 64u

static trace_row *trace_rows_place_of(const trace_rows *rows, uint32_t thread,
                                      int32_t rank)
{
    size_t at = (thread * 31u + (uint32_t)(rank + 1)) * UINT32_C(2654435761) >> 8;
    for (;; at++) {
        trace_row *row = &rows->table[at & (rows->size - 1)];
        if (row->thread == 0 || (row->thread == thread && row->rank == rank))
            return row;
    }
}

/* Half of it is always free. */
static bool grow(trace_rows *rows)
{
    trace_rows larger = {.size = rows->size ? 2 * rows->size : LEAST,
                         .used = rows->used};
    larger.table = calloc(larger.size, sizeof *larger.table);
    if (!larger.table)
        return false;
    for (size_t i = 0; i < rows->size; i++) {
        const trace_row *row = &rows->table[i];
        if (row->thread != 0)
            *trace_rows_place_of(&larger, row->thread, row->rank) = *row;
    }
    free(rows->table);
    *rows = larger;
    return true;
}

const trace_row *trace_rows_find(trace_rows *rows, uint32_t thread, int32_t rank,
                                 bool *is_new)
{
    trace_row *row = rows->size ? trace_rows_place_of(rows, thread, rank) : NULL;
    *is_new = !row || row->thread == 0;
    if (!*is_new)
        return row;
    if (2 * (size_t)rows->used >= rows->size) {
        if (!grow(rows))
            return NULL;
        row = trace_rows_place_of(rows, thread, rank);
    }
    *row = (trace_row){thread, rank, rows->used++};
    return row;
}

void trace_rows_free(trace_rows *rows)
{
    free(rows->table);
    *rows = (trace_rows){0};
}
