/* SPDX-License-Identifier: Apache-2.0 */
#include "device/devices.h"

#include "error_set.h"
#include <stdio.h>
#include <stdlib.h>

/* The lanes of a device. */
typedef struct gather_side {
    uint64_t device_chunk, host_chunk; /* bytes of one; 0: none */
    uint8_t *device_memory, *host_memory;
    void *digests; /* pinned, of all lanes */
    gpu_stream *lanes[GATHER_LANES];
    struct gather_side *aside; /* smaller ones, kept until all are idle */
} gather_side;

/* For reads by cuda_ipc. */
typedef struct gather {
    gpu_stream *streams[GPU_MAX_DEVICES];
    device_probe probes[GPU_MAX_DEVICES];
    void *landing; /* of the probes, pinned; NULL: none yet */
    gather_side sides[GPU_MAX_DEVICES];
    void *entries[GPU_MAX_DEVICES]; /* pinned; NULL: none yet */
} gather;

/* Memory that grows. */
typedef struct room {
    void *memory; /* NULL: none yet */
    uint64_t bytes;
} room;

struct device_memory {
    gpu *g;
    pool_chunk chunks[POOL_CHUNKS];
    void *areas;  /* pinned, POOL_AREAS; NULL: not made yet */
    void *pinned; /* the client's staging */
    bool abandoned;
    gather gather;
    room patches, tables[GPU_MAX_DEVICES];
};

device_memory *device_memory_create(gpu *g)
{
    device_memory *m = calloc(1, sizeof *m);
    if (m)
        m->g = g;
    return m;
}

/* Its memory may be NULL. */
static void free_pinned(const device_memory *m, void *memory)
{
    if (memory)
        gpu_host_free(m->g, memory);
}

static void drop_lanes(const device_memory *m, int device, gather_side *s)
{
    for (int i = 0; i < GATHER_LANES; i++)
        gpu_stream_destroy(&s->lanes[i]);
    if (s->device_memory)
        gpu_free(m->g, device, s->device_memory);
    s->device_memory = NULL;
    s->device_chunk = 0;
}

/* Its streams end first: they write the host's side. */
static void drop_side(const device_memory *m, int device, gather_side *s)
{
    drop_lanes(m, device, s);
    free_pinned(m, s->host_memory);
    free_pinned(m, s->digests);
    s->host_memory = NULL;
    s->digests = NULL;
    s->host_chunk = 0;
}

static void drop_aside(const device_memory *m, int device, gather_side *s)
{
    while (s->aside) {
        gather_side *older = s->aside;
        s->aside = older->aside;
        drop_side(m, device, older);
        free(older);
    }
}

void device_memory_destroy(device_memory **memory)
{
    device_memory *m = *memory;
    *memory = NULL;
    if (!m)
        return;
    for (int i = 0; i < GPU_MAX_DEVICES; i++) {
        gpu_stream_destroy(&m->gather.streams[i]);
        free_pinned(m, m->gather.entries[i]);
        gpu_stream_destroy(&m->gather.probes[i].stream);
        drop_aside(m, i, &m->gather.sides[i]);
        drop_side(m, i, &m->gather.sides[i]);
    }
    free_pinned(m, m->gather.landing);
    free_pinned(m, m->patches.memory);
    for (int i = 0; i < GPU_MAX_DEVICES; i++)
        gpu_free(m->g, i, m->tables[i].memory);
    for (size_t i = 0; i < POOL_CHUNKS && !m->abandoned; i++)
        free_pinned(m, m->chunks[i].bytes);
    if (!m->abandoned)
        free_pinned(m, m->areas);
    free(m);
}

/* ------------------------------------------------------ landing on devices */

fanin_status device_memory_take(device_memory *m, pool_chunk **out, fanin_error *error)
{
    *out = NULL;
    size_t i = 0;
    while (i < POOL_CHUNKS && m->chunks[i].busy)
        i++;
    if (i == POOL_CHUNKS)
        return FANIN_OK;
    pool_chunk *c = &m->chunks[i];
    if (!c->bytes) {
        void *memory;
        fanin_status status =
            gpu_host_alloc(m->g, CHUNK_BYTES + CHUNK_ENTRIES * sizeof(copy_entry),
                           &memory, i == 0 ? error : NULL);
        if (status != FANIN_OK)
            return i == 0 ? status : FANIN_OK; /* those that there are must do */
        c->bytes = memory;
        c->entries = (copy_entry *)(c->bytes + CHUNK_BYTES);
    }
    c->busy = true;
    *out = c;
    return FANIN_OK;
}

