/* SPDX-License-Identifier: Apache-2.0 */
#include "shards/registration.h"
#include "array.h"
#include "catalog.h"
#include "error_set.h"
#include "gpu_finder.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/** One session and the regions of one publication, as it fetched them last. */
typedef struct mapper {
    const void *session;
    char peer[64], publication[PUBLICATION_NAME_SIZE];
    region_set mapped; /**< those with a key, each with a use */
    uint64_t lost; /**< bytes of allocations that were forgotten and not told of yet */
    struct mapper *next;
} mapper;

/* -------------------------------------------------------------- which memory */

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

/* The region among the sorted ones that holds the address, or NULL. */
static region *region_set_find(const region_set *set, uint64_t address)
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

/* ------------------------------------------------------------------ regions */

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
    if (!one->registered)
        return;
    bool entered = enter(one, NULL) == FANIN_OK;
    ucx_region_destroy(&one->registered);
    if (entered)
        leave(one);
}

/* Lock held. */
static void release(region_set *set)
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
    release(set);
    pthread_mutex_unlock(&r->lock);
}

/* ------------------------------------------------------------------ mappers */

static bool has_session(const registrar *r, const void *session)
{
    for (const mapper *m = r->mappers; m; m = m->next)
        if (m->session == session)
            return true;
    return false;
}

/* Whether all of its regions were forgotten, and that was told. */
static bool is_over(const mapper *m)
{
    bool over = m->lost == 0;
    for (uint32_t i = 0; over && i < m->mapped.count; i++)
        over = m->mapped.regions[i]->gone;
    return over;
}

static void mapper_free(mapper *m)
{
    release(&m->mapped);
    free(m);
}

/* Takes out the records of a session: those of one publication and those of which nothing is
   left; NULL: all. */
static void take_out(registrar *r, const void *session, const char *publication)
{
    for (mapper **link = &r->mappers; *link;) {
        mapper *m = *link;
        bool out =
            m->session == session &&
            (!publication || strcmp(m->publication, publication) == 0 || is_over(m));
        if (!out) {
            link = &m->next;
            continue;
        }
        *link = m->next;
        mapper_free(m);
    }
}

/* @p set's regions with a key replace what the session had of the publication. */
static fanin_status note_mapper(registrar *r, const key_reader *who,
                                const region_set *set, fanin_error *error)
{
    mapper *m = calloc(1, sizeof *m);
    if (!m || !array_reserve(&m->mapped.regions, &m->mapped.capacity, set->count,
                             sizeof *set->regions)) {
        free(m);
        return error_set_memory(error);
    }
    m->session = who->session;
    snprintf(m->peer, sizeof m->peer, "%s", who->peer);
    snprintf(m->publication, sizeof m->publication, "%s", who->publication);
    for (uint32_t i = 0; i < set->count; i++) {
        region *one = set->regions[i];
        one->users += one->has_key;
        if (one->has_key)
            m->mapped.regions[m->mapped.count++] = one;
    }
    bool known = has_session(r, who->session);
    take_out(r, who->session, who->publication);
    bool any = m->mapped.count > 0, knows = any || has_session(r, who->session);
    if (any) {
        m->next = r->mappers;
        r->mappers = m;
    } else {
        mapper_free(m);
    }
    if (knows && !known)
        atomic_fetch_add(&r->n_mappers, 1);
    else if (known && !knows)
        atomic_fetch_sub(&r->n_mappers, 1);
    return FANIN_OK;
}

/* The region is being forgotten, NULL: all that were not yet. Lock held. */
static void lose(registrar *r, const region *one)
{
    for (mapper *m = r->mappers; m; m = m->next)
        for (uint32_t i = 0; i < m->mapped.count; i++) {
            const region *mapped = m->mapped.regions[i];
            if (one ? mapped == one : !mapped->gone)
                m->lost += mapped->in.length;
        }
}

void mappers_lose_all(registrar *r)
{
    pthread_mutex_lock(&r->lock);
    lose(r, NULL);
    pthread_mutex_unlock(&r->lock);
}

void mappers_drop(registrar *r, const void *session)
{
    pthread_mutex_lock(&r->lock);
    if (has_session(r, session)) {
        take_out(r, session, NULL);
        atomic_fetch_sub(&r->n_mappers, 1);
    }
    pthread_mutex_unlock(&r->lock);
}

/* One session's loss; false: there is none any more. */
static bool next_loss(registrar *r, char *peer, size_t size, uint64_t *bytes)
{
    mapper *first = NULL;
    *bytes = 0;
    pthread_mutex_lock(&r->lock);
    for (mapper *m = r->mappers; m; m = m->next) {
        if (m->lost == 0 || (first && m->session != first->session))
            continue;
        first = first ? first : m;
        *bytes += m->lost;
        m->lost = 0;
    }
    if (first)
        snprintf(peer, size, "%s", first->peer);
    pthread_mutex_unlock(&r->lock);
    return first != NULL;
}

