/* SPDX-License-Identifier: Apache-2.0 */
#include "copy_list.h"

#include "array.h"
#include <stdlib.h>
#include <string.h>

/** A multiple of all elements' sizes and of what a vector instruction moves. */
#define LONGEST_RUN (UINT32_C(1) << 30)

void copy_list_free(copy_list *list)
{
    free(list->entries);
    memset(list, 0, sizeof *list);
}

static void copy_list_append(copy_list *list, const copy_entry *entry)
{
    list->failed =
        list->failed || work_stopped(list->stop) ||
        !array_reserve(&list->entries, &list->capacity, list->n + 1, sizeof *entry);
    if (!list->failed)
        list->entries[list->n++] = *entry;
}

/* A run of any length, in pieces that an entry can hold. */
static void append_run(copy_list *list, uint32_t base, uint64_t from, uint64_t to,
                       uint64_t length, uint32_t convert)
{
    while (length > 0) {
        copy_entry entry = {
            .from = from,
            .to = to,
            .run = (uint32_t)(length < LONGEST_RUN ? length : LONGEST_RUN),
            .runs = 1,
            .base = base,
            .convert = convert,
        };
        copy_list_append(list, &entry);
        from += entry.run;
        to += convert_bytes(convert, entry.run);
        length -= entry.run;
    }
}

void copy_list_add(copy_list *list, uint32_t base, uint64_t from, uint64_t to,
                   uint64_t length)
{
    append_run(list, base, from, to, length, CONVERT_NONE);
}

/* The line of runs at @p from, @p to: the view's innermost dimension. */
static void add_line(copy_list *list, uint32_t base, uint64_t from, uint64_t to,
                     const strided *view)
{
    uint64_t extent = view->n_dims ? view->extent[view->n_dims - 1] : 1;
    int64_t from_step = view->n_dims ? view->from[view->n_dims - 1] : 0;
    int64_t to_step = view->n_dims ? view->to[view->n_dims - 1] : 0;
    if (view->run > LONGEST_RUN) {
        for (uint64_t i = 0; i < extent; i++)
            append_run(list, base, from + i * (uint64_t)from_step,
                       to + i * (uint64_t)to_step, view->run, view->convert);
        return;
    }
    for (uint64_t done = 0; done < extent;) {
        uint64_t left = extent - done;
        copy_entry entry = {
            .from = from + done * (uint64_t)from_step,
            .to = to + done * (uint64_t)to_step,
            .from_step = from_step,
            .to_step = to_step,
            .run = (uint32_t)view->run,
            .runs = (uint32_t)(left < LONGEST_RUN ? left : LONGEST_RUN),
            .base = base,
            .convert = view->convert,
        };
        copy_list_append(list, &entry);
        done += entry.runs;
    }
}

void copy_list_add_view(copy_list *list, uint32_t base, uint64_t from, uint64_t to,
                        const strided *view)
{
    if (view->run == 0)
        return;
    /* What is around the line; strided_run() counts its elements. */
    strided outer = *view;
    outer.n_dims = view->n_dims ? view->n_dims - 1 : 0;
    uint64_t lines = strided_runs(&outer);
    for (uint64_t i = 0; i < lines && !list->failed; i++) {
        int64_t from_at, to_at;
        strided_run(&outer, i, &from_at, &to_at);
        add_line(list, base, from + (uint64_t)from_at, to + (uint64_t)to_at, view);
    }
}

void copy_entries_run(const copy_entry *entries, uint64_t n, const uint64_t *bases,
                      uint64_t from_add, uint64_t to_add)
{
    for (uint64_t i = 0; i < n; i++) {
        const copy_entry *e = &entries[i];
        uint64_t from = e->from + from_add + (bases ? bases[e->base] : 0);
        uint64_t to = e->to + to_add;
        const strided line = {
            .n_dims = 1,
            .extent = {e->runs},
            .from = {e->from_step},
            .to = {e->to_step},
            .run = e->run,
            .convert = e->convert,
        };
        if (e->runs > 0 && e->run > 0)
            /* NOLINTNEXTLINE(performance-no-int-to-ptr) */
            strided_copy(&line, (void *)(uintptr_t)to, (const void *)(uintptr_t)from);
    }
}
