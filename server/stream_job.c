/* SPDX-License-Identifier: Apache-2.0 */
#include "stream_job.h"

#include <stdlib.h>
#include <string.h>

/* One entry as a range; NULL or why it is refused. */
static const char *range_of(const snapshot *catalog, const read_entry *e,
                            job_range *out)
{
    if (e->box >= catalog->n_boxes)
        return "the read names a box that this rank does not have";
    uint64_t start = catalog->boxes[e->box].start;
    out->box = e->box;
    if (e->count > 0) {
        if (e->count > catalog->n_boxes - e->box)
            return "the read names a box that this rank does not have";
        out->at = start;
        out->length = catalog->boxes[e->box + e->count].start - start;
        return NULL;
    }
    uint64_t bytes = snapshot_box_bytes(catalog, e->box);
    if (e->length == 0)
        return "an entry of the read is empty";
    if (e->offset > bytes || e->length > bytes - e->offset)
        return "the read reaches beyond a box";
    out->at = start + e->offset;
    out->length = e->length;
    return NULL;
}

fanin_status job_set_ranges(job *j, const msg_read *m, const char **why)
{
    if (j->capacity < m->n_entries) {
        job_range *grown = realloc(j->ranges, m->n_entries * sizeof *grown);
        if (!grown) {
            *why = "the server is out of memory";
            return FANIN_ERR_MEMORY;
        }
        j->ranges = grown;
        j->capacity = m->n_entries;
    }
    uint64_t sum = 0;
    for (uint32_t i = 0; i < m->n_entries; i++) {
        *why = range_of(j->catalog, &m->entries[i], &j->ranges[i]);
        if (*why)
            return FANIN_ERR_ARGUMENT;
        /* Also keeps the sum from overflowing. */
        if (j->ranges[i].length > LIMIT_READ_BYTES - sum) {
            *why = "the read asks for more than 4 MiB";
            return FANIN_ERR_ARGUMENT;
        }
        sum += j->ranges[i].length;
    }
    if (sum != m->bytes || sum == 0) {
        *why = "the read's entries do not sum up to its bytes";
        return FANIN_ERR_ARGUMENT;
    }
    j->n_ranges = m->n_entries;
    j->current = 0;
    j->left = sum;
    j->is_void = false;
    return FANIN_OK;
}

size_t job_memory(const job *j)
{
    return j->capacity * sizeof *j->ranges;
}

void job_end(job *j)
{
    snapshot_release(j->catalog);
    j->catalog = NULL;
    j->of = NULL;
    j->left = 0;
}

void job_free(job *j)
{
    job_end(j);
    free(j->ranges);
    memset(j, 0, sizeof *j);
}

/* ---------------------------------------------------------------- gather */

bool gather_add(gather *g, const void *data, size_t size)
{
    if (size > g->most - g->bytes)
        size = g->most - g->bytes;
    if (size == 0)
        return g->bytes < g->most;
    struct iovec *last = g->n > 0 ? &g->iov[g->n - 1] : NULL;
    if (last && (const char *)last->iov_base + last->iov_len == data) {
        last->iov_len += size;
    } else {
        if (g->n == IOVEC_MOST)
            return false;
        g->iov[g->n].iov_base = (void *)(uintptr_t)data;
        g->iov[g->n].iov_len = size;
        g->n++;
    }
    g->bytes += size;
    return g->bytes < g->most;
}

/* Copies short pieces one behind the other. */
static bool gather_copy(gather *g, const void *data, size_t size)
{
    if (size > g->most - g->bytes)
        size = g->most - g->bytes;
    uint8_t *to = g->bounce + g->bounced;
    memcpy(to, data, size);
    g->bounced += size;
    return gather_add(g, to, size);
}

/* Where run @p index of a view begins, and an odometer that steps to the next one. */
typedef struct walk {
    const strided *view;
    const uint8_t *at;
    uint64_t index[FANIN_MAX_DIMS];
} walk;

static void walk_start(walk *w, const strided *view, const uint8_t *first, uint64_t run)
{
    w->view = view;
    w->at = first;
    for (uint32_t i = view->n_dims; i-- > 0;) {
        w->index[i] = run % view->extent[i];
        run /= view->extent[i];
        w->at += view->from[i] * (int64_t)w->index[i];
    }
}

static void walk_next(walk *w)
{
    for (uint32_t i = w->view->n_dims; i-- > 0;) {
        if (++w->index[i] < w->view->extent[i]) {
            w->at += w->view->from[i];
            return;
        }
        w->at -= w->view->from[i] * (int64_t)(w->index[i] - 1);
        w->index[i] = 0;
    }
}

/* Bytes [offset, offset + length) of a box that is not packed. */
static bool gather_view(gather *g, const strided *view, const uint8_t *first,
                        uint64_t offset, uint64_t length)
{
    bool (*add)(gather *, const void *, size_t) =
        view->run < GATHER_RUN ? gather_copy : gather_add;
    walk w;
    walk_start(&w, view, first, offset / view->run);
    for (uint64_t skip = offset % view->run; length > 0; skip = 0, walk_next(&w)) {
        uint64_t size = view->run - skip < length ? view->run - skip : length;
        if (!add(g, w.at + skip, size))
            return false;
        length -= size;
    }
    return true;
}

void job_gather(const job *j, gather *g)
{
    const snapshot *catalog = j->catalog;
    for (uint32_t i = j->current; i < j->n_ranges; i++) {
        uint64_t at = j->ranges[i].at, end = at + j->ranges[i].length;
        for (const source_box *b = &catalog->boxes[j->ranges[i].box]; at < end; b++) {
            uint64_t stop = b[1].start < end ? b[1].start : end;
            uint64_t offset = at - b->start, length = stop - at;
            bool more = b->view == VIEW_PACKED
                            ? gather_add(g, b->first + offset, length)
                            : gather_view(g, &catalog->views[b->view], b->first, offset,
                                          length);
            if (!more)
                return;
            at = stop;
        }
    }
}

void job_gather_zeros(const job *j, gather *g)
{
    static const uint8_t zeros[65536];
    for (uint64_t left = j->left; left > 0;) {
        size_t size = left < sizeof zeros ? (size_t)left : sizeof zeros;
        if (!gather_add(g, zeros, size))
            return;
        left -= size;
    }
}

void job_advance(job *j, uint64_t bytes)
{
    j->left -= bytes;
    while (bytes > 0) {
        job_range *r = &j->ranges[j->current];
        uint64_t step = bytes < r->length ? bytes : r->length;
        r->at += step;
        r->length -= step;
        bytes -= step;
        if (r->length == 0)
            j->current++;
    }
    if (j->left == 0 || j->is_void)
        return;
    job_range *r = &j->ranges[j->current];
    while (r->at >= j->catalog->boxes[r->box + 1].start)
        r->box++;
}