fanin_status device_memory_area(device_memory *m, unsigned area, copy_entry **out,
                                fanin_error *error)
{
    fanin_status status = FANIN_OK;
    if (!m->areas)
        status = gpu_host_alloc(m->g, sizeof **out * POOL_AREAS * AREA_ENTRIES,
                                &m->areas, error);
    if (status == FANIN_OK)
        *out = (copy_entry *)m->areas + (size_t)area * AREA_ENTRIES;
    return status;
}

fanin_status device_memory_pin(device_memory *m, void *staging, size_t length,
                               fanin_error *error)
{
    if (m->pinned == staging)
        return FANIN_OK;
    fanin_status status = gpu_pin(m->g, staging, length, error);
    if (status == FANIN_OK)
        m->pinned = staging;
    return status;
}

bool device_memory_close(device_memory *m, bool drained)
{
    if (!m)
        return drained;
    drained = drained && !m->abandoned;
    if (m->pinned && drained)
        gpu_unpin(m->g, m->pinned);
    m->pinned = NULL;
    return drained;
}

void device_memory_abandon(device_memory *m)
{
    m->abandoned = true;
}

/* ----------------------------------------------------- patches for devices */

/* Some more than is asked for: the next step's are a little larger or smaller. */
static uint64_t with_some_more(uint64_t bytes)
{
    return bytes + bytes / 4;
}

fanin_status device_memory_patches(device_memory *m, uint64_t bytes, uint8_t **out,
                                   fanin_error *error)
{
    fanin_status status = FANIN_OK;
    room *r = &m->patches;
    if (r->bytes < bytes || !r->memory) {
        free_pinned(m, r->memory);
        *r = (room){.bytes = with_some_more(bytes)};
        status = gpu_host_alloc(m->g, r->bytes, &r->memory, error);
    }
    *out = r->memory;
    return status;
}

fanin_status device_memory_tables(device_memory *m, int device, uint64_t bytes,
                                  uint8_t **out, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    room *r = &m->tables[device];
    if (r->bytes < bytes || !r->memory) {
        gpu_free(m->g, device, r->memory);
        *r = (room){.bytes = with_some_more(bytes)};
        status = gpu_alloc(m->g, device, r->bytes, &r->memory, error);
    }
    *out = r->memory;
    return status;
}

/* -------------------------------------------------------- reads by cuda_ipc */

static fanin_status need_gather_stream(device_memory *m, int device,
                                       gpu_stream **stream, fanin_error *error)
{
    return *stream ? FANIN_OK : gpu_stream_create(m->g, device, stream, error);
}

static fanin_status check_staging_device(int device, fanin_error *error)
{
    if (device >= 0 && device < GPU_MAX_DEVICES)
        return FANIN_OK;
    return error_set(error, FANIN_ERR_ARGUMENT, NULL, "there is no CUDA device %d",
                     device);
}

fanin_status device_memory_stream(device_memory *m, int device, gpu_stream **out,
                                  fanin_error *error)
{
    fanin_status status = check_staging_device(device, error);
    if (status != FANIN_OK)
        return status;
    status = need_gather_stream(m, device, &m->gather.streams[device], error);
    *out = m->gather.streams[device];
    return status;
}

fanin_status device_memory_entries(device_memory *m, int device, copy_entry **out,
                                   fanin_error *error)
{
    void **entries = &m->gather.entries[device];
    fanin_status status =
        *entries ? FANIN_OK
                 : gpu_host_alloc(m->g, AREA_ENTRIES * sizeof **out, entries, error);
    *out = *entries;
    return status;
}

fanin_status device_memory_probe(device_memory *m, int device, device_probe **out,
                                 fanin_error *error)
{
    fanin_status status = check_staging_device(device, error);
    if (status != FANIN_OK)
        return status;
    device_probe *p = &m->gather.probes[device];
    status = need_gather_stream(m, device, &p->stream, error);
    if (status == FANIN_OK && !m->gather.landing)
        status = gpu_host_alloc(m->g, LANDING_BYTES, &m->gather.landing, error);
    p->landing = m->gather.landing;
    *out = p;
    return status;
}

