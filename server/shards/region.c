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

/* Appends a use of @p known if it is that region, of a new one otherwise. Lock held. False: no
   memory. */
static bool append(region_set *set, region *known, uint64_t base, uint64_t length,
                   const gpu_range *in)
{
    if (!array_reserve(&set->regions, &set->capacity, (size_t)set->count + 1,
                       sizeof(region *)))
        return false;
    region *one = is_same(known, base, length, in) ? known : calloc(1, sizeof *one);
    if (!one)
        return false;
    if (one != known)
        *one =
            (region){.base = base, .length = length, .memory = in->memory, .in = *in};
    one->users++;
    set->regions[set->count++] = one;
    return true;
}

fanin_status region_set_build(registrar *r, const shard_set *shards,
                              const region_set *before, region_set *out,
                              uint32_t *region_of_box, fanin_error *error)
{
    memset(out, 0, sizeof *out);
    range *ranges = collect(shards);
    if (!ranges)
        return error_set_memory(error);
    bool good = true;
    pthread_mutex_lock(&r->lock);
    for (uint64_t i = 0; good && i < shards->n_boxes;) {
        const range *first = &ranges[i];
        uint64_t high = first->high;
        do {
            region_of_box[ranges[i].box] = out->count;
            high = ranges[i].high > high ? ranges[i].high : high;
            i++;
        } while (i < shards->n_boxes &&
                 gpu_range_continues(ranges[i - 1].in, high, ranges[i].in,
                                     ranges[i].low, (uint64_t)r->page_size));
        good = append(out, before ? region_set_find(before, first->low) : NULL,
                      first->low, high - first->low, first->in);
    }
    pthread_mutex_unlock(&r->lock);
    out->n_sorted = out->count;
    free(ranges);
    return good ? FANIN_OK : error_set_memory(error);
}

fanin_status region_set_append(registrar *r, region_set *set, const region_set *before,
                               uint64_t base, uint64_t length, const gpu_range *in,
                               fanin_error *error)
{
    static const gpu_range host = {.memory = {FANIN_MEMORY_HOST, -1}};
    region *known = NULL;
    in = in ? in : &host;
    pthread_mutex_lock(&r->lock);
    for (uint32_t i = 0; before && i < before->count && !known; i++)
        if (is_same(before->regions[i], base, length, in))
            known = before->regions[i];
    bool good = append(set, known, base, length, in);
    pthread_mutex_unlock(&r->lock);
    return good ? FANIN_OK : error_set_memory(error);
}
