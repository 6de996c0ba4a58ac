/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/held_digest.h"

#include "convert.h"
#include <stdlib.h>

/** What one kernel is told, and its results: pinned. */
#define LIST_BYTES ((size_t)1 << 20)
/** 192 MiB of what is digested, in 375 KiB. */
#define LIST_PIECES ((uint32_t)((192 << 20) / DIGEST_KERNEL_PIECE))
#define LIST_ROWS (LIST_PIECES / 6) /* 160 KiB; the rest are 10,240 entries */
/** One is worked on by a device while the thread is at the other. */
#define SHEETS 2

/** Parts that one kernel digests. */
typedef struct sheet {
    gpu_stream *streams[GPU_MAX_DEVICES];
    void *memory; /* pinned: LIST_BYTES */
    digest_list list;
    void *cookie;      /* whose parts */
    uint64_t first, n; /* n 0: none is under way */
    int device;
} sheet;

struct held {
    gpu *g;
    const memory_range *ranges;
    size_t n_ranges;
    box_digest *sum;
    uint8_t *bounce; /* pinned: what was read back from a device */
    size_t bounce_size;
    sheet sheets[SHEETS]; /* one at most has been begun ahead, between two calls */
};

held *held_create(gpu *g, const memory_range *ranges, size_t n_ranges)
{
    held *h = calloc(1, sizeof *h);
    if (!h)
        return NULL;
    *h = (held){.g = g, .ranges = ranges, .n_ranges = n_ranges};
    h->sum = box_digest_create();
    if (!h->sum) {
        free(h);
        return NULL;
    }
    return h;
}

bool held_free(held *h, deadline at)
{
    if (!h)
        return true;
    for (int i = 0; i < SHEETS * GPU_MAX_DEVICES; i++) {
        gpu_stream *stream = h->sheets[i % SHEETS].streams[i / SHEETS];
        if (stream && gpu_stream_wait(stream, at, NULL) == FANIN_ERR_TIMEOUT)
            return false;
    }
    for (int i = 0; i < SHEETS * GPU_MAX_DEVICES; i++)
        gpu_stream_destroy(&h->sheets[i % SHEETS].streams[i / SHEETS]);
    for (int i = 0; i < SHEETS; i++)
        gpu_host_free(h->g, h->sheets[i].memory);
    gpu_host_free(h->g, h->bounce);
    box_digest_free(h->sum);
    free(h);
    return true;
}

/* ------------------------------------------------------------------- parts */

static uint64_t run_of(const held_part *p)
{
    return p->view ? convert_bytes(p->view->convert, p->view->run) : p->length;
}

static uint64_t bytes_of(const held_part *p)
{
    return p->view ? p->runs * run_of(p) : p->length;
}

/* Where run @p index of it begins, from its first element. */
static int64_t place_of(const held_part *p, uint64_t index)
{
    int64_t to = 0;
    if (p->view)
        strided_run(p->view, index, NULL, &to);
    return to;
}

/* From the first to the last byte of it, from its first element. */
static void reach_of(const held_part *p, int64_t *low, int64_t *high)
{
    *low = p->runs == 1 ? place_of(p, p->first) : 0;
    *high = *low + (int64_t)run_of(p);
    for (uint32_t i = 0; p->view && p->runs > 1 && i < p->view->n_dims; i++) {
        int64_t reach = p->view->to[i] * (int64_t)(p->view->extent[i] - 1);
        *low += reach < 0 ? reach : 0;
        *high += reach > 0 ? reach : 0;
    }
}

/* The device whose memory it is, -1: the host's. */
static int device_of(const held *h, const held_part *p)
{
    const memory_range *range =
        memory_range_find(h->ranges, h->n_ranges, p->at + place_of(p, p->first));
    return range ? range->device : -1;
}

static fanin_status need_stream(const held *h, sheet *s, int device, fanin_error *error)
{
    if (s->streams[device])
        return FANIN_OK;
    return gpu_stream_create(h->g, device, &s->streams[device], error);
}

/* ----------------------------------------------------- by the calling thread */

/* @p length bytes of a device, where host code can read them. */
static fanin_status read_back(held *h, int device, const uint8_t *at, size_t length,
                              deadline until, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    if (h->bounce_size < length) {
        void *memory = NULL;
        gpu_host_free(h->g, h->bounce);
        h->bounce = NULL;
        h->bounce_size = 0;
        status = gpu_host_alloc(h->g, length, &memory, error);
        if (status != FANIN_OK)
            return status;
        h->bounce = memory;
        h->bounce_size = length;
    }
    sheet *s = &h->sheets[0];
    status = need_stream(h, s, device, error);
    if (status == FANIN_OK)
        status = gpu_copy(s->streams[device], h->bounce, at, length, error);
    if (status == FANIN_OK)
        status = gpu_stream_wait(s->streams[device], until, error);
    return status;
}

