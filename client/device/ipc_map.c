/* SPDX-License-Identifier: Apache-2.0 */
#include "device/ipc_map.h"

#include "array.h"
#include "clock.h"
#include "digest.h"
#include "error_set.h"
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define SLOTS_LEAST 32

/* What tells one mapping from another: compared as bytes, so without padding. */
typedef struct identity {
    uint8_t handle[GPU_HANDLE_SIZE];
    uint8_t incarnation[16];
    uint64_t length;
    int64_t device;
} identity;

struct ipc_mapping {
    ipc_map *of;
    identity id;
    uint64_t hash;
    void *base; /* NULL: not mapped */
    size_t holders;
    fanin_error *why; /* of the last opening; NULL: it did not fail, or no memory */
};

/* Of a model they come by the ten thousand, in any order, so they are found by hash. Whoever makes
   up handles does not know the salt. */
struct ipc_map {
    gpu *g;
    pthread_mutex_t lock; /* of all that follows: threads open and take */
    pthread_cond_t changed;
    ipc_mapping **all; /* in the order in which they were taken first */
    size_t n, capacity;
    size_t *slots;  /* 1 + the number of a mapping, 0: free; at least half are */
    size_t n_slots; /* a power of two, or 0 */
    uint8_t salt[16];
    bool behind;    /* something may be held and not mapped */
    bool expecting; /* more will be taken: who opens waits for it */
    uint64_t spent_ns;
    bool abandoned;
};

ipc_map *ipc_map_create(gpu *g)
{
    ipc_map *map = calloc(1, sizeof *map);
    if (!map)
        return NULL;
    map->g = g;
    pthread_mutex_init(&map->lock, NULL);
    pthread_cond_init(&map->changed, NULL);
    if (!random_bytes(map->salt, sizeof map->salt))
        ipc_map_destroy(&map);
    return map;
}

static void unmap_allocation(const ipc_map *map, ipc_mapping *m)
{
    if (!map->abandoned && m->base)
        gpu_unmap(map->g, (int)m->id.device, m->base);
    free(m->why);
    free(m);
}

void ipc_map_destroy(ipc_map **map)
{
    if (!*map)
        return;
    for (size_t i = 0; i < (*map)->n; i++)
        unmap_allocation(*map, (*map)->all[i]);
    free((*map)->all);
    free((*map)->slots);
    pthread_cond_destroy(&(*map)->changed);
    pthread_mutex_destroy(&(*map)->lock);
    free(*map);
    *map = NULL;
}

/* ------------------------------------------------------------------ finding */

static uint64_t hash_of(const ipc_map *map, const identity *id)
{
    struct {
        identity id;
        uint8_t salt[sizeof map->salt];
    } salted = {.id = *id};
    uint64_t hash;
    memcpy(salted.salt, map->salt, sizeof salted.salt);
    digest whole = digest_of(&salted, sizeof salted);
    memcpy(&hash, whole.bytes, sizeof hash);
    return hash;
}

/* The slot that has the mapping, or the free one where it belongs. */
static size_t *mapping_slot(const ipc_map *map, const identity *id, uint64_t hash)
{
    size_t mask = map->n_slots - 1;
    for (size_t i = (size_t)hash & mask;; i = (i + 1) & mask) {
        const ipc_mapping *m = map->slots[i] ? map->all[map->slots[i] - 1] : NULL;
        if (!m || (m->hash == hash && memcmp(&m->id, id, sizeof *id) == 0))
            return &map->slots[i];
    }
}

static void fill_slots(ipc_map *map)
{
    memset(map->slots, 0, map->n_slots * sizeof *map->slots);
    for (size_t i = 0; i < map->n; i++)
        *mapping_slot(map, &map->all[i]->id, map->all[i]->hash) = i + 1;
}

/* For one more. False: no memory, and nothing has changed. */
static bool make_room_for_mapping(ipc_map *map)
{
    if (!array_reserve(&map->all, &map->capacity, map->n + 1, sizeof *map->all))
        return false;
    if (map->n_slots >= 2 * (map->n + 1))
        return true;
    size_t n_slots = map->n_slots ? 2 * map->n_slots : SLOTS_LEAST;
    size_t *grown = realloc(map->slots, n_slots * sizeof *grown);
    if (!grown)
        return false;
    map->slots = grown;
    map->n_slots = n_slots;
    fill_slots(map);
    return true;
}

/* The allocation's mapping, which is made if need be; NULL: no memory. */
static ipc_mapping *find_or_add(ipc_map *map, const identity *id)
{
    if (!make_room_for_mapping(map))
        return NULL;
    uint64_t hash = hash_of(map, id);
    size_t *slot = mapping_slot(map, id, hash);
    if (*slot == 0) {
        ipc_mapping *m = calloc(1, sizeof *m);
        if (!m)
            return NULL;
        *m = (ipc_mapping){.of = map, .id = *id, .hash = hash};
        map->all[map->n++] = m;
        *slot = map->n;
    }
    return map->all[*slot - 1];
}

fanin_status ipc_map_take(ipc_map *map, int device, const uint8_t incarnation[16],
                          const ipc_key *key, ipc_mapping **out, fanin_error *error)
{
    identity id = {.length = key->length, .device = device};
    memcpy(id.handle, key->handle, sizeof id.handle);
    memcpy(id.incarnation, incarnation, sizeof id.incarnation);
    pthread_mutex_lock(&map->lock);
    ipc_mapping *m = find_or_add(map, &id);
    if (m) {
        m->holders++;
        map->behind = map->behind || !m->base;
    }
    pthread_cond_signal(&map->changed);
    pthread_mutex_unlock(&map->lock);
    *out = m;
    return m ? FANIN_OK : error_set_memory(error);
}

