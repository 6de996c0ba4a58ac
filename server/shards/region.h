/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Regions: stretches of memory in which many shards lie, each registered once with UCX for rdma, or
 * exported once by CUDA, when the first reader asks for it (registration.h).
 *
 * Shards in host memory merge into one region when every page between them also holds bytes of
 * a published shard, so that reads across the gaps between heap blocks never meet an unmapped
 * page. Those in device memory merge if they lie in one allocation, whatever is between them:
 * an allocation is mapped as a whole.
 */
#ifndef REGION_H
#define REGION_H

#include "gpu.h"
#include "ipc_key.h"
#include "log.h"
#include "shards/shard.h"
#include "ucx.h"

#include <pthread.h>
#include <stdatomic.h>

/** A region, shared by the catalogs that contain it. Guarded by the registrar's lock. */
typedef struct region {
    uint64_t base, length; /* these four do not change */
    fanin_memory memory;
    gpu_range in;   /**< the allocation that holds it, if it is device memory */
    unsigned users; /**< catalogs and mappers */
    bool gone; /**< the memory is the trainer's again: never register it any more */
    bool away; /**< the same for now */
    bool ucx_refused; /**< device memory that RDMA cannot read here */
    bool exported;    /**< gpu_export() was asked */
    bool has_key;     /**< ... and gave `key` */
    uint8_t key[IPC_KEY_SIZE];
    ucx_region *registered; /**< NULL: not registered (any more) */
} region;

/** The first n_sorted are ascending by base and disjoint; others were appended. The array does
    not change once the catalog is published. */
typedef struct region_set {
    region **regions;
    uint32_t count, n_sorted;
    size_t capacity;
} region_set;

/** Who registers; one a server. Its lock may be held for as long as pinning memory takes,
    so no thread may wait for it while it holds the server's lock. */
typedef struct registrar {
    pthread_mutex_t lock;
    long page_size;
    const logger *log;
    /** made when the first admitted client asks for rdma: who has none opens no RDMA device */
    ucx_server *ucx;
    struct mapper *mappers; /**< who may map device memory of this process */
    atomic_uint n_mappers;  /**< sessions among them */
} registrar;

/**
 * Regions of all boxes of @p shards; regions that @p before (may be NULL) has as well are
 * shared with it. @p region_of_box gets one number a box, in the set's order. *out is to be
 * freed (region_set_free()) also on failure. FANIN_ERR_MEMORY. Takes the registrar's lock.
 */
fanin_status region_set_build(registrar *r, const shard_set *shards,
                              const region_set *before, region_set *out,
                              uint32_t *region_of_box, fanin_error *error);

/**
 * Appends one more region, behind those of the boxes: a copy of their bytes elsewhere. @p in
 * describes the allocation if it is device memory, NULL: host memory. An equal one of @p before
 * (may be NULL) is shared. FANIN_ERR_MEMORY. Takes the registrar's lock.
 */
fanin_status region_set_append(registrar *r, region_set *set, const region_set *before,
                               uint64_t base, uint64_t length, const gpu_range *in,
                               fanin_error *error);

#endif