void mappers_tell(registrar *r, const char *publication, const char *what)
{
    char peer[64];
    uint64_t bytes;
    while (next_loss(r, peer, sizeof peer, &bytes))
        log_write(
            r->log, FANIN_LOG_WARNING, "still-mapped",
            "%s: %s may still map %" PRIu64
            " bytes of CUDA memory that are %s; it closes the "
            "mapping at its next pull, or when it ends: free the memory after that",
            publication, peer, bytes, what);
}

/* ------------------------------------------------------------------- forget */

static void forget(registrar *r, region *one)
{
    if (one->gone)
        return;
    one->gone = true;
    unregister(one);
    if (one->has_key)
        lose(r, one);
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

bool region_set_pause(registrar *r, region_set *set)
{
    bool any = false;
    pthread_mutex_lock(&r->lock);
    for (uint32_t i = 0; i < set->count; i++) {
        region *one = set->regions[i];
        bool known = one->has_key || one->registered;
        any = any || known;
        one->away = true;
        if (known)
            forget(r, one);
    }
    pthread_mutex_unlock(&r->lock);
    return any;
}

void region_set_resume(registrar *r, region_set *set)
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
        status = ucx_region_create(r->ucx, (void *)(uintptr_t)one->base, one->length,
                                   one->memory, &one->registered, &why);
        leave(one);
    }
    if (status == FANIN_OK)
        return FANIN_OK;
    if (status == FANIN_ERR_MEMORY || status == FANIN_ERR_LIMIT)
        return error_copy(error, &why);
    one->ucx_refused = true;
    log_write(r->log, FANIN_LOG_WARNING, "no-rdma",
              "%" PRIu64
              " bytes on CUDA device %d cannot be registered for rdma: %s%s%s",
              one->length, (int)one->memory.device, why.message,
              why.remedy[0] ? "; " : "", why.remedy);
    return FANIN_OK;
}

static fanin_status add_ucx_key(registrar *r, region *one, region_entry *out,
                                fanin_error *error)
{
    fanin_status status = FANIN_OK;
    bool device = one->memory.kind == FANIN_MEMORY_CUDA;
    out->base = one->base;
    if (device && one->ucx_refused)
        return FANIN_OK;
    if (!one->registered)
        status = device ? register_device(r, one, error)
                        : ucx_region_create(r->ucx, (void *)(uintptr_t)one->base,
                                            one->length, one->memory, &one->registered,
                                            error);
    if (status == FANIN_OK && one->registered)
        out->rkey = ucx_region_rkey(one->registered, &out->rkey_size);
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
        log_write(r->log, FANIN_LOG_WARNING, "no-ipc",
                  "an allocation of %" PRIu64
                  " bytes on CUDA device %d cannot be exported, it is "
                  "served by stream: %s%s%s",
                  one->in.length, (int)one->memory.device, why.message,
                  why.remedy[0] ? "; " : "", why.remedy);
        return;
    }
    memcpy(key.uuid, device.uuid, sizeof key.uuid);
    ipc_key_encode(&key, one->key);
    one->has_key = true;
}

static fanin_status add_ipc_key(registrar *r, region *one, region_entry *out,
                                fanin_error *error)
{
    (void)error;
    if (one->memory.kind != FANIN_MEMORY_CUDA)
        return FANIN_OK;
    if (!one->exported)
        export_region(r, one);
    if (!one->has_key)
        return FANIN_OK;
    out->rkey = one->key;
    out->rkey_size = sizeof one->key;
    return FANIN_OK;
}

/* The kernel reads without a key. */
static fanin_status add_base(registrar *r, region *one, region_entry *out,
                             fanin_error *error)
{
    (void)r;
    (void)error;
    out->base = one->base;
    return FANIN_OK;
}

struct key_kind {
    /* The key of a region, if it can have one. */
    fanin_status (*add)(registrar *r, region *one, region_entry *out,
                        fanin_error *error);
    bool maps; /* who gets them is a mapper */
};

const key_kind base_keys = {.add = add_base};
const key_kind ucx_keys = {.add = add_ucx_key};
const key_kind ipc_keys = {.add = add_ipc_key, .maps = true};

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

fanin_status region_set_encode_keys(registrar *r, region_set *set, const key_kind *kind,
                                    const key_reader *to, buffer *out,
                                    fanin_error *error)
{
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
        else
            status = kind->add(r, one, &entries[i], error);
    }
    if (status == FANIN_OK && kind->maps)
        status = note_mapper(r, to, set, error);
    if (status == FANIN_OK)
        status = finish(entries, set, out, error);
    else
        free(entries);
    pthread_mutex_unlock(&r->lock);
    return status;
}
