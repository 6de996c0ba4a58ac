/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/device_plan_internal.h"

#include "array.h"
#include "error_set.h"
#include <stdlib.h>

typedef struct builder {
    const device_plan_parts *from;
    device_plan *d;
    copy_list *lists; /* one a part */
    size_t list_capacity, part_capacity, base_capacity;
    uint32_t
        *known; /* 1 + the number of each region of the present source; 0: none yet */
    host_pieces host;
    const memory_range *range; /* of the piece before: neighbours mostly share it */
} builder;

static bool is_part(const device_plan_parts *parts, size_t source)
{
    return parts->plan->reader_of[source] == parts->reader;
}

bool device_plan_fits(const device_plan *d, const device_plan_parts *parts)
{
    bool fits = d && d->n_sources == parts->plan->n_sources &&
                (d->wanted.n == 0 || gather_set_equal(&d->wanted, &parts->gather));
    for (size_t i = 0; fits && i < d->n_sources; i++)
        fits = d->of_source[i] == is_part(parts, i);
    return fits;
}

/* ------------------------------------------------------------------- bases */

/* The number of a region of the present source. */
static fanin_status base_of(builder *b, size_t source, uint32_t region, uint32_t *out,
                            fanin_error *error)
{
    device_plan *d = b->d;
    uint32_t *known = &b->known[region];
    if (*known == 0) {
        if (d->n_bases == UINT32_MAX)
            return error_set(error, FANIN_ERR_LIMIT, NULL, "too many regions");
        if (!array_reserve(&d->bases, &b->base_capacity, (size_t)d->n_bases + 1,
                           sizeof *d->bases))
            return error_set_memory(error);
        d->bases[d->n_bases++] = (device_base){.source = source, .region = region};
        *known = d->n_bases;
    }
    *out = *known - 1;
    return FANIN_OK;
}

/* ------------------------------------------------------------------- pieces */

/* The list of the device that holds @p range; NULL: out of memory. */
static copy_list *list_of(builder *b, int device, device_part **part_out)
{
    device_plan *d = b->d;
    size_t i = 0;
    while (i < d->n_parts && d->parts[i].device != device)
        i++;
    if (i == d->n_parts) {
        if (!array_reserve(&b->lists, &b->list_capacity, i + 1, sizeof *b->lists) ||
            !array_reserve(&d->parts, &b->part_capacity, i + 1, sizeof *d->parts))
            return NULL;
        d->parts[i] = (device_part){.device = device};
        b->lists[i] = (copy_list){.stop = b->from->stop};
        d->n_parts++;
    }
    *part_out = &d->parts[i];
    return &b->lists[i];
}

/* The range that holds @p to; NULL: none, which the destination's ranges rule out. */
static const memory_range *range_at(builder *b, uint64_t to)
{
    const uint8_t *at = b->from->base + to;
    const memory_range *r = b->range;
    if (!r || at < r->base || at >= r->base + r->length)
        r = memory_range_find(b->from->ranges, b->from->n_ranges, at);
    b->range = r;
    return r;
}

static bool add_host(builder *b, const host_piece *piece)
{
    if (work_stopped(b->from->stop) ||
        !array_reserve(&b->host.pieces, &b->host.capacity, b->host.n + 1,
                       sizeof *b->host.pieces))
        return false;
    b->host.pieces[b->host.n++] = *piece;
    return true;
}

static uint64_t bytes_of(const span_piece *p, const strided *view)
{
    return view ? strided_bytes(view) : p->length;
}

static fanin_status add_piece(builder *b, const plan_spans *spans, uint32_t base,
                              const span *s, const span_piece *p, fanin_error *error)
{
    uint64_t from = s->offset + p->offset;
    const strided *view = p->view ? &spans->views[p->view - 1] : NULL;
    const memory_range *range = range_at(b, p->to);
    if (!range)
        return error_set(error, FANIN_ERR_INTERNAL, NULL,
                         "a piece lies outside of the destination");
    if (range->device < 0) {
        host_piece piece = {
            .from = from, .to = p->to, .length = p->length, .view = view, .base = base};
        return add_host(b, &piece) ? FANIN_OK
                                   : device_plan_broken_off(b->from->stop, error);
    }
    device_part *part;
    copy_list *list = list_of(b, range->device, &part);
    if (!list)
        return error_set_memory(error);
    uint64_t to = (uint64_t)(uintptr_t)(b->from->base + p->to);
    if (view)
        copy_list_add_view(list, base, from, to, view);
    else
        copy_list_add(list, base, from, to, p->length);
    part->bytes += bytes_of(p, view);
    return list->failed ? device_plan_broken_off(b->from->stop, error) : FANIN_OK;
}

