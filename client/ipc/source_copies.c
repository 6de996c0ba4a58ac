/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/source_copies.h"

#include "error_set.h"
#include <stdlib.h>

typedef struct builder {
    source_copies *copies;
    const plan_spans *spans;
    const copies_target *target;
    work_stop *stop;
    uint32_t *known; /* 1 + the number of each region; 0: none yet */
    uint64_t region_capacity;
    size_t device_capacity;
    const memory_range *range; /* of the piece before: neighbours mostly share it */
} builder;

static fanin_status broken_off(const builder *b, fanin_error *error)
{
    return work_broken_off(b->stop, "plan", "copies were listed", error);
}

/* The span's, of which the span is read. */
static bool base_of(builder *b, const span *s, uint32_t *out)
{
    source_copies *c = b->copies;
    uint32_t *known = &b->known[s->region];
    uint64_t end = s->offset + s->length;
    if (*known == 0) {
        if (!array_reserve(&c->regions, &b->region_capacity, (size_t)c->n_regions + 1,
                           sizeof *c->regions))
            return false;
        c->regions[c->n_regions++] = (read_region){.number = s->region};
        *known = c->n_regions;
    }
    read_region *r = &c->regions[*known - 1];
    r->reach = end > r->reach ? end : r->reach;
    *out = *known - 1;
    return true;
}

/* NULL: out of memory. A list has room for all that is there, so that it does not grow: what is not
   used is not touched. */
static device_copies *copies_for(builder *b, int device)
{
    source_copies *c = b->copies;
    for (size_t i = 0; i < c->n_devices; i++) {
        if (c->devices[i].device == device)
            return &c->devices[i];
    }
    if (!array_reserve(&c->devices, &b->device_capacity, c->n_devices + 1,
                       sizeof *c->devices))
        return NULL;
    device_copies *d = &c->devices[c->n_devices];
    *d = (device_copies){.device = device, .list.stop = b->stop};
    if (!array_reserve(&d->list.entries, &d->list.capacity, b->spans->n_pieces,
                       sizeof *d->list.entries))
        return NULL;
    c->n_devices++;
    return d;
}

/* The range that holds @p to; NULL: none, which the destination's ranges rule out. */
static const memory_range *range_at(builder *b, uint64_t to)
{
    const copies_target *t = b->target;
    const uint8_t *at = t->base + to;
    const memory_range *r = b->range;
    if (!r || at < r->base || at >= r->base + r->length)
        r = memory_range_find(t->ranges, t->n_ranges, at);
    b->range = r;
    return r;
}

static bool add_host(builder *b, const host_piece *piece)
{
    host_pieces *h = &b->copies->host;
    if (work_stopped(b->stop) ||
        !array_reserve(&h->pieces, &h->capacity, h->n + 1, sizeof *h->pieces))
        return false;
    h->pieces[h->n++] = *piece;
    return true;
}

static fanin_status add_piece(builder *b, uint32_t base, const span *s,
                              const span_piece *p, fanin_error *error)
{
    uint64_t from = s->offset + p->offset;
    const strided *view = p->view ? &b->spans->views[p->view - 1] : NULL;
    const memory_range *range = range_at(b, p->to);
    if (!range)
        return error_set(error, FANIN_ERR_INTERNAL, NULL,
                         "a piece lies outside of the destination");
    if (range->device < 0) {
        host_piece piece = {
            .from = from, .to = p->to, .length = p->length, .view = view, .base = base};
        return add_host(b, &piece) ? FANIN_OK : broken_off(b, error);
    }
    device_copies *d = copies_for(b, range->device);
    if (!d)
        return error_set_memory(error);
    uint64_t to = (uint64_t)(uintptr_t)(b->target->base + p->to);
    if (view)
        copy_list_add_view(&d->list, base, from, to, view);
    else
        copy_list_add(&d->list, base, from, to, p->length);
    d->bytes += view ? strided_bytes(view) : p->length;
    return d->list.failed ? broken_off(b, error) : FANIN_OK;
}

static fanin_status add_all(builder *b, fanin_error *error)
{
    for (uint64_t i = 0; i < b->spans->n_spans; i++) {
        const span *s = &b->spans->spans[i];
        uint32_t base = 0;
        fanin_status status = base_of(b, s, &base) ? FANIN_OK : error_set_memory(error);
        for (uint64_t j = s->first; j < s->first + s->count && status == FANIN_OK; j++)
            status = add_piece(b, base, s, &b->spans->pieces[j], error);
        if (status != FANIN_OK)
            return status;
    }
    return FANIN_OK;
}

fanin_status source_copies_build(plan_spans *spans, uint32_t n_regions,
                                 const copies_target *target, work_stop *stop,
                                 source_copies **out, fanin_error *error)
{
    builder b = {.copies = calloc(1, sizeof *b.copies),
                 .spans = spans,
                 .target = target,
                 .stop = stop,
                 .known = calloc((size_t)n_regions + 1, sizeof *b.known)};
    fanin_status status =
        b.copies && b.known ? add_all(&b, error) : error_set_memory(error);
    free(b.known);
    for (size_t i = 0; b.copies && i < b.copies->n_devices; i++)
        b.copies->devices[i].list.stop = NULL; /* which may go before the list */
    if (status == FANIN_OK) {
        b.copies->reads = spans->n_spans;
        b.copies->views = spans->views;
        spans->views = NULL;
    } else {
        source_copies_free(&b.copies);
    }
    *out = b.copies;
    return status;
}

void source_copies_free(source_copies **c)
{
    if (!*c)
        return;
    for (size_t i = 0; i < (*c)->n_devices; i++)
        copy_list_free(&(*c)->devices[i].list);
    free((*c)->devices);
    free((*c)->regions);
    free((*c)->host.pieces);
    free((*c)->views);
    free(*c);
    *c = NULL;
}
