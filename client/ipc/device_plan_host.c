/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks for host memory. Where the pieces fill one stretch of it without a hole (an adapter's
 * file), a chunk is a copy of a part of that stretch, and the kernel puts every byte in its final
 * order: one copy lands it. Elsewhere pieces lie packed in a chunk, by ascending destination,
 * and threads scatter them.
 */
#include "ipc/device_plan.h"

#include "array.h"
#include "device/devices.h"
#include "plan/plan_internal.h"
#include <stdlib.h>

#define LANDING_MAX DIGEST_PIECE /* bytes of one thread's copy */
#define ALIGNMENT 16             /* of packed pieces: what a kernel moves at once */

typedef struct layout {
    device_plan *d;
    copy_list *list;
    uint64_t landing_capacity, chunk_capacity;
    uint64_t n_landings;
    view_set views; /* becomes the plan's */
} layout;

/* ------------------------------------------------------------------ measures */

static uint64_t landed_bytes(const host_piece *p)
{
    if (!p->view)
        return p->length;
    return strided_runs(p->view) * convert_bytes(p->view->convert, p->view->run);
}

/* How far a view's runs reach below and above its first one. */
static void piece_reach(const strided *view, uint64_t *below, uint64_t *above)
{
    *below = 0;
    *above = convert_bytes(view->convert, view->run);
    for (uint32_t i = 0; i < view->n_dims; i++) {
        uint64_t steps = view->extent[i] - 1;
        if (view->to[i] < 0)
            *below += steps * (0 - (uint64_t)view->to[i]);
        else
            *above += steps * (uint64_t)view->to[i];
    }
}

/* Whether the pieces, which do not overlap, fill what lies between the first and the last. */
static bool is_contiguous(const host_pieces *pieces, uint64_t *start_out,
                          uint64_t *bytes_out)
{
    uint64_t start = UINT64_MAX, end = 0, bytes = 0;
    for (uint64_t i = 0; i < pieces->n; i++) {
        const host_piece *p = &pieces->pieces[i];
        uint64_t below = 0, above = p->length;
        if (p->view)
            piece_reach(p->view, &below, &above);
        start = p->to - below < start ? p->to - below : start;
        end = p->to + above > end ? p->to + above : end;
        bytes += landed_bytes(p);
    }
    *start_out = start;
    *bytes_out = bytes;
    return end - start == bytes;
}

static uint64_t chunk_size(uint64_t bytes, size_t devices)
{
    /* Enough chunks that gathering, copying and landing overlap, on each device. */
    uint64_t size = (bytes / devices / 8 / LANDING_MAX + 1) * LANDING_MAX;
    return size < GATHER_CHUNK_MAX ? size : GATHER_CHUNK_MAX;
}

/* ------------------------------------------------------------------- adding */

static bool add_chunk(layout *l, uint64_t to)
{
    device_plan *d = l->d;
    if (!array_reserve(&d->chunks, &l->chunk_capacity, d->n_chunks + 1,
                       sizeof *d->chunks))
        return false;
    d->chunks[d->n_chunks++] = (host_chunk){
        .first_entry = l->list->n, .first_landing = l->n_landings, .to = to};
    return true;
}

static bool add_landing(layout *l, const host_landing *landing)
{
    device_plan *d = l->d;
    if (!array_reserve(&d->landings, &l->landing_capacity, l->n_landings + 1,
                       sizeof *d->landings))
        return false;
    d->landings[l->n_landings++] = *landing;
    d->chunks[d->n_chunks - 1].n_landings++;
    return true;
}

/* --------------------------------------------------- contiguous destinations */

typedef struct sorting {
    uint64_t *next;      /* by chunk: entries, then where the next one goes */
    copy_entry *entries; /* NULL: they are counted */
} sorting;

/* One part of an entry that lies in one chunk; `to` is an offset in the chunk. */
static void put_part(sorting *s, uint64_t chunk, const copy_entry *part)
{
    uint64_t at = s->next[chunk]++;
    if (s->entries)
        s->entries[at] = *part;
}

static copy_entry upwards(const copy_entry *e)
{
    copy_entry up = *e;
    if (e->to_step >= 0 || e->runs < 2)
        return up;
    uint64_t steps = e->runs - 1;
    up.from += steps * (uint64_t)e->from_step;
    up.to += steps * (uint64_t)e->to_step;
    up.from_step = (int64_t)(0 - (uint64_t)e->from_step);
    up.to_step = (int64_t)(0 - (uint64_t)e->to_step);
    return up;
}