static fanin_status add_source(builder *b, size_t source, fanin_error *error)
{
    const plan_spans *spans = b->from->spans[source];
    for (uint64_t i = 0; i < spans->n_spans; i++) {
        const span *s = &spans->spans[i];
        uint32_t base = 0;
        fanin_status status = base_of(b, source, s->region, &base, error);
        for (uint64_t j = s->first; j < s->first + s->count && status == FANIN_OK; j++)
            status = add_piece(b, spans, base, s, &spans->pieces[j], error);
        if (status != FANIN_OK)
            return status;
    }
    return FANIN_OK;
}

static fanin_status add_sources(builder *b, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < b->d->n_sources && status == FANIN_OK; i++) {
        if (!b->d->of_source[i])
            continue;
        size_t n = box_table_regions(b->from->plan->sources[i].boxes);
        b->known = calloc(n + 1, sizeof *b->known);
        status = b->known ? add_source(b, i, error) : error_set_memory(error);
        free(b->known);
    }
    return status;
}

/* ------------------------------------------------------------------- whole */

/* Chunks, and a table for each device that gathers some of them. */
static fanin_status make_host_tables(builder *b, gpu *g, fanin_error *error)
{
    device_plan *d = b->d;
    copy_list list = {.stop = b->from->stop};
    d->wanted = b->from->gather;
    fanin_status status = d->wanted.n > 0
                              ? device_plan_lay_out_host(d, &b->host, &list, error)
                              : error_set(error, FANIN_ERR_INTERNAL, NULL,
                                          "no device gathers what goes to host memory");
    if (status == FANIN_OK)
        status = device_plan_deal(d, b->from->owners, &list, error);
    uint64_t first = 0;
    for (size_t i = 0; i < d->n_gathers && status == FANIN_OK; i++) {
        gather_part *part = &d->gathers[i];
        const host_chunk *last = &d->chunks[part->first_chunk + part->n_chunks - 1];
        uint64_t n = last->first_entry + last->n_entries;
        status = gpu_table_create(g, part->device, list.entries + first, n, d->n_bases,
                                  &part->table, error);
        first += n;
    }
    copy_list_free(&list);
    return status;
}

static fanin_status make_tables(builder *b, gpu *g, fanin_error *error)
{
    device_plan *d = b->d;
    fanin_status status = add_sources(b, error);
    for (size_t i = 0; i < d->n_parts && status == FANIN_OK; i++) {
        status = gpu_table_create(g, d->parts[i].device, b->lists[i].entries,
                                  b->lists[i].n, d->n_bases, &d->parts[i].table, error);
        /* Entries lie rank by rank: one GPU's link would rest while another's memory is read. */
        if (status == FANIN_OK)
            gpu_table_take_in_turns(d->parts[i].table, (uint32_t)d->n_sources);
    }
    return status == FANIN_OK && b->host.n > 0 ? make_host_tables(b, g, error) : status;
}

fanin_status device_plan_build(gpu *g, const device_plan_parts *parts,
                               device_plan **out, fanin_error *error)
{
    *out = NULL;
    size_t n = parts->plan->n_sources;
    builder b = {.from = parts,
                 .d = calloc(1, sizeof *b.d + n * sizeof *b.d->of_source)};
    if (!b.d)
        return error_set_memory(error);
    b.d->n_sources = n;
    for (size_t i = 0; i < n; i++)
        b.d->of_source[i] = is_part(parts, i);
    fanin_status status = make_tables(&b, g, error);
    for (size_t i = 0; i < b.d->n_parts; i++)
        copy_list_free(&b.lists[i]);
    free(b.lists);
    free(b.host.pieces);
    if (status != FANIN_OK)
        device_plan_free(&b.d);
    *out = b.d;
    return status;
}

void device_plan_free(device_plan **d)
{
    if (!*d)
        return;
    for (size_t i = 0; i < (*d)->n_parts; i++)
        gpu_table_destroy(&(*d)->parts[i].table);
    for (size_t i = 0; i < (*d)->n_gathers; i++)
        gpu_table_destroy(&(*d)->gathers[i].table);
    free((*d)->parts);
    free((*d)->bases);
    free((*d)->chunks);
    free((*d)->landings);
    free((*d)->views);
    free(*d);
    *d = NULL;
}
