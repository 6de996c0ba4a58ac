/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which device gathers which chunk. Each brings its chunks over its own link to the host, so all
 * get the same share of the bytes. Where shards lie in one stretch of the destination, the device
 * that holds them gathers them; where every chunk has some of all devices' it does not matter.
 */
#include "ipc/device_plan_internal.h"

#include "error_set.h"
#include <stdlib.h>
#include <string.h>

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

static void deal(dealing *w)
{
    uint64_t all = 0;
    for (uint64_t i = 0; i < w->d->n_chunks; i++)
        all += w->d->chunks[i].length;
    w->share = all / w->d->wanted.n;
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

fanin_status device_plan_deal(device_plan *d, const int *owners, copy_list *list,
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
        deal(&w);
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
