/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ipc_map.h"

#include "array.h"
#include "error_set.h"
#include <stdlib.h>
#include <string.h>

/* What tells one mapping from another: compared as bytes, so without padding. */
typedef struct identity {
    uint8_t handle[GPU_HANDLE_SIZE];
    uint8_t incarnation[16];
    uint64_t length;
    int64_t device;
} identity;

struct ipc_mapping {
    identity id;
    void *base; /* NULL: not mapped */
    size_t holders;
    fanin_error why; /* the last opening failed */
};

struct ipc_map {
    gpu *g;
    ipc_mapping **sorted; /* by identity */
    size_t n, capacity;
    bool behind; /* something may be held and not mapped */
    bool abandoned;
};

ipc_map *ipc_map_create(gpu *g)
{
    ipc_map *map = calloc(1, sizeof *map);
    if (map)
        map->g = g;
    return map;
}

static void unmap(const ipc_map *map, ipc_mapping *m)
{
    if (!map->abandoned && m->base)
        gpu_unmap(map->g, (int)m->id.device, m->base);
    free(m);
}

void ipc_map_destroy(ipc_map **map)
{
    if (!*map)
        return;
    for (size_t i = 0; i < (*map)->n; i++)
        unmap(*map, (*map)->sorted[i]);
    free((*map)->sorted);
    free(*map);
    *map = NULL;
}

static int compare_identity(const void *key, const void *element)
{
    return memcmp(key, &(*(ipc_mapping *const *)element)->id, sizeof(identity));
}

/* Where @p id is, or would be inserted. */
static size_t place_of(const ipc_map *map, const identity *id, bool *found)
{
    return array_search(id, map->sorted, map->n, sizeof *map->sorted, compare_identity,
                        found);
}

fanin_status ipc_map_take(ipc_map *map, int device, const uint8_t incarnation[16],
                          const ipc_key *key, ipc_mapping **out, fanin_error *error)
{
    identity id = {.length = key->length, .device = device};
    memcpy(id.handle, key->handle, sizeof id.handle);
    memcpy(id.incarnation, incarnation, sizeof id.incarnation);
    bool found;
    size_t at = place_of(map, &id, &found);
    if (found) {
        *out = map->sorted[at];
        (*out)->holders++;
        map->behind = map->behind || !(*out)->base;
        return FANIN_OK;
    }
    ipc_mapping *m = calloc(1, sizeof *m);
    if (!m ||
        !array_reserve(&map->sorted, &map->capacity, map->n + 1, sizeof *map->sorted)) {
        free(m);
        return error_set_memory(error);
    }
    *m = (ipc_mapping){.id = id, .holders = 1, .why = FANIN_ERROR_INIT};
    memmove(&map->sorted[at + 1], &map->sorted[at],
            (map->n - at) * sizeof *map->sorted);
    map->sorted[at] = m;
    map->n++;
    map->behind = true;
    *out = m;
    return FANIN_OK;
}

/* ------------------------------------------------------------------ opening */

static void open_one(gpu *g, ipc_mapping *m)
{
    m->why = (fanin_error)FANIN_ERROR_INIT;
    (void)gpu_map(g, (int)m->id.device, m->id.handle, &m->base, &m->why);
}

static bool is_wanted(const ipc_mapping *m)
{
    return !m->base && m->holders > 0;
}

/* Those that are held and not mapped, until @p stop. */
static void open_wanted(const ipc_map *map, work_stop *stop)
{
    for (size_t i = 0; i < map->n; i++) {
        if (!is_wanted(map->sorted[i]))
            continue;
        if (work_stopped_after(stop, WORK_STEPS))
            return;
        open_one(map->g, map->sorted[i]);
    }
}

static bool lacks_some(const ipc_map *map)
{
    for (size_t i = 0; i < map->n; i++) {
        if (is_wanted(map->sorted[i]))
            return true;
    }
    return false;
}

fanin_status ipc_map_open(ipc_map *map, work_stop *stop, fanin_error *error)
{
    if (!map->behind) /* a warm pull of a model looks at none of its thousands */
        return FANIN_OK;
    open_wanted(map, stop);
    if (!(stop && stop->stopped) && lacks_some(map)) {
        /* Older memory of the same addresses of its owner may be in the way. */
        ipc_map_sweep(map);
        open_wanted(map, stop);
    }
    map->behind = lacks_some(map);
    return stop && stop->stopped
               ? work_broken_off(stop, "connect", "memory was mapped", error)
               : FANIN_OK;
}

fanin_status ipc_mapping_check(const ipc_mapping *mapping, fanin_error *error)
{
    if (mapping->base)
        return FANIN_OK;
    if (mapping->why.status != FANIN_OK)
        return error_copy(error, &mapping->why);
    return error_set(error, FANIN_ERR_INTERNAL, NULL, "memory was not mapped");
}

uint64_t ipc_mapping_base(const ipc_mapping *mapping)
{
    return (uint64_t)(uintptr_t)mapping->base;
}

void ipc_mapping_release(ipc_mapping **mapping)
{
    if (*mapping)
        (*mapping)->holders--;
    *mapping = NULL;
}

void ipc_map_sweep(ipc_map *map)
{
    size_t kept = 0;
    for (size_t i = 0; i < map->n; i++) {
        if (map->sorted[i]->holders > 0)
            map->sorted[kept++] = map->sorted[i];
        else
            unmap(map, map->sorted[i]);
    }
    map->n = kept;
}

void ipc_map_abandon(ipc_map *map)
{
    map->abandoned = true;
}

size_t ipc_map_count(const ipc_map *map)
{
    size_t mapped = 0;
    for (size_t i = 0; i < map->n; i++)
        mapped += map->sorted[i]->base != NULL;
    return mapped;
}
