/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/device_plan.h"

#include "array.h"
#include "error_set.h"
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------ chunks dealt to devices */

/*
 * Which device gathers which chunk. Each brings its chunks over its own link to the host, so all
 * get the same share of the bytes. Where shards lie in one stretch of the destination, the device
 * that holds them gathers them; where every chunk has some of all devices' it does not matter.
 */

typedef struct dealing {
    device_plan *d;
    const int *owners;
    const copy_list *list;
    uint64_t share;                 /* of all bytes, a device's */
    uint64_t dealt[GATHER_DEVICES]; /* bytes */
    uint8_t *of_chunk;              /* index of the device in d->wanted */
} dealing;

/* What each device holds itself of a chunk. */
static void count_own(const dealing *w, const host_chunk *c,
                      uint64_t own[GATHER_DEVICES])
{
    memset(own, 0, GATHER_DEVICES * sizeof own[0]);
    for (uint64_t i = c->first_entry; w->owners && i < c->first_entry + c->n_entries;
         i++) {
        const copy_entry *e = &w->list->entries[i];
        int owner = w->owners[w->d->bases[e->base].source];
        for (size_t k = 0; k < w->d->wanted.n; k++) {
            if (w->d->wanted.device[k] == owner)
                own[k] += (uint64_t)e->runs * convert_bytes(e->convert, e->run);
        }
    }
}

/* Who has least; or who holds clearly more of it and has not had a share yet. */
static size_t taker(const dealing *w, const host_chunk *c)
{
    uint64_t own[GATHER_DEVICES], margin = c->length / 4;
    size_t least = 0, n = w->d->wanted.n;
    count_own(w, c, own);
    for (size_t k = 1; k < n; k++)
        least = w->dealt[k] < w->dealt[least] ? k : least;
    size_t best = least;
    for (size_t k = 0; k < n; k++) {
        if (w->dealt[k] < w->share && own[k] > own[best] + (best == least ? margin : 0))
            best = k;
    }
    return best;
}

static void deal_chunks(dealing *w)
{
    uint64_t all = 0;
    for (uint64_t i = 0; i < w->d->n_chunks; i++)
        all += w->d->chunks[i].length;
    w->share = all / (w->d->wanted.n > 0 ? w->d->wanted.n : 1);
    for (uint64_t i = 0; i < w->d->n_chunks; i++) {
        size_t k = taker(w, &w->d->chunks[i]);
        w->of_chunk[i] = (uint8_t)k;
        w->dealt[k] += w->d->chunks[i].length;
    }
}

/* Device by device into @p chunks and @p entries. */
static void put_in_order(dealing *w, host_chunk *chunks, copy_entry *entries)
{
    device_plan *d = w->d;
    uint64_t n_chunks = 0, n_entries = 0;
    for (size_t k = 0; k < d->wanted.n; k++) {
        gather_part part = {.device = d->wanted.device[k], .first_chunk = n_chunks};
        uint64_t begin = n_entries;
        for (uint64_t i = 0; i < d->n_chunks; i++) {
            host_chunk c = d->chunks[i];
            if (w->of_chunk[i] != k)
                continue;
            memcpy(entries + n_entries, w->list->entries + c.first_entry,
                   (size_t)c.n_entries * sizeof *entries);
            c.first_entry = n_entries - begin;
            n_entries += c.n_entries;
            chunks[n_chunks++] = c;
        }
        part.n_chunks = n_chunks - part.first_chunk;
        if (part.n_chunks > 0)
            d->gathers[d->n_gathers++] = part;
    }
}

/* Deals chunks to the devices that are wanted: the same bytes to each, and what a device holds
    itself (owners, as in device_plan_parts) rather to that one. Chunks and list are put in
    the order of devices; entries are counted from where their device's begin. FANIN_ERR_MEMORY. */
static fanin_status device_plan_deal(device_plan *d, const int *owners, copy_list *list,
                                     fanin_error *error)
{
    dealing w = {.d = d, .owners = owners, .list = list};
    d->n_gathers = 0;
    if (d->wanted.n == 1) {
        d->gathers[d->n_gathers++] =
            (gather_part){.device = d->wanted.device[0], .n_chunks = d->n_chunks};
        return FANIN_OK;
    }
    w.of_chunk = calloc(d->n_chunks + 1, sizeof *w.of_chunk);
    host_chunk *chunks = calloc(d->n_chunks + 1, sizeof *chunks);
    copy_entry *entries = calloc(list->n + 1, sizeof *entries);
    bool good = w.of_chunk && chunks && entries;
    if (good) {
        deal_chunks(&w);
        put_in_order(&w, chunks, entries);
        free(d->chunks);
        d->chunks = chunks;
        free(list->entries);
        list->entries = entries;
        list->capacity = list->n + 1;
    } else {
        free(chunks);
        free(entries);
    }
    free(w.of_chunk);
    return good ? FANIN_OK : error_set_memory(error);
}

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

static void add_bases(device_plan *d, size_t source, const source_copies *c)
{
    for (uint32_t i = 0; i < c->n_regions; i++)
        d->bases[d->n_bases++] =
            (device_base){.source = source, .region = c->regions[i]};
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
        add_bases(d, i, c);
        if (!join_copies(b, c, base))
            return device_plan_broken_off(b->from->stop, error);
    }
    return FANIN_OK;
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
