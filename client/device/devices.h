/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * What a client keeps of CUDA between pulls, since making it takes longer than a small pull. For
 * landing on devices (device_sink.h): pinned chunks, pinned room for copy entries. For reads by
 * cuda_ipc: two streams a device, and for host destinations a few chunks of device memory on each
 * device that gathers, with pinned host memory behind them where the copy engine cannot write the
 * destination itself. All made when first needed, all bounded. One thread.
 */
#ifndef DEVICES_H
#define DEVICES_H

#include "device/ipc_map.h"
#include "digest.h"
#include "gpu.h"
#include "net/client_state.h"

/** How long is waited for a device to end what it was given, before that is left to it for good. A
    copy of 4 MiB takes a millisecond, on a shared and busy device some more. */
#define DEVICE_DRAIN_MS 30000

typedef struct device_memory device_memory;

/** NULL: out of memory. */
device_memory *device_memory_create(gpu *g);
/** device_memory_close() has been called, and no sink uses it any more. Waits for what runs on
    its streams. NULL is fine. */
void device_memory_destroy(device_memory **memory);

/* ------------------------------------------------------ landing on devices */

#define POOL_CHUNKS 16 /**< for all ranks together */
#define CHUNK_BYTES ((size_t)4 << 20)
#define CHUNK_ENTRIES 5461 /**< 256 KiB of them behind the bytes */

/** Room for the entries of copies of which the bytes lie elsewhere. */
#define AREA_ENTRIES 1365 /**< 64 KiB */
#define POOL_AREAS 8

typedef struct pool_chunk {
    uint8_t *bytes; /**< CHUNK_BYTES, pinned; NULL: not made yet */
    copy_entry *entries;
    bool busy;
} pool_chunk;

/** A chunk for the taker alone, until busy is false again. *out NULL: all are busy. An error only
    if there is not one chunk at all. */
fanin_status device_memory_take(device_memory *m, pool_chunk **out, fanin_error *error);
/** Pinned room for AREA_ENTRIES entries, @p area below POOL_AREAS. */
fanin_status device_memory_area(device_memory *m, unsigned area, copy_entry **out,
                                fanin_error *error);
/** Pins the client's staging of host memory, once; it stays so until device_memory_close(). */
fanin_status device_memory_pin(device_memory *m, void *staging, size_t length,
                               fanin_error *error);
/** Unpins it. @p drained false: it stays pinned, since gets may still land there. False: so it
    does. NULL is fine. */
bool device_memory_close(device_memory *m, bool drained);
/** A device did not finish a landing: whatever it may be reading is never freed. */
void device_memory_abandon(device_memory *m);

/* ----------------------------------------------------- patches for devices */

/** Pinned room for patches of @p bytes, which overwrite what was there; stays the keeper's. */
fanin_status device_memory_patches(device_memory *m, uint64_t bytes, uint8_t **out,
                                   fanin_error *error);
/** Room on @p device for tables of @p bytes that are applied by, likewise. */
fanin_status device_memory_tables(device_memory *m, int device, uint64_t bytes,
                                  uint8_t **out, fanin_error *error);

/* -------------------------------------------------------- reads by cuda_ipc */

#define GATHER_DEVICES 4 /**< that gather for host memory at most */
#define GATHER_LANES 3   /**< of each */
/** The copy engine needs 0.6 ms for so many bytes: starting it costs nothing beside. */
#define GATHER_CHUNK_MAX ((uint64_t)32 << 20)

/** Words of the digests of a chunk's pieces: two each. */
#define GATHER_DIGESTS (2 * (GATHER_CHUNK_MAX / DIGEST_PIECE))

#define LANDING_BYTES 8

/** The devices that gather for host memory: over each one's own link to the host. */
typedef struct gather_set {
    int device[GATHER_DEVICES];
    size_t n; /**< 0: none */
} gather_set;

static inline bool gather_set_has(const gather_set *s, int device)
{
    bool has = false;
    for (size_t i = 0; i < s->n && !has; i++)
        has = s->device[i] == device;
    return has;
}

