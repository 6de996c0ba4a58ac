/* SPDX-License-Identifier: Apache-2.0 */
#include "shards/region.h"
#include "array.h"
#include "error_set.h"
#include "gpu_finder.h"

#include <stdlib.h>
#include <string.h>

/* The bytes of one box, and which box it is. */
typedef struct range {
    uint64_t low, high;
    uint64_t box;
    const gpu_range *in;
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
            const shard_box *b = &s->boxes[j];
            ranges[n] = (range){b->low, b->high, n, &b->in};
            sorted = sorted && (n == 0 || ranges[n - 1].low <= ranges[n].low);
        }
    }
    if (ranges && !sorted)
        qsort(ranges, n, sizeof *ranges, by_address);
    return ranges;
}

region *region_set_find(const region_set *set, uint64_t address)
{
    uint32_t low = 0, high = set->n_sorted;
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

static bool is_same(const region *r, uint64_t base, uint64_t length,
                    const gpu_range *in)
{
    return r && !r->gone && r->base == base && r->length == length &&
           r->memory.kind == in->memory.kind && r->in.id == in->id;
}

/* A use of @p known if it is that region, or of a new one; NULL: no memory. */
static region *obtain(region *known, uint64_t base, uint64_t length,
                      const gpu_range *in)
{
    if (is_same(known, base, length, in)) {
        known->users++;
        return known;
    }
    region *r = calloc(1, sizeof *r);
    if (r) {
        r->base = base;
        r->length = length;
        r->memory = in->memory;
        r->in = *in;
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
        if (count == 0 || !gpu_range_continues(ranges[i - 1].in, high, ranges[i].in,
                                               ranges[i].low, page)) {
            count++;
            /* NOLINTNEXTLINE(clang-analyzer-core.uninitialized.Assign) n_boxes are set */
            high = ranges[i].high;
        } else if (ranges[i].high > high) {
            high = ranges[i].high;
        }
        region_of_box[ranges[i].box] = (uint32_t)(count - 1);
    }
    fanin_status status =
        array_reserve(&out->regions, &out->capacity, count + 1, sizeof(region *))
            ? FANIN_OK
            : error_set_memory(error);
    pthread_mutex_lock(&r->lock);
    for (uint64_t i = 0; status == FANIN_OK && i < shards->n_boxes;) {
        uint32_t id = region_of_box[ranges[i].box];
        uint64_t low = ranges[i].low, end = low;
        const gpu_range *in = ranges[i].in;
        for (; i < shards->n_boxes && region_of_box[ranges[i].box] == id; i++)
            end = ranges[i].high > end ? ranges[i].high : end;
        out->regions[id] =
            obtain(before ? region_set_find(before, low) : NULL, low, end - low, in);
        if (out->regions[id])
            out->count++;
        else
            status = error_set_memory(error);
    }
    pthread_mutex_unlock(&r->lock);
    out->n_sorted = out->count;
    free(ranges);
    return status;
}

fanin_status region_set_append(registrar *r, region_set *set, const region_set *before,
                               uint64_t base, uint64_t length, const gpu_range *in,
                               fanin_error *error)
{
    static const gpu_range host = {.memory = {FANIN_MEMORY_HOST, -1}};
    if (!array_reserve(&set->regions, &set->capacity, (size_t)set->count + 1,
                       sizeof(region *)))
        return error_set_memory(error);
    in = in ? in : &host;
    region *known = NULL, *one;
    pthread_mutex_lock(&r->lock);
    for (uint32_t i = 0; before && i < before->count && !known; i++)
        if (is_same(before->regions[i], base, length, in))
            known = before->regions[i];
    one = obtain(known, base, length, in);
    pthread_mutex_unlock(&r->lock);
    if (!one)
        return error_set_memory(error);
    set->regions[set->count++] = one;
    return FANIN_OK;
}
