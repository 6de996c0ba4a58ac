/* SPDX-License-Identifier: Apache-2.0 */
#include "array.h"
#include "device/device_sink_internal.h"

#include <stdlib.h>

/* What one block of threads copies: a chunk keeps all multiprocessors busy. */
#define CUT_BYTES ((uint32_t)16 << 10)
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

/* Entries that a piece becomes, or a few more. */
static uint64_t entries_of(uint64_t length, const strided *view)
{
    if (!view || view->n_dims == 0)
        return length / CUT_BYTES + 1;
    uint64_t inner = view->extent[view->n_dims - 1];
    uint64_t outer = strided_runs(view) / inner;
    if (view->run > CUT_BYTES)
        return outer * inner * (view->run / CUT_BYTES + 1);
    return outer * (inner / (CUT_BYTES / view->run) + 1);
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

static bool push(copy_list *out, const copy_entry *e)
{
    if (!array_reserve(&out->entries, &out->capacity, out->n + 1, sizeof *out->entries))
        return false;
    out->entries[out->n++] = *e;
    return true;
}

static bool cut_run(copy_list *out, const copy_entry *whole, uint32_t index)
{
    copy_entry e = *whole;
    e.from += index * (uint64_t)whole->from_step;
    e.to += index * (uint64_t)whole->to_step;
    e.runs = 1;
    for (uint32_t left = whole->run; left > 0; left -= e.run) {
        e.run = left < CUT_BYTES ? left : CUT_BYTES;
        if (!push(out, &e))
            return false;
        e.from += e.run;
        e.to += convert_bytes(e.convert, e.run);
    }
    return true;
}

static bool cut_entry(copy_list *out, const copy_entry *whole)
{
    if (whole->run > CUT_BYTES) {
        for (uint32_t i = 0; i < whole->runs; i++) {
            if (!cut_run(out, whole, i))
                return false;
        }
        return true;
    }
    uint32_t most = whole->run ? CUT_BYTES / whole->run : 1;
    copy_entry e = *whole;
    for (uint32_t left = whole->runs; left > 0; left -= e.runs) {
        e.runs = left < most ? left : most;
        if (!push(out, &e))
            return false;
        e.from += e.runs * (uint64_t)e.from_step;
        e.to += e.runs * (uint64_t)e.to_step;
    }
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
        ok = cut_entry(&s->cut, &s->blocks.entries[i]);
    return ok;
}