void device_memory_end_probes(device_memory *m)
{
    for (int i = 0; m && i < GPU_MAX_DEVICES; i++) {
        device_probe *p = &m->gather.probes[i];
        if (p->reads && gpu_stream_wait(p->stream, 0, NULL) == FANIN_OK)
            ipc_mapping_release(&p->reads);
    }
}

/* Of a stream, which may be NULL. A device that has failed runs nothing any more; no other error
   says that work has ended. */
static bool has_ended(gpu_stream *stream, deadline at)
{
    fanin_status status = stream ? gpu_stream_wait(stream, at, NULL) : FANIN_OK;
    return status == FANIN_OK || status == FANIN_ERR_TRANSPORT;
}

/* With those that were kept aside. */
static bool side_has_ended(const gather_side *s, deadline at)
{
    bool ended = true;
    for (; s && ended; s = s->aside) {
        for (int i = 0; i < GATHER_LANES && ended; i++)
            ended = has_ended(s->lanes[i], at);
    }
    return ended;
}

/* What is too small goes. Freeing it would wait for the device, without a deadline, so it is kept
   aside while lanes still wait for a caller's stream that a pull gave up waiting for. */
static fanin_status make_way(device_memory *m, int device, uint64_t chunk, bool pinned,
                             fanin_error *error)
{
    gather_side *s = &m->gather.sides[device];
    bool small = (s->device_chunk > 0 && s->device_chunk < chunk) ||
                 (pinned && s->host_chunk > 0 && s->host_chunk < chunk);
    if (!small && !s->aside)
        return FANIN_OK;
    if (side_has_ended(s, 0)) {
        drop_aside(m, device, s);
        return FANIN_OK;
    }
    if (!small)
        return FANIN_OK;
    gather_side *older = malloc(sizeof *older);
    if (!older)
        return error_set_memory(error);
    *older = *s;
    *s = (gather_side){.aside = older};
    return FANIN_OK;
}

static fanin_status make_device_side(device_memory *m, int device, uint64_t chunk,
                                     fanin_error *error)
{
    gather_side *s = &m->gather.sides[device];
    if (s->device_chunk >= chunk)
        return FANIN_OK;
    drop_lanes(m, device, s);
    void *memory = NULL;
    fanin_status status =
        gpu_alloc(m->g, device, (size_t)(chunk * GATHER_LANES), &memory, error);
    if (status != FANIN_OK)
        return status;
    s->device_memory = memory;
    for (int i = 0; i < GATHER_LANES && status == FANIN_OK; i++)
        status = gpu_stream_create(m->g, device, &s->lanes[i], error);
    if (status == FANIN_OK)
        s->device_chunk = chunk;
    else
        drop_lanes(m, device, s);
    return status;
}

static fanin_status make_host_side(device_memory *m, int device, uint64_t chunk,
                                   fanin_error *error)
{
    gather_side *s = &m->gather.sides[device];
    if (s->host_chunk >= chunk)
        return FANIN_OK;
    free_pinned(m, s->host_memory);
    s->host_memory = NULL;
    s->host_chunk = 0;
    void *memory = NULL;
    fanin_status status =
        gpu_host_alloc(m->g, (size_t)(chunk * GATHER_LANES), &memory, error);
    if (status != FANIN_OK)
        return status;
    s->host_memory = memory;
    s->host_chunk = chunk;
    return FANIN_OK;
}

void device_memory_gather(device_memory *m, const gather_set *set)
{
    for (int i = 0; i < GPU_MAX_DEVICES; i++) {
        gather_side *s = &m->gather.sides[i];
        if (gather_set_has(set, i) || !side_has_ended(s, 0))
            continue;
        drop_aside(m, i, s);
        drop_side(m, i, s);
    }
}