static inline bool gather_set_equal(const gather_set *a, const gather_set *b)
{
    bool same = a->n == b->n;
    for (size_t i = 0; i < a->n && same; i++)
        same = a->device[i] == b->device[i];
    return same;
}

/** One chunk's way: gathered into device memory, copied to the host, on a stream of its own so
    that one chunk is gathered while another one is copied. */
typedef struct gather_lane {
    gpu_stream *stream;
    uint8_t *device;   /**< chunk bytes */
    uint8_t *host;     /**< chunk bytes, pinned; NULL unless asked for */
    uint64_t *digests; /**< of the chunk's pieces, GATHER_DIGESTS words, pinned */
} gather_lane;

/** The stream on @p device; stays the keeper's. */
fanin_status device_memory_stream(device_memory *m, int device, gpu_stream **out,
                                  fanin_error *error);

/** Pinned room for AREA_ENTRIES entries that its kernels read; stays the keeper's. */
fanin_status device_memory_entries(device_memory *m, int device, copy_entry **out,
                                   fanin_error *error);

/** How it is tried whether a device reads a mapping. */
typedef struct device_probe {
    gpu_stream *stream; /**< no pull waits for a caller's stream on it */
    void *landing; /**< LANDING_BYTES, pinned: others would block without a deadline */
    ipc_mapping *reads; /**< held, for a copy may be under way; NULL: none is */
} device_probe;

/** The one of @p device; stays the keeper's. */
fanin_status device_memory_probe(device_memory *m, int device, device_probe **out,
                                 fanin_error *error);
/** Lets go of what was read by those that have ended. NULL is fine. */
void device_memory_end_probes(device_memory *m);
/** Nothing may be under way on lanes but waits for a caller's stream. Those of devices that are not
    in
    @p set go, once they are idle. */
void device_memory_gather(device_memory *m, const gather_set *set);
/** Lanes on @p device for chunks of @p chunk bytes; nothing may be under way on those of the device
    that were given out before, but waits for a caller's stream: they are not waited for.
    @p pinned: with host memory. The keeper's. */
fanin_status device_memory_lanes(device_memory *m, int device, uint64_t chunk,
                                 bool pinned, gather_lane lanes[GATHER_LANES],
                                 fanin_error *error);
/** A device did not end a read: streams, lanes, probes, patches and tables are never freed, nor
    used again. */
void device_memory_leave(device_memory *m);
/** Waits for what is on the streams. False: it has not ended before @p at, and
    device_memory_leave() was called. */
bool device_memory_drain(device_memory *m, deadline at);

/* What a client has of CUDA; each part is made by the first pull that needs it. One thread. */

typedef struct devices {
    gpu *g;                /**< NULL: not loaded */
    char missing[256];     /**< why there is none; "": not tried yet */
    ipc_map *map;          /**< other processes' device memory; NULL: none yet */
    device_memory *memory; /**< own memory and streams; NULL: not needed yet */
    uint64_t gather_bytes; /**< for each of which one device more gathers */
} devices;

/** Fills client->devices; nothing is loaded yet. FANIN_ERR_MEMORY. */
fanin_status devices_create(fanin_client *client, fanin_error *error);
/** CUDA, loaded if need be; NULL: there is none, `missing` says why. */
gpu *client_gpu(fanin_client *client);
/** client->devices->map, made if need be. NULL: there is no CUDA, or no memory. */
ipc_map *devices_map(fanin_client *client);
/** FANIN_ERR_TIMEOUT of a call that had to wait for what was on @p after. */
fanin_status devices_tell_busy(const fanin_stream *after, const char *phase,
                               fanin_error *error);
/** devices->memory, made if need be. NULL: there is no CUDA, or no memory. */
device_memory *devices_memory(fanin_client *client);
/** Unmaps all memory of other processes, frees the own and ends the own streams, for which it waits
    5 s at most: what one may use is never freed then. After device_memory_close(). */
void devices_disconnect(fanin_client *client);
/** After that. */
void devices_free(fanin_client *client);

#endif