/* ------------------------------------------------------------------ opening */

/* The length is the rank's word until the driver has said it, too: a kernel that reads beyond an
   allocation costs the process its device. */
static fanin_status check_length(gpu *g, const identity *id, const void *base,
                                 fanin_error *error)
{
    const error_place place = {
        .phase = "connect", .remedy = "run the same fanin on both ends, or use stream"};
    gpu_range there;
    fanin_status status = gpu_range_of(g, base, &there, error);
    if (status != FANIN_OK)
        return status;
    uint64_t length = there.base + there.length - (uint64_t)(uintptr_t)base;
    return length >= id->length
               ? FANIN_OK
               : error_set(error, FANIN_ERR_PROTOCOL, &place,
                           "the rank says that an allocation has %" PRIu64
                           " bytes, and the CUDA driver that it has %" PRIu64,
                           id->length, length);
}

static fanin_status map_whole(gpu *g, const identity *id, void **base,
                              fanin_error *error)
{
    int device = (int)id->device;
    fanin_status status = gpu_map(g, device, id->handle, base, error);
    if (status == FANIN_OK)
        status = check_length(g, id, *base, error);
    if (status != FANIN_OK) {
        gpu_unmap(g, device, *base);
        *base = NULL;
    }
    return status;
}

/* Lock held before and after: what is opened is held, so it stays. */
static void open_allocation(ipc_map *map, ipc_mapping *m)
{
    fanin_error why = FANIN_ERROR_INIT;
    void *base = NULL;
    uint64_t started = clock_ns();
    pthread_mutex_unlock(&map->lock);
    bool ok = map_whole(map->g, &m->id, &base, &why) == FANIN_OK;
    pthread_mutex_lock(&map->lock);
    map->spent_ns += clock_ns() - started;
    m->base = base;
    free(m->why);
    m->why = ok ? NULL : malloc(sizeof *m->why);
    if (m->why)
        *m->why = why;
}

/* The first from number *@p at on, which is then behind it; NULL: none. */
static ipc_mapping *next_wanted(const ipc_map *map, size_t *at)
{
    while (*at < map->n) {
        ipc_mapping *m = map->all[(*at)++];
        if (!m->base && m->holders > 0)
            return m;
    }
    return NULL;
}

/* Those that are held and not mapped, and those that are expected, until @p stop. Lock held. */
static void open_wanted(ipc_map *map, work_stop *stop)
{
    for (size_t at = 0;;) {
        ipc_mapping *m = next_wanted(map, &at);
        if (m && work_stopped_after(stop, WORK_STEPS))
            return;
        if (m)
            open_allocation(map, m);
        else if (map->expecting)
            pthread_cond_wait(&map->changed, &map->lock);
        else
            return;
    }
}

static bool lacks_some_allocation(const ipc_map *map)
{
    size_t at = 0;
    return next_wanted(map, &at) != NULL;
}

bool ipc_map_is_behind(ipc_map *map)
{
    pthread_mutex_lock(&map->lock);
    bool behind = map->behind;
    pthread_mutex_unlock(&map->lock);
    return behind;
}

void ipc_map_expect(ipc_map *map, bool more)
{
    pthread_mutex_lock(&map->lock);
    map->expecting = more;
    pthread_cond_signal(&map->changed);
    pthread_mutex_unlock(&map->lock);
}

/* Lock held. */
static void sweep_released(ipc_map *map)
{
    size_t kept = 0;
    for (size_t i = 0; i < map->n; i++) {
        if (map->all[i]->holders > 0)
            map->all[kept++] = map->all[i];
        else
            unmap_allocation(map, map->all[i]);
    }
    if (kept < map->n) {
        map->n = kept;
        fill_slots(map);
    }
}

void ipc_map_sweep(ipc_map *map)
{
    pthread_mutex_lock(&map->lock);
    sweep_released(map);
    pthread_mutex_unlock(&map->lock);
}

fanin_status ipc_map_open(ipc_map *map, work_stop *stop, fanin_error *error)
{
    pthread_mutex_lock(&map->lock);
    open_wanted(map, stop);
    if (!(stop && stop->stopped) && lacks_some_allocation(map)) {
        /* Older memory of the same addresses of its owner may be in the way. */
        sweep_released(map);
        open_wanted(map, stop);
    }
    map->behind = lacks_some_allocation(map);
    pthread_mutex_unlock(&map->lock);
    return stop && stop->stopped
               ? work_broken_off(stop, "connect", "memory was mapped", error)
               : FANIN_OK;
}

uint64_t ipc_map_spent_ns(ipc_map *map)
{
    pthread_mutex_lock(&map->lock);
    uint64_t spent = map->spent_ns;
    pthread_mutex_unlock(&map->lock);
    return spent;
}

fanin_status ipc_mapping_check(const ipc_mapping *mapping, fanin_error *error)
{
    if (mapping->base)
        return FANIN_OK;
    if (mapping->why)
        return error_copy(error, mapping->why);
    return error_set(error, FANIN_ERR_INTERNAL, NULL, "memory was not mapped");
}

uint64_t ipc_mapping_base(const ipc_mapping *mapping)
{
    return (uint64_t)(uintptr_t)mapping->base;
}

void ipc_mapping_release(ipc_mapping **mapping)
{
    ipc_mapping *m = *mapping;
    *mapping = NULL;
    if (!m)
        return;
    pthread_mutex_lock(&m->of->lock);
    m->holders--;
    pthread_mutex_unlock(&m->of->lock);
}

void ipc_map_abandon(ipc_map *map)
{
    map->abandoned = true;
}