fanin_status device_memory_lanes(device_memory *m, int device, uint64_t chunk,
                                 bool pinned, gather_lane lanes[GATHER_LANES],
                                 fanin_error *error)
{
    fanin_status status = check_staging_device(device, error);
    if (status != FANIN_OK)
        return status;
    gather_side *s = &m->gather.sides[device];
    status = make_way(m, device, chunk, pinned, error);
    if (status == FANIN_OK)
        status = make_device_side(m, device, chunk, error);
    if (status == FANIN_OK && pinned)
        status = make_host_side(m, device, chunk, error);
    if (status == FANIN_OK && !s->digests)
        status = gpu_host_alloc(m->g, sizeof(uint64_t) * GATHER_DIGESTS * GATHER_LANES,
                                &s->digests, error);
    if (status != FANIN_OK)
        return status;
    for (uint64_t i = 0; i < GATHER_LANES; i++)
        lanes[i] =
            (gather_lane){.stream = s->lanes[i],
                          .device = s->device_memory + i * s->device_chunk,
                          .host = pinned ? s->host_memory + i * s->host_chunk : NULL,
                          .digests = (uint64_t *)s->digests + i * GATHER_DIGESTS};
    return FANIN_OK;
}

void device_memory_leave(device_memory *m)
{
    m->gather = (gather){.landing = NULL};
    m->patches = (room){.memory = NULL};
    for (int i = 0; i < GPU_MAX_DEVICES; i++)
        m->tables[i] = (room){.memory = NULL};
}

bool device_memory_drain(device_memory *m, deadline at)
{
    const gather *r = &m->gather;
    bool ended = true;
    for (int i = 0; i < GPU_MAX_DEVICES && ended; i++)
        ended = has_ended(r->streams[i], at) && has_ended(r->probes[i].stream, at) &&
                side_has_ended(&r->sides[i], at);
    if (!ended)
        device_memory_leave(m);
    return ended;
}

/* ------------------------------------------------------------ of a client */

/* Nothing is under way; a stream may wait for one of the caller's that a pull gave up waiting for.
   */
#define DRAIN_MS 5000

/* It needs a context, tables and staging on a device that is somebody else's, for a link more. */
#define GATHER_BYTES ((uint64_t)256 << 20)

fanin_status devices_create(fanin_client *client, fanin_error *error)
{
    client->devices = calloc(1, sizeof *client->devices);
    if (!client->devices)
        return error_set_memory(error);
    client->devices->gather_bytes = GATHER_BYTES;
    return FANIN_OK;
}

gpu *client_gpu(fanin_client *client)
{
    devices *d = client->devices;
    fanin_error why = FANIN_ERROR_INIT;
    if (d->g || d->missing[0])
        return d->g;
    if (gpu_load(&client->log, &d->g, &why) != FANIN_OK) {
        d->g = NULL;
        snprintf(d->missing, sizeof d->missing, "%.255s",
                 why.message[0] ? why.message : "there is no CUDA");
    }
    return d->g;
}

ipc_map *devices_map(fanin_client *client)
{
    devices *d = client->devices;
    if (!d->map && client_gpu(client))
        d->map = ipc_map_create(d->g);
    return d->map;
}

device_memory *devices_memory(fanin_client *client)
{
    devices *d = client->devices;
    if (!d->memory && client_gpu(client))
        d->memory = device_memory_create(d->g);
    return d->memory;
}

fanin_status devices_tell_busy(const fanin_stream *after, const char *phase,
                               fanin_error *error)
{
    const error_place place = {
        .phase = phase,
        .remedy = "is the stream that the pull was given busy? Allow more time"};
    return error_set(
        error, FANIN_ERR_TIMEOUT, &place,
        "the work on the caller's stream of device %d has not ended in time",
        after->device);
}

void devices_disconnect(fanin_client *client)
{
    devices *d = client->devices;
    if (!d)
        return;
    if (d->memory && !device_memory_drain(d->memory, deadline_in_ms(DRAIN_MS))) {
        log_write(
            &client->log, FANIN_LOG_ERROR, "device-stuck",
            "a stream did not end in %d ms: memory that it may use is never freed",
            DRAIN_MS);
        if (d->map)
            ipc_map_abandon(d->map);
    }
    ipc_map_destroy(&d->map);
    device_memory_destroy(&d->memory);
}

void devices_free(fanin_client *client)
{
    free(client->devices);
    client->devices = NULL;
}
