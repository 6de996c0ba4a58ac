/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Memory for landing on devices that a client keeps between pulls, since pinning and registering
 * it takes longer than a small pull: pinned chunks, pinned room for copy entries, staging on
 * devices. All made when first needed. One thread.
 */
#ifndef DEVICE_POOL_H
#define DEVICE_POOL_H

#include "gpu.h"
#include "ucx.h"

#define POOL_CHUNKS 16 /**< for all ranks together */
#define CHUNK_BYTES ((size_t)4 << 20)
#define CHUNK_ENTRIES 5461 /**< 256 KiB of them behind the bytes */
#define DEVICE_SLOTS 16    /**< of a device's staging */

/** Room for the entries of copies of which the bytes lie elsewhere. */
#define AREA_ENTRIES 1365 /**< 64 KiB */
#define POOL_AREAS (8 + GPU_MAX_DEVICES * DEVICE_SLOTS)

typedef struct device_pool device_pool;

typedef struct pool_chunk {
    uint8_t *bytes; /**< CHUNK_BYTES, pinned; NULL: not made yet */
    copy_entry *entries;
    bool busy;
} pool_chunk;

/** NULL: out of memory. */
device_pool *device_pool_create(gpu *g);
/** device_pool_close() has been called, and nothing uses it any more. NULL is fine. */
void device_pool_free(device_pool **pool);

/** A chunk for the taker alone, until busy is false again. *out NULL: all are busy. An error only
    if there is not one chunk at all. */
fanin_status device_pool_take(device_pool *pool, pool_chunk **out, fanin_error *error);
/** Pinned room for AREA_ENTRIES entries, @p area below POOL_AREAS. */
fanin_status device_pool_area(device_pool *pool, unsigned area, copy_entry **out,
                              fanin_error *error);

/** Pins the client's staging of host memory, once; it stays so until device_pool_close(). */
fanin_status device_pool_pin(device_pool *pool, void *staging, size_t length,
                             fanin_error *error);
/**
 * Staging of DEVICE_SLOTS slots of @p slot_bytes on @p device, registered with @p client for
 * gets, once. FANIN_ERR_UNSUPPORTED and others: there is none, now and later; use host memory.
 */
fanin_status device_pool_staging(device_pool *pool, ucx_client *client, int device,
                                 size_t slot_bytes, uint8_t **memory_out,
                                 ucx_local **local_out, fanin_error *error);
/** Before the ucx_client goes: its registrations go. NULL is fine. */
void device_pool_unregister(device_pool *pool);
/** After that: unpins the staging and frees the devices'. @p drained false: nothing is freed,
    since gets may still land there. False: nothing was freed. NULL is fine. */
bool device_pool_close(device_pool *pool, bool drained);
/** A device did not finish: whatever it may be reading is never freed. */
void device_pool_abandon(device_pool *pool);

#endif
