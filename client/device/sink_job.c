/* SPDX-License-Identifier: Apache-2.0 */
#include "array.h"
#include "copy_kernel.h"
#include "copy_list.h"
#include "device/device_sink_internal.h"

#include <stdlib.h>

#define MAX_ITEMS 16384 /* of a chunk */
/* Of pieces in a chunk, whatever the views: what a copy kernel moves at once. */
#define ALIGNMENT 16

int device_sink_device(const device_sink *sink, const void *to)
{
    const memory_range *r =
        sink ? memory_range_find(sink->ranges, sink->n_ranges, to) : NULL;
    return r ? r->device : -1;
}

/* ------------------------------------------------------------------- items */

/* What a run becomes that copy_units_cut() cuts where lines of memory end. */
static uint64_t entries_of_run(uint64_t run)
{
    return run > COPY_UNIT_BYTES ? run / COPY_UNIT_BYTES + 2 : 1;
}

/* Entries that a piece becomes, or a few more: a chunk keeps all multiprocessors busy. */
static uint64_t entries_of(uint64_t length, const strided *view)
{
    if (!view || view->n_dims == 0)
        return entries_of_run(length);
    uint64_t inner = view->extent[view->n_dims - 1];
    uint64_t outer = strided_runs(view) / inner;
    if (view->run > COPY_UNIT_BYTES)
        return outer * inner * entries_of_run(view->run);
    uint64_t at_once = COPY_UNIT_BYTES / view->run;
    at_once = at_once < COPY_UNIT_RUNS ? at_once : COPY_UNIT_RUNS;
    return outer * (inner / at_once + 1);
}

bool sink_job_add(sink_job *job, const uint8_t *from, uint64_t length, uint8_t *to,
                  const strided *view)
{
    const device_sink *s = job->sink;
    int device = device_sink_device(s, to);
    size_t index = 0;
    while (index < s->n_devices && s->devices[index].device != device)
        index++;
    if (index == s->n_devices || !array_reserve(&job->items, &job->max_items,
                                                job->n_items + 1, sizeof *job->items))
        return false;
    job->items[job->n_items++] = (sink_item){
        .from = from, .to = to, .view = view, .length = length, .device = index};
    job->expected += entries_of(length, view);
    return true;
}

uint8_t *sink_job_place(sink_job *job, uint64_t length, uint8_t *to,
                        const strided *view)
{
    size_t at = (job->used + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (job->n_items > 0 &&
        (length > CHUNK_BYTES - at || job->n_items == MAX_ITEMS ||
         entries_of(length, view) + job->expected > job->max_entries))
        return NULL;
    uint8_t *bytes = job->chunk->bytes + at;
    if (length > CHUNK_BYTES - at || !sink_job_add(job, bytes, length, to, view))
        return NULL;
    job->used = at + length;
    return bytes;
}

void sink_job_clear(sink_job *job)
{
    for (size_t i = 0; job->tables && i < job->sink->n_devices; i++) {
        if (job->tables[i])
            gpu_table_destroy(&job->tables[i]);
    }
    job->n_items = job->n_entries = job->expected = 0;
    job->used = 0;
    job->requests = job->bytes = 0;
    job->finished = job->broken = false;
    job->next = NULL;
}

void sink_job_release(sink_job *job)
{
    sink_job_clear(job);
    free(job->items);
    free(job->tables);
    job->items = NULL;
    job->tables = NULL;
    job->max_items = 0;
}

/* ----------------------------------------------------------------- entries */

static bool cut_job_entry(copy_list *out, const copy_entry *entry)
{
    uint64_t n = copy_units_cut(entry, NULL);
    if (!array_reserve(&out->entries, &out->capacity, out->n + n, sizeof *entry))
        return false;
    out->n += copy_units_cut(entry, out->entries + out->n);
    return true;
}

bool sink_job_entries(const sink_job *job, size_t index)
{
    device_sink *s = job->sink;
    s->blocks.n = s->cut.n = 0;
    s->blocks.failed = false;
    for (size_t i = 0; i < job->n_items; i++) {
        const sink_item *item = &job->items[i];
        uint64_t from = (uint64_t)(uintptr_t)item->from;
        uint64_t to = (uint64_t)(uintptr_t)item->to;
        if (item->device != index)
            continue;
        if (item->view)
            copy_list_add_view(&s->blocks, 0, from, to, item->view);
        else
            copy_list_add(&s->blocks, 0, from, to, item->length);
    }
    bool ok = !s->blocks.failed;
    for (uint64_t i = 0; i < s->blocks.n && ok; i++)
        ok = cut_job_entry(&s->cut, &s->blocks.entries[i]);
    return ok;
}
