/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/stage_fill.h"

/* A copy is cut into pieces of so many bytes, so that many processors of the device work. */
#define ENTRY_MOST ((size_t)64 << 10)

static bool is_full(const filling *f)
{
    return f->to->bytes == CHUNK_BYTES || f->n_device + f->n_host == CHUNK_ENTRIES;
}

/* @p runs runs of @p run bytes, packed at the end of the chunk. */
static void add_stage_entry(filling *f, bool device, const uint8_t *from, size_t run,
                            uint32_t runs, int64_t step)
{
    chunk *c = f->to;
    copy_entry *entries = c->entries;
    uint64_t to = (uintptr_t)c->data + c->bytes;
    copy_entry *last = NULL;
    if (device && f->n_device > 0)
        last = &entries[f->n_device - 1];
    else if (!device && f->n_host > 0)
        last = &entries[CHUNK_ENTRIES - f->n_host];
    c->bytes += run * runs;
    if (last && runs == 1 && last->runs == 1 && last->run + run <= ENTRY_MOST &&
        last->from + last->run == (uintptr_t)from && last->to + last->run == to) {
        last->run += (uint32_t)run;
        return;
    }
    size_t at = device ? f->n_device++ : CHUNK_ENTRIES - ++f->n_host;
    entries[at] = (copy_entry){.from = (uintptr_t)from,
                               .to = to,
                               .from_step = runs > 1 ? step : 0,
                               .to_step = runs > 1 ? (int64_t)run : 0,
                               .run = (uint32_t)run,
                               .runs = runs,
                               .convert = CONVERT_NONE};
}

static bool add_piece(void *cookie, const job *j, const source_box *b, uint64_t offset,
                      uint64_t length)
{
    filling *f = cookie;
    int device = shard_catalog_box_device(j->catalog, b, j->first_region);
    const uint8_t *first = shard_catalog_box_first(j->catalog, b, j->first_region);
    if (is_full(f) || (device >= 0 && f->device >= 0 && device != f->device))
        return false; /* the next chunk is that device's */
    if (device >= 0)
        f->device = device;
    while (length > 0 && !is_full(f)) {
        uint64_t room = smaller(CHUNK_BYTES - f->to->bytes, ENTRY_MOST);
        stretch s = stretch_of(j, b, offset, smaller(length, room));
        add_stage_entry(f, device >= 0, first + s.at, (size_t)s.size, (uint32_t)s.runs,
                        s.step);
        offset += s.size * s.runs;
        length -= s.size * s.runs;
    }
    return length == 0;
}

/* The box that a byte of the host's memory is of: the one that begins next before it. */
typedef struct search {
    uint64_t address, first, box;
} search;

static bool look_at_box(void *cookie, const job *j, const source_box *b,
                        uint64_t offset, uint64_t length)
{
    search *at = cookie;
    uint64_t first = (uintptr_t)shard_catalog_box_first(j->catalog, b, j->first_region);
    (void)offset, (void)length;
    if (first <= at->address && first >= at->first &&
        shard_catalog_box_device(j->catalog, b, j->first_region) < 0) {
        at->first = first;
        at->box = (uint64_t)(b - j->catalog->boxes);
    }
    return true;
}

filling filling_gather(chunk *to, const job *j, const guarded *through)
{
    filling f = {.to = to, .device = -1};
    search bad = {.box = j->ranges[j->current].box};
    job_each(j, add_piece, &f);
    f.failed = !guarded_run(through, to->entries + CHUNK_ENTRIES - f.n_host, f.n_host,
                            0, &bad.address);
    if (f.failed)
        job_each(j, look_at_box, &bad);
    f.box = bad.box;
    return f;
}

/* ----------------------------------------------------------------- digests */

/* What comes into a list. */
typedef struct listing {
    digest_list list;
    uint32_t convert;
    int device;
    bool good;
} listing;

static bool list_piece(void *cookie, const job *j, const source_box *b, uint64_t offset,
                       uint64_t length)
{
    listing *l = cookie;
    int device = shard_catalog_box_device(j->catalog, b, j->first_region);
    uint64_t first = (uintptr_t)shard_catalog_box_first(j->catalog, b, j->first_region);
    if (l->device < 0)
        l->device = device;
    l->good = device >= 0 && device == l->device;
    while (l->good && length > 0) {
        stretch s = stretch_of(j, b, offset, length);
        l->good = digest_list_add(&l->list, first + (uint64_t)s.at, s.size, s.runs,
                                  s.step, l->convert);
        offset += s.size * s.runs;
        length -= s.size * s.runs;
    }
    return l->good;
}

bool filling_digest(chunk *to, const job *j, uint32_t convert, filling *out)
{
    listing l = {.list =
                     digest_list_in(to->data, CHUNK_BYTES, CHUNK_PIECES, CHUNK_ROWS),
                 .convert = convert,
                 .device = -1};
    job one = *j;
    l.good = j->ranges[j->current].length == j->ranges[j->current].whole;
    while (l.good && one.current < j->n_ranges) {
        one.n_ranges = one.current + 1;
        digest_list_cut(&l.list); /* each range begins a piece */
        job_each(&one, list_piece, &l);
        if (!l.good)
            break;
        to->digests = l.list;
        to->bytes += one.ranges[one.current++].length;
    }
    *out = (filling){.to = to, .device = l.device};
    return to->bytes > 0;
}
