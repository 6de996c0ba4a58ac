/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/device_plan.h"

#include "array.h"
#include "error_set.h"
#include <stdlib.h>

/* ----------------------------------------------------------------- tables */

typedef struct builder {
    const device_plan_parts *from;
    device_plan *d;
    copy_list *lists; /* one a part */
    host_pieces host;
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

/* ------------------------------------------------------------------- joining */

/* NULL: not a part of it. */
static const source_copies *copies_of(const builder *b, size_t source)
{
    return b->d->of_source[source] ? b->from->copies[source] : NULL;
}

static device_part *device_part_of(device_plan *d, int device)
{
    for (size_t i = 0; i < d->n_parts; i++) {
        if (d->parts[i].device == device)
            return &d->parts[i];
    }
    return NULL;
}

/* How many parts, bases, pieces and entries there will be, and room for them. */
static fanin_status make_room_for_parts(builder *b, fanin_error *error)
{
    device_plan *d = b->d;
    uint64_t devices = 0, bases = 0, pieces = 0;
    for (size_t i = 0; i < d->n_sources; i++) {
        const source_copies *c = copies_of(b, i);
        devices += c ? c->n_devices : 0;
        bases += c ? c->n_regions : 0;
        pieces += c ? c->host.n : 0;
    }
    if (bases > UINT32_MAX)
        return error_set(error, FANIN_ERR_LIMIT, NULL, "too many regions");
    d->parts = calloc(devices + 1, sizeof *d->parts);
    b->lists = calloc(devices + 1, sizeof *b->lists);
    d->bases = calloc(bases + 1, sizeof *d->bases);
    bool good = d->parts && b->lists && d->bases &&
                array_reserve(&b->host.pieces, &b->host.capacity, pieces,
                              sizeof *b->host.pieces);
    return good ? FANIN_OK : error_set_memory(error);
}

static void add_parts(builder *b, const source_copies *c)
{
    device_plan *d = b->d;
    for (size_t i = 0; i < c->n_devices; i++) {
        device_part *part = device_part_of(d, c->devices[i].device);
        if (!part) {
            part = &d->parts[d->n_parts++];
            part->device = c->devices[i].device;
        }
        part->bytes += c->devices[i].bytes;
        b->lists[part - d->parts].capacity += c->devices[i].list.n;
    }
}

/* Of the source, whose bases begin at @p base. */
static bool join_copies(builder *b, const source_copies *c, uint32_t base)
{
    for (size_t i = 0; i < c->n_devices; i++) {
        const copy_list *from = &c->devices[i].list;
        copy_list *to =
            &b->lists[device_part_of(b->d, c->devices[i].device) - b->d->parts];
        for (uint64_t j = 0; j < from->n; j++) {
            if (work_stopped(b->from->stop))
                return false;
            to->entries[to->n] = from->entries[j];
            to->entries[to->n++].base += base;
        }
    }
    for (uint64_t j = 0; j < c->host.n; j++) {
        if (work_stopped(b->from->stop))
            return false;
        b->host.pieces[b->host.n] = c->host.pieces[j];
        b->host.pieces[b->host.n++].base += base;
    }
    return true;
}

static fanin_status join_all(builder *b, fanin_error *error)
{
    device_plan *d = b->d;
    fanin_status status = make_room_for_parts(b, error);
    if (status != FANIN_OK)
        return status;
    for (size_t i = 0; i < d->n_sources; i++) {
        const source_copies *c = copies_of(b, i);
        if (c)
            add_parts(b, c);
    }
    for (size_t i = 0; i < d->n_parts; i++) {
        copy_list *list = &b->lists[i];
        if (!(list->entries = array_large(list->capacity, sizeof *list->entries)))
            return error_set_memory(error);
    }
    for (size_t i = 0; i < d->n_sources; i++) {
        const source_copies *c = copies_of(b, i);
        uint32_t base = d->n_bases;
        if (!c)
            continue;
        for (uint32_t j = 0; j < c->n_regions; j++)
            d->bases[d->n_bases++] =
                (device_base){.source = i, .region = c->regions[j]};
        if (!join_copies(b, c, base))
            return device_plan_broken_off(b->from->stop, error);
    }
    return FANIN_OK;
}

/* ------------------------------------------------------------------- whole */

/* Each device that is wanted gathers neighbouring chunks, of about the same bytes, which it brings
   over its own link to the host. Entries are counted from where their device's begin. */
static void deal_chunks(device_plan *d)
{
    uint64_t all = 0, dealt = 0, begin = 0;
    for (uint64_t i = 0; i < d->n_chunks; i++)
        all += d->chunks[i].length;
    for (uint64_t i = 0; i < d->n_chunks; i++) {
        host_chunk *c = &d->chunks[i];
        if (d->n_gathers == 0 ||
            (d->n_gathers < d->wanted.n && dealt >= all / d->wanted.n * d->n_gathers)) {
            d->gathers[d->n_gathers] = (gather_part){
                .device = d->wanted.device[d->n_gathers], .first_chunk = i};
            d->n_gathers++;
            begin = c->first_entry;
        }
        d->gathers[d->n_gathers - 1].n_chunks++;
        c->first_entry -= begin;
        dealt += c->length;
    }
}

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
        deal_chunks(d);
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

static fanin_status make_device_tables(builder *b, gpu *g, fanin_error *error)
{
    device_plan *d = b->d;
    fanin_status status = join_all(b, error);
    for (size_t i = 0; i < d->n_parts && status == FANIN_OK; i++) {
        device_part *part = &d->parts[i];
        copy_list *list = &b->lists[i];
        if (b->from->plan->once && list->n <= AREA_ENTRIES) {
            part->entries = list->entries;
            part->n_entries = list->n;
            list->entries = NULL;
            continue;
        }
        status = gpu_table_create(g, part->device, list->entries, list->n, d->n_bases,
                                  &part->table, error);
        /* Entries lie rank by rank: one GPU's link would rest while another's memory is read. */
        if (status == FANIN_OK)
            gpu_table_take_in_turns(part->table, (uint32_t)d->n_sources);
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
    fanin_status status = make_device_tables(&b, g, error);
    for (size_t i = 0; b.lists && i < b.d->n_parts; i++)
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
    for (size_t i = 0; i < (*d)->n_parts; i++) {
        gpu_table_destroy(&(*d)->parts[i].table);
        free((*d)->parts[i].entries);
    }
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
