/* SPDX-License-Identifier: Apache-2.0 */
#include "device/device_pool.h"

#include "error_set.h"
#include <stdlib.h>

#define AREAS_AT_ONCE 8 /* of one allocation */

typedef struct device_staging {
    uint8_t *memory;
    ucx_local *local;
    fanin_error refused; /* status FANIN_OK: it was not refused */
} device_staging;

struct device_pool {
    gpu *g;
    pool_chunk chunks[POOL_CHUNKS];
    copy_entry *areas[POOL_AREAS / AREAS_AT_ONCE];
    void *pinned; /* the client's staging */
    bool abandoned;
    device_staging *staging[GPU_MAX_DEVICES];
};

device_pool *device_pool_create(gpu *g)
{
    device_pool *pool = calloc(1, sizeof(*pool));
    if (pool)
        pool->g = g;
    return pool;
}

void device_pool_free(device_pool **pool)
{
    device_pool *p = *pool;
    *pool = NULL;
    if (!p)
        return;
    for (size_t i = 0; i < POOL_CHUNKS && !p->abandoned; i++) {
        if (p->chunks[i].bytes)
            gpu_host_free(p->g, p->chunks[i].bytes);
    }
    for (size_t i = 0; i < POOL_AREAS / AREAS_AT_ONCE && !p->abandoned; i++) {
        if (p->areas[i])
            gpu_host_free(p->g, p->areas[i]);
    }
    for (size_t i = 0; i < GPU_MAX_DEVICES; i++)
        free(p->staging[i]);
    free(p);
}

fanin_status device_pool_take(device_pool *pool, pool_chunk **out, fanin_error *error)
{
    *out = NULL;
    for (size_t i = 0; i < POOL_CHUNKS; i++) {
        pool_chunk *c = &pool->chunks[i];
        if (c->busy)
            continue;
        if (!c->bytes) {
            void *memory;
            fanin_error why = FANIN_ERROR_INIT;
            fanin_status status = gpu_host_alloc(
                pool->g, CHUNK_BYTES + CHUNK_ENTRIES * sizeof(copy_entry), &memory,
                &why);
            if (status != FANIN_OK && i == 0) {
                error_copy(error, &why);
                return status;
            }
            if (status != FANIN_OK)
                return FANIN_OK; /* those that there are must do */
            c->bytes = memory;
            c->entries = (copy_entry *)(c->bytes + CHUNK_BYTES);
        }
        c->busy = true;
        *out = c;
        return FANIN_OK;
    }
    return FANIN_OK;
}

fanin_status device_pool_area(device_pool *pool, unsigned area, copy_entry **out,
                              fanin_error *error)
{
    copy_entry **several = &pool->areas[area / AREAS_AT_ONCE];
    if (!*several) {
        void *memory;
        fanin_status status = gpu_host_alloc(
            pool->g, sizeof(copy_entry) * AREAS_AT_ONCE * AREA_ENTRIES, &memory, error);
        if (status != FANIN_OK)
            return status;
        *several = memory;
    }
    *out = *several + (size_t)(area % AREAS_AT_ONCE) * AREA_ENTRIES;
    return FANIN_OK;
}

fanin_status device_pool_pin(device_pool *pool, void *staging, size_t length,
                             fanin_error *error)
{
    if (pool->pinned == staging)
        return FANIN_OK;
    fanin_status status = gpu_pin(pool->g, staging, length, error);
    if (status == FANIN_OK)
        pool->pinned = staging;
    return status;
}

static fanin_status make_staging(device_pool *pool, ucx_client *client, int device,
                                 size_t length, device_staging *s, fanin_error *error)
{
    void *memory;
    fanin_status status = gpu_alloc(pool->g, device, length, &memory, error);
    if (status != FANIN_OK)
        return status;
    status = gpu_context_enter(pool->g, device, error);
    if (status == FANIN_OK) {
        fanin_memory cuda = {FANIN_MEMORY_CUDA, device};
        status = ucx_local_create(client, memory, length, cuda, &s->local, error);
        gpu_context_leave(pool->g);
    }
    if (status == FANIN_OK)
        s->memory = memory;
    else
        gpu_free(pool->g, device, memory);
    return status;
}

fanin_status device_pool_staging(device_pool *pool, ucx_client *client, int device,
                                 size_t slot_bytes, uint8_t **memory_out,
                                 ucx_local **local_out, fanin_error *error)
{
    device_staging *s = pool->staging[device];
    if (!s) {
        s = calloc(1, sizeof(*s));
        if (!s)
            return error_set_memory(error);
        s->refused = (fanin_error)FANIN_ERROR_INIT;
        pool->staging[device] = s;
        (void)make_staging(pool, client, device, DEVICE_SLOTS * slot_bytes, s,
                           &s->refused);
    }
    if (!s->memory) {
        error_copy(error, &s->refused);
        return s->refused.status;
    }
    *memory_out = s->memory;
    *local_out = s->local;
    return FANIN_OK;
}

void device_pool_unregister(device_pool *pool)
{
    for (int i = 0; pool && i < GPU_MAX_DEVICES; i++) {
        device_staging *s = pool->staging[i];
        if (!s || !s->local)
            continue;
        bool entered = gpu_context_enter(pool->g, i, NULL) == FANIN_OK;
        ucx_local_destroy(&s->local);
        if (entered)
            gpu_context_leave(pool->g);
    }
}

bool device_pool_close(device_pool *pool, bool drained)
{
    if (!pool)
        return drained;
    drained = drained && !pool->abandoned;
    if (pool->pinned && drained)
        gpu_unpin(pool->g, pool->pinned);
    pool->pinned = NULL;
    for (int i = 0; i < GPU_MAX_DEVICES; i++) {
        if (pool->staging[i] && pool->staging[i]->memory && drained)
            gpu_free(pool->g, i, pool->staging[i]->memory);
        free(pool->staging[i]);
        pool->staging[i] = NULL;
    }
    return drained;
}

void device_pool_abandon(device_pool *pool)
{
    pool->abandoned = true;
}
