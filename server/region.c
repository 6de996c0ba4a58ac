/* SPDX-License-Identifier: Apache-2.0 */
#include "region.h"
#include "error_set.h"

#include <stdlib.h>
#include <string.h>

/* The bytes of one box, and which box it is. */
typedef struct range {
    uint64_t low, high;
    uint64_t box;
} range;

static int by_address(const void *a, const void *b)
{
    const range *x = a, *y = b;
    return (x->low > y->low) - (x->low < y->low);
}

static range *collect(const shard_set *shards)
{
    range *ranges = calloc(shards->n_boxes + 1, sizeof *ranges);
    uint64_t n = 0;
    bool sorted = true;
    for (size_t i = 0; ranges && i < shards->count; i++) {
        const shard *s = shards->shards[i];
        for (size_t j = 0; j < s->n_boxes; j++, n++) {
            ranges[n] = (range){s->boxes[j].low, s->boxes[j].high, n};
            sorted = sorted && (n == 0 || ranges[n - 1].low <= ranges[n].low);
        }
    }
    if (ranges && !sorted)
        qsort(ranges, n, sizeof *ranges, by_address);
    return ranges;
}

static region *find(const region_set *set, uint64_t address)
{
    uint32_t low = 0, high = set->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        region *r = set->regions[middle];
        if (address < r->base)
            high = middle;
        else if (address - r->base >= r->length)
            low = middle + 1;
        else
            return r;
    }
    return NULL;
}

/* The region [low, high) of the set before, or a new one. */
static region *obtain(const region_set *before, uint64_t low, uint64_t high)
{
    region *r = before ? find(before, low) : NULL;
    if (r && r->base == low && r->length == high - low && !r->gone) {
        r->users++;
        return r;
    }
    r = calloc(1, sizeof *r);
    if (r) {
        r->base = low;
        r->length = high - low;
        r->users = 1;
    }
    return r;
}

fanin_status region_set_build(registrar *r, const shard_set *shards,
                              const region_set *before, region_set *out,
                              uint32_t *region_of_box, fanin_error *error)
{
    memset(out, 0, sizeof *out);
    range *ranges = collect(shards);
    if (!ranges)
        return error_set_memory(error);
    uint64_t page = (uint64_t)r->page_size, count = 0, high = 0;
    for (uint64_t i = 0; i < shards->n_boxes; i++) {
        if (count == 0 || ranges[i].low / page > (high - 1) / page + 1) {
            count++;
            /* NOLINTNEXTLINE(clang-analyzer-core.uninitialized.Assign) n_boxes are set */
            high = ranges[i].high;
        } else if (ranges[i].high > high) {
            high = ranges[i].high;
        }
        region_of_box[ranges[i].box] = (uint32_t)(count - 1);
    }
    out->regions = calloc(count + 1, sizeof(region *));
    fanin_status status = out->regions ? FANIN_OK : error_set_memory(error);
    pthread_mutex_lock(&r->lock);
    for (uint64_t i = 0; status == FANIN_OK && i < shards->n_boxes;) {
        uint32_t id = region_of_box[ranges[i].box];
        uint64_t low = ranges[i].low, end = low;
        for (; i < shards->n_boxes && region_of_box[ranges[i].box] == id; i++)
            end = ranges[i].high > end ? ranges[i].high : end;
        out->regions[id] = obtain(before, low, end);
        if (out->regions[id])
            out->count++;
        else
            status = error_set_memory(error);
    }
    pthread_mutex_unlock(&r->lock);
    free(ranges);
    if (status != FANIN_OK)
        region_set_free(r, out);
    return status;
}

static void unregister(region *one)
{
    for (int i = 0; i < DOMAINS; i++)
        if (one->registered[i])
            ucx_region_destroy(&one->registered[i]);
}

void region_set_free(registrar *r, region_set *set)
{
    pthread_mutex_lock(&r->lock);
    for (uint32_t i = 0; i < set->count; i++) {
        region *one = set->regions[i];
        if (--one->users > 0)
            continue;
        unregister(one);
        free(one);
    }
    pthread_mutex_unlock(&r->lock);
    free(set->regions);
    memset(set, 0, sizeof *set);
}

static void forget(region *one)
{
    one->gone = true;
    unregister(one);
}

void region_set_forget(registrar *r, region_set *set, const shard *s)
{
    pthread_mutex_lock(&r->lock);
    for (uint32_t i = 0; !s && i < set->count; i++)
        forget(set->regions[i]);
    for (size_t i = 0; s && i < s->n_boxes; i++) {
        region *one = find(set, s->boxes[i].low);
        if (one)
            forget(one);
    }
    pthread_mutex_unlock(&r->lock);
}

static fanin_status register_all(registrar *r, region_set *set, domain in,
                                 fanin_error *error)
{
    fanin_memory host = {.kind = FANIN_MEMORY_HOST, .device = -1};
    fanin_status status = FANIN_OK;
    for (uint32_t i = 0; status == FANIN_OK && i < set->count; i++) {
        region *one = set->regions[i];
        if (one->gone)
            return error_set(error, FANIN_ERR_STALE, NULL,
                             "the trainer is replacing shards of this catalog");
        if (!one->registered[in])
            status = ucx_region_create(r->ucx[in], (void *)(uintptr_t)one->base,
                                       one->length, host, &one->registered[in], error);
    }
    return status;
}

/* The table's rows without bases and keys; NULL: no memory. */
static region_entry *rows(const region_set *set)
{
    region_entry *entries = calloc((size_t)set->count + 1, sizeof *entries);
    for (uint32_t i = 0; entries && i < set->count; i++)
        entries[i] = (region_entry){.id = i,
                                    .length = set->regions[i]->length,
                                    .memory = FANIN_MEMORY_HOST,
                                    .device = -1,
                                    .rkey = (const uint8_t *)""};
    return entries;
}

static fanin_status finish(region_entry *entries, const region_set *set, buffer *out,
                           fanin_error *error)
{
    region_table_encode(out, entries, set->count);
    free(entries);
    return out->failed ? error_set_memory(error) : FANIN_OK;
}

fanin_status region_set_encode(const region_set *set, buffer *out, fanin_error *error)
{
    region_entry *entries = rows(set);
    return entries ? finish(entries, set, out, error) : error_set_memory(error);
}

fanin_status region_set_encode_keys(registrar *r, region_set *set, domain in,
                                    buffer *out, fanin_error *error)
{
    region_entry *entries = rows(set);
    if (!entries)
        return error_set_memory(error);
    pthread_mutex_lock(&r->lock);
    fanin_status status = register_all(r, set, in, error);
    for (uint32_t i = 0; status == FANIN_OK && i < set->count; i++) {
        const region *one = set->regions[i];
        entries[i].base = one->base;
        entries[i].rkey = ucx_region_rkey(one->registered[in], &entries[i].rkey_size);
    }
    if (status == FANIN_OK)
        status = finish(entries, set, out, error);
    else
        free(entries);
    pthread_mutex_unlock(&r->lock);
    return status;
}