/* One run, cut wherever a chunk ends. False: an element that is converted would be torn apart. */
static bool cut_host_run(const copy_entry *run, uint64_t size, sorting *s)
{
    copy_entry part = *run;
    uint64_t scale = run->convert == CONVERT_NONE ? 1 : 2;
    uint64_t left = run->run / scale, from = run->from, to = run->to;
    part.runs = 1;
    while (left > 0) {
        uint64_t room = size - to % size;
        uint64_t here = left < room ? left : room;
        if (scale == 2 && here % 2 != 0)
            return false;
        part.from = from;
        part.to = to % size;
        part.run = (uint32_t)(here * scale);
        put_part(s, to / size, &part);
        from += here * scale;
        to += here;
        left -= here;
    }
    return true;
}

static bool cut_host_entry(const copy_entry *entry, uint64_t size, sorting *s)
{
    copy_entry e = upwards(entry);
    uint64_t step = (uint64_t)e.to_step, length = convert_bytes(e.convert, e.run);
    for (uint64_t done = 0; done < e.runs;) {
        uint64_t to = e.to + done * step;
        uint64_t room = size - to % size;
        /* Runs that end inside of this chunk. */
        uint64_t whole = 0;
        if (room >= length)
            whole = step > 0 ? 1 + (room - length) / step : e.runs - done;
        if (whole > e.runs - done)
            whole = e.runs - done;
        copy_entry part = e;
        part.from = e.from + done * (uint64_t)e.from_step;
        part.to = to;
        if (whole == 0) {
            if (!cut_host_run(&part, size, s))
                return false;
            done++;
            continue;
        }
        part.to = to % size;
        part.runs = (uint32_t)whole;
        put_part(s, to / size, &part);
        done += whole;
    }
    return true;
}

/* False: stopped, or torn. */
static bool cut_list(const copy_list *list, uint64_t size, sorting *s)
{
    for (uint64_t i = 0; i < list->n; i++) {
        if (work_stopped(list->stop) || !cut_host_entry(&list->entries[i], size, s))
            return false;
    }
    return true;
}

/* Bytes [at, end) of the chunk that was added last, and their landings, cut where pieces are. */
static bool fill_chunk(layout *l, uint64_t at, uint64_t end)
{
    host_chunk *c = &l->d->chunks[l->d->n_chunks - 1];
    c->lead = at;
    c->length = end - at;
    while (at < end) {
        uint64_t left = end - at, here = LANDING_MAX - at % LANDING_MAX;
        host_landing landing = {.offset = at,
                                .length = left < here ? left : here,
                                .to = c->to + at - c->lead};
        if (!add_landing(l, &landing))
            return false;
        at += landing.length;
    }
    return true;
}

/* The chunks from @p lead to @p end behind @p origin, and none of the entries yet. */
static bool add_host_chunks(layout *l, uint64_t origin, uint64_t lead, uint64_t end)
{
    uint64_t size = l->d->chunk_bytes;
    for (uint64_t at = 0; at < end; at += size) {
        uint64_t begin = at < lead ? lead : at;
        uint64_t stop = end - at < size ? end : at + size;
        if (!add_chunk(l, origin + begin) || !fill_chunk(l, begin - at, stop - at))
            return false;
    }
    return true;
}

static void add_chunk_pieces(copy_list *list, const host_pieces *pieces, uint64_t start)
{
    for (uint64_t i = 0; i < pieces->n; i++) {
        const host_piece *p = &pieces->pieces[i];
        if (p->view)
            copy_list_add_view(list, p->base, p->from, p->to - start, p->view);
        else
            copy_list_add(list, p->base, p->from, p->to - start, p->length);
    }
}

/* False: out of memory, stopped, or (*torn) chunks would tear elements apart. */
static bool lay_out_contiguous(layout *l, const host_pieces *pieces, uint64_t start,
                               uint64_t bytes, bool *torn)
{
    device_plan *d = l->d;
    work_stop *stop = l->list->stop;
    copy_list whole = {.stop = stop};
    sorting s = {0};
    uint64_t lead = start % DIGEST_PIECE, origin = start - lead;
    add_chunk_pieces(&whole, pieces, origin);
    bool ok = !whole.failed && add_host_chunks(l, origin, lead, lead + bytes);
    if (ok)
        ok = (s.next = calloc(d->n_chunks + 1, sizeof *s.next)) != NULL;
    if (ok && !cut_list(&whole, d->chunk_bytes, &s))
        *torn = !work_stopped(stop);
    ok = ok && !*torn && !work_stopped(stop);
    uint64_t total = 0;
    for (uint64_t i = 0; i < d->n_chunks && ok; i++) {
        d->chunks[i].first_entry = total;
        d->chunks[i].n_entries = s.next[i];
        total += s.next[i];
        s.next[i] = d->chunks[i].first_entry;
    }
    if (ok)
        ok = (s.entries = calloc(total + 1, sizeof *s.entries)) != NULL;
    if (ok) {
        ok = cut_list(&whole, d->chunk_bytes, &s);
        copy_list_free(l->list);
        *l->list = (copy_list){
            .entries = s.entries, .n = total, .capacity = total + 1, .stop = stop};
    }
    copy_list_free(&whole);
    free(s.next);
    return ok;
}

