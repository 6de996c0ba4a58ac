/* SPDX-License-Identifier: Apache-2.0 */
#include "shards/region.h"
#include "array.h"
#include "error_set.h"
#include "messages.h"
#include "shards/registration.h"

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

/* Whether a range belongs to the region of the one before, which ends at @p high. */
static bool continues(const range *one, const range *before, uint64_t high,
                      uint64_t page)
{
    if (one->low < high)
        return true;
    if (before->in->memory.kind == FANIN_MEMORY_CUDA ||
        one->in->memory.kind == FANIN_MEMORY_CUDA)
        return one->in->memory.kind == before->in->memory.kind &&
               one->in->id == before->in->id;
    return one->low / page <= (high - 1) / page + 1;
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
        if (count == 0 || !continues(&ranges[i], &ranges[i - 1], high, page)) {
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
    if (status != FANIN_OK)
        region_set_free(r, out);
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

/* UCX wants the device's context to be current while it works on its memory. */
static fanin_status enter(const region *one, fanin_error *error)
{
    if (one->memory.kind != FANIN_MEMORY_CUDA)
        return FANIN_OK;
    return gpu_context_enter(gpu_present(), one->memory.device, error);
}

static void leave(const region *one)
{
    if (one->memory.kind == FANIN_MEMORY_CUDA)
        gpu_context_leave(gpu_present());
}

static void unregister(region *one)
{
    for (int i = 0; i < DOMAINS; i++) {
        if (!one->registered[i])
            continue;
        bool entered = enter(one, NULL) == FANIN_OK;
        ucx_region_destroy(&one->registered[i]);
        if (entered)
            leave(one);
    }
}

void region_set_release(region_set *set)
{
    for (uint32_t i = 0; i < set->count; i++) {
        region *one = set->regions[i];
        if (--one->users > 0)
            continue;
        unregister(one);
        free(one);
    }
    free(set->regions);
    memset(set, 0, sizeof *set);
}

void region_set_free(registrar *r, region_set *set)
{
    pthread_mutex_lock(&r->lock);
    region_set_release(set);
    pthread_mutex_unlock(&r->lock);
}

bool region_set_is_gone(const region_set *set)
{
    for (uint32_t i = 0; i < set->count; i++)
        if (!set->regions[i]->gone)
            return false;
    return true;
}

static void forget(registrar *r, region *one)
{
    if (one->gone)
        return;
    one->gone = true;
    unregister(one);
    mappers_lose(r, one);
}

void region_set_forget(registrar *r, region_set *set, const shard *s)
{
    pthread_mutex_lock(&r->lock);
    for (uint32_t i = 0; !s && i < set->count; i++)
        forget(r, set->regions[i]);
    for (size_t i = 0; s && i < s->n_boxes; i++) {
        region *one = region_set_find(set, s->boxes[i].low);
        if (one)
            forget(r, one);
    }
    pthread_mutex_unlock(&r->lock);
}

bool region_set_lend(registrar *r, region_set *set)
{
    bool any = false;
    pthread_mutex_lock(&r->lock);
    for (uint32_t i = 0; i < set->count; i++) {
        region *one = set->regions[i];
        bool known = one->has_key;
        for (int k = 0; k < DOMAINS; k++)
            known = known || one->registered[k];
        any = any || known;
        one->away = true;
        if (known)
            forget(r, one);
    }
    pthread_mutex_unlock(&r->lock);
    return any;
}

void region_set_return(registrar *r, region_set *set)
{
    pthread_mutex_lock(&r->lock);
    for (uint32_t i = 0; i < set->count; i++)
        set->regions[i]->away = false;
    pthread_mutex_unlock(&r->lock);
}

/* -------------------------------------------------------------------- keys */

/* A region that UCX cannot register is one that rdma cannot read; pages that are short may be
   there the next time. */
static fanin_status register_device(registrar *r, region *one, fanin_error *error)
{
    fanin_error why = FANIN_ERROR_INIT;
    fanin_status status = enter(one, &why);
    if (status == FANIN_OK) {
        status = ucx_region_create(r->ucx[DOMAIN_RDMA], (void *)(uintptr_t)one->base,
                                   one->length, one->memory,
                                   &one->registered[DOMAIN_RDMA], &why);
        leave(one);
    }
    if (status == FANIN_OK)
        return FANIN_OK;
    if (status == FANIN_ERR_MEMORY || status == FANIN_ERR_LIMIT) {
        error_copy(error, &why);
        return status;
    }
    one->ucx_refused = true;
    log_write(r->log, FANIN_LOG_WARNING, "no-rdma",
              "%llu bytes on CUDA device %d cannot be registered for rdma: %s%s%s",
              (unsigned long long)one->length, (int)one->memory.device, why.message,
              why.remedy[0] ? "; " : "", why.remedy);
    return FANIN_OK;
}

static fanin_status add_ucx_key(registrar *r, region *one, domain in, region_entry *out,
                                fanin_error *error)
{
    fanin_status status = FANIN_OK;
    bool device = one->memory.kind == FANIN_MEMORY_CUDA;
    out->base = one->base;
    if (device && (in != DOMAIN_RDMA || one->ucx_refused))
        return FANIN_OK;
    if (!one->registered[in])
        status = device ? register_device(r, one, error)
                        : ucx_region_create(r->ucx[in], (void *)(uintptr_t)one->base,
                                            one->length, one->memory,
                                            &one->registered[in], error);
    if (status == FANIN_OK && one->registered[in])
        out->rkey = ucx_region_rkey(one->registered[in], &out->rkey_size);
    return status;
}

/* Asks CUDA once; what has no handle is read by stream. */
static void export_region(registrar *r, region *one)
{
    fanin_error why = FANIN_ERROR_INIT;
    ipc_key key = {.offset = one->base - one->in.base, .length = one->in.length};
    gpu_device device;
    one->exported = true;
    if (one->in.origin != GPU_ORIGIN_MALLOC)
        return; /* put has told so */
    gpu *g = gpu_present();
    fanin_status status = gpu_device_get(g, one->memory.device, &device, &why);
    if (status == FANIN_OK)
        status = gpu_export(g, &one->in, key.handle, &why);
    if (status != FANIN_OK) {
        log_write(
            r->log, FANIN_LOG_WARNING, "no-ipc",
            "an allocation of %llu bytes on CUDA device %d cannot be exported, it is "
            "served by stream: %s%s%s",
            (unsigned long long)one->in.length, (int)one->memory.device, why.message,
            why.remedy[0] ? "; " : "", why.remedy);
        return;
    }
    memcpy(key.uuid, device.uuid, sizeof key.uuid);
    ipc_key_encode(&key, one->key);
    one->has_key = true;
}

static void add_ipc_key(registrar *r, region *one, region_entry *out)
{
    if (one->memory.kind != FANIN_MEMORY_CUDA)
        return;
    if (!one->exported)
        export_region(r, one);
    if (!one->has_key)
        return;
    out->rkey = one->key;
    out->rkey_size = sizeof one->key;
}

/* ------------------------------------------------------------------- tables */

/* The table's rows without bases and keys; NULL: no memory. */
static region_entry *rows(const region_set *set)
{
    region_entry *entries = calloc((size_t)set->count + 1, sizeof *entries);
    for (uint32_t i = 0; entries && i < set->count; i++)
        entries[i] = (region_entry){.id = i,
                                    .length = set->regions[i]->length,
                                    .memory = set->regions[i]->memory.kind,
                                    .device = set->regions[i]->memory.device,
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

fanin_status region_set_encode_keys(registrar *r, region_set *set, int32_t path,
                                    const key_reader *to, buffer *out,
                                    fanin_error *error)
{
    domain in = path == WIRE_PATH_RDMA ? DOMAIN_RDMA : DOMAIN_HOST;
    region_entry *entries = rows(set);
    if (!entries)
        return error_set_memory(error);
    fanin_status status = FANIN_OK;
    pthread_mutex_lock(&r->lock);
    for (uint32_t i = 0; status == FANIN_OK && i < set->count; i++) {
        region *one = set->regions[i];
        if (one->gone || one->away)
            status = error_set(error, FANIN_ERR_STALE, NULL,
                               "the trainer is replacing shards of this catalog");
        else if (path == WIRE_PATH_CUDA_IPC)
            add_ipc_key(r, one, &entries[i]);
        else
            status = add_ucx_key(r, one, in, &entries[i], error);
    }
    if (status == FANIN_OK && path == WIRE_PATH_CUDA_IPC)
        status = mapper_note(r, to, set, error);
    if (status == FANIN_OK)
        status = finish(entries, set, out, error);
    else
        free(entries);
    pthread_mutex_unlock(&r->lock);
    return status;
}