static fanin_status digest_here(held *h, const held_part *p, int device, deadline until,
                                digest *out, fanin_error *error)
{
    int64_t low, high;
    reach_of(p, &low, &high);
    const uint8_t *there = p->at + low;
    if (device >= 0) {
        fanin_status status =
            read_back(h, device, there, (size_t)(high - low), until, error);
        if (status != FANIN_OK)
            return status;
        there = h->bounce;
    }
    for (uint64_t i = p->first; i < p->first + p->runs; i++)
        box_digest_add(h->sum, there + (place_of(p, i) - low), run_of(p), CONVERT_NONE);
    *out = box_digest_take(h->sum);
    return FANIN_OK;
}

/* -------------------------------------------------------------- by a kernel */

/* False: no room. */
static bool list_part(digest_list *list, const held_part *p)
{
    const strided *view = p->view;
    uint64_t in_row = view && view->n_dims > 0 ? view->extent[view->n_dims - 1] : 1;
    int64_t step = view && view->n_dims > 0 ? view->to[view->n_dims - 1] : 0;
    digest_list_cut(list);
    for (uint64_t i = p->first, end = p->first + p->runs; i < end;) {
        uint64_t runs = in_row - i % in_row;
        if (runs > end - i)
            runs = end - i;
        if (!digest_list_add(list, (uintptr_t)(p->at + place_of(p, i)), run_of(p), runs,
                             step, CONVERT_NONE))
            return false;
        i += runs;
    }
    return true;
}

/* As many parts as lie on the sheet's device and fit into its list; their number. */
static uint64_t list_parts(const held *h, sheet *s, held_part_fn part, uint64_t end)
{
    digest_list list = digest_list_in(s->memory, LIST_BYTES, LIST_PIECES, LIST_ROWS);
    uint64_t n = 0;
    s->list = list;
    for (; s->first + n < end; n++) {
        const held_part p = part(s->cookie, s->first + n);
        if ((n > 0 && device_of(h, &p) != s->device) || !list_part(&list, &p))
            break;
        s->list = list;
    }
    return n;
}

/* The sheet is at none after it if the first part is not of a device that has the kernel, or cut
   too small. Does not wait. */
static fanin_status begin_sheet(const held *h, sheet *s, held_part_fn part,
                                void *cookie, uint64_t first, uint64_t end,
                                fanin_error *error)
{
    const held_part p = part(cookie, first);
    s->cookie = cookie;
    s->first = first;
    s->device = device_of(h, &p);
    if (s->device < 0 || gpu_prepare(h->g, s->device, GPU_DIGEST, NULL) != FANIN_OK)
        return FANIN_OK;
    fanin_status status = need_stream(h, s, s->device, error);
    if (status == FANIN_OK && !s->memory)
        status = gpu_host_alloc(h->g, LIST_BYTES, &s->memory, error);
    if (status != FANIN_OK)
        return status;
    uint64_t n = list_parts(h, s, part, end);
    status = gpu_digest_run(s->streams[s->device], &s->list, error);
    s->n = status == FANIN_OK ? n : 0;
    return status;
}

static fanin_status end_sheet(const held *h, sheet *s, held_part_fn part,
                              deadline until, digest *out, fanin_error *error)
{
    fanin_status status = gpu_stream_wait(s->streams[s->device], until, error);
    for (uint64_t i = 0, at = 0; i < s->n && status == FANIN_OK; i++) {
        const held_part p = part(s->cookie, s->first + i);
        uint64_t bytes = bytes_of(&p);
        box_digest_add_pieces(h->sum, s->list.digests + at, bytes);
        at += box_digest_pieces(bytes);
        out[i] = box_digest_take(h->sum);
    }
    s->n = 0;
    return status;
}

fanin_status held_digest(held *h, held_part_fn part, void *cookie, uint64_t first,
                         uint64_t end, deadline until, digest *out, uint64_t *n_out,
                         fanin_error *error)
{
    bool is_second = h->sheets[1].n > 0;
    sheet *s = &h->sheets[is_second], *other = &h->sheets[!is_second];
    fanin_status status = FANIN_OK;
    if (s->n > 0 && (s->cookie != cookie || s->first != first)) { /* another's */
        s = other;
        other = NULL;
    }
    if (s->n == 0)
        status = begin_sheet(h, s, part, cookie, first, end, error);
    *n_out = s->n > 0 ? s->n : 1;
    if (status != FANIN_OK)
        return status;
    if (s->n == 0) {
        const held_part p = part(cookie, first);
        return digest_here(h, &p, s->device, until, out, error);
    }
    /* What cannot be begun ahead is begun, and fails, in its turn. */
    if (other && first + s->n < end)
        (void)begin_sheet(h, other, part, cookie, first + s->n, end, NULL);
    return end_sheet(h, s, part, until, out, error);
}