/* ------------------------------------------------------- packed destinations */

/* The two halves of a view: from the source into packed bytes, and on to the destination. */
static void split_view(const strided *view, strided *gather, strided *land)
{
    *gather = *view;
    *land = *view;
    land->run = convert_bytes(view->convert, view->run);
    land->convert = CONVERT_NONE;
    int64_t step = (int64_t)land->run;
    for (uint32_t i = view->n_dims; i-- > 0;) {
        gather->to[i] = land->from[i] = step;
        step *= (int64_t)view->extent[i];
    }
}

static host_chunk *last_chunk(layout *l)
{
    return &l->d->chunks[l->d->n_chunks - 1];
}

/* Room for @p length bytes that stay together; the chunk may be a new one. */
static bool make_room_for_chunks(layout *l, uint64_t length)
{
    host_chunk *c = last_chunk(l);
    c->length = (c->length + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return c->length + length <= l->d->chunk_bytes || add_chunk(l, 0);
}

static bool pack_view(layout *l, const host_piece *p)
{
    strided gather, land;
    uint32_t view;
    uint64_t length = landed_bytes(p);
    split_view(p->view, &gather, &land);
    if (!view_intern(&l->views, &land, &view) || !make_room_for_chunks(l, length))
        return false;
    host_chunk *c = last_chunk(l);
    uint64_t before = l->list->n;
    copy_list_add_view(l->list, p->base, p->from, c->length, &gather);
    host_landing landing = {
        .offset = c->length, .length = length, .to = p->to, .view = view};
    c->n_entries += l->list->n - before;
    c->length += length;
    return !l->list->failed && add_landing(l, &landing);
}

static bool pack_bytes(layout *l, const host_piece *p)
{
    for (uint64_t done = 0; done < p->length;) {
        host_chunk *c = last_chunk(l);
        uint64_t room = l->d->chunk_bytes - c->length, left = p->length - done;
        if (room == 0) {
            if (!add_chunk(l, 0))
                return false;
            continue;
        }
        uint64_t here = left < LANDING_MAX ? left : LANDING_MAX;
        here = here < room ? here : room;
        uint64_t before = l->list->n;
        copy_list_add(l->list, p->base, p->from + done, c->length, here);
        host_landing landing = {
            .offset = c->length, .length = here, .to = p->to + done};
        c->n_entries += l->list->n - before;
        c->length += here;
        done += here;
        if (l->list->failed || !add_landing(l, &landing))
            return false;
    }
    return true;
}

/* Once the work is to stop all are equal, so that sorting ends soon. */
static int by_destination(const void *a, const void *b, void *stop)
{
    if (work_stopped(stop))
        return 0;
    const host_piece *x = a, *y = b;
    return x->to < y->to ? -1 : x->to > y->to;
}

static bool lay_out_packed(layout *l, host_pieces *pieces)
{
    qsort_r(pieces->pieces, pieces->n, sizeof *pieces->pieces, by_destination,
            l->list->stop);
    bool ok = add_chunk(l, 0);
    for (uint64_t i = 0; i < pieces->n && ok; i++) {
        const host_piece *p = &pieces->pieces[i];
        if (work_stopped(l->list->stop))
            ok = false;
        else
            ok = p->view ? pack_view(l, p)
                         : make_room_for_chunks(l, 0) && pack_bytes(l, p);
    }
    l->d->views = l->views.views;
    intern_free(&l->views.index);
    return ok;
}

/* ------------------------------------------------------------------- whole */

fanin_status device_plan_lay_out_host(device_plan *d, host_pieces *pieces,
                                      copy_list *list, fanin_error *error)
{
    layout l = {.d = d, .list = list};
    uint64_t start, bytes;
    bool torn = !is_contiguous(pieces, &start, &bytes);
    d->chunk_bytes = chunk_size(bytes, d->wanted.n);
    bool ok = !torn && lay_out_contiguous(&l, pieces, start, bytes, &torn);
    d->contiguous = !torn;
    if (torn) {
        d->n_chunks = l.n_landings = 0;
        ok = lay_out_packed(&l, pieces);
    }
    return ok ? FANIN_OK : device_plan_broken_off(list->stop, error);
}
