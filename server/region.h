/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Regions: stretches of memory in which many shards lie, each registered once with UCX
 * when the first reader asks for it.
 *
 * Shards merge into one region when every page between them also holds bytes of a
 * published shard, so that reads across the gaps between heap blocks never meet an unmapped
 * page.
 */
#ifndef REGION_H
#define REGION_H

#include "buffer.h"
#include "catalog.h"
#include "shard.h"
#include "ucx.h"

#include <pthread.h>

/** UCX ends: one that never leaves the host, and one with RDMA devices. Each is made when the
    first admitted client asks for it, so that a server whose clients only use cma opens no
    RDMA device. */
typedef enum domain { DOMAIN_HOST, DOMAIN_RDMA, DOMAINS } domain;

/** A region, shared by the catalogs that contain it. Guarded by the registrar's lock. */
typedef struct region {
    uint64_t base, length;
    unsigned users; /**< catalogs */
    bool gone; /**< the memory is the trainer's again: never register it any more */
    ucx_region *registered[DOMAINS]; /**< NULL: not registered (any more) */
} region;

/** Ascending by base, disjoint. The array does not change after region_set_build(). */
typedef struct region_set {
    region **regions;
    uint32_t count;
} region_set;

/** Who registers; one a server. Its lock may be held for as long as pinning memory takes,
    so no thread may wait for it while it holds the server's lock. */
typedef struct registrar {
    pthread_mutex_t lock;
    long page_size;
    ucx_server *ucx[DOMAINS]; /**< NULL until a client opens such a path */
} registrar;

/**
 * Regions of all boxes of @p shards; regions that @p before (may be NULL) has as well are
 * shared with it. @p region_of_box gets one number a box, in the set's order.
 * FANIN_ERR_MEMORY. Takes the registrar's lock.
 */
fanin_status region_set_build(registrar *r, const shard_set *shards,
                              const region_set *before, region_set *out,
                              uint32_t *region_of_box, fanin_error *error);

/** Gives the regions back; those that no catalog uses any more are deregistered. */
void region_set_free(registrar *r, region_set *set);

/** Deregisters, for good, the regions in which bytes of @p s lie; NULL: all regions. */
void region_set_forget(registrar *r, region_set *set, const shard *s);

/** Appends the region table without remote keys. All bases are 0: it is for readers that
    have no use for this process's addresses. FANIN_ERR_MEMORY. */
fanin_status region_set_encode(const region_set *set, buffer *out, fanin_error *error);

/**
 * Appends the region table with addresses and remote keys, registering what is not yet
 * registered: blocks for as long as that takes. FANIN_ERR_STALE if memory has gone
 * meanwhile, FANIN_ERR_MEMORY, or an error of ucx_region_create().
 */
fanin_status region_set_encode_keys(registrar *r, region_set *set, domain in,
                                    buffer *out, fanin_error *error);

#endif
