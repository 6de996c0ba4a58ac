/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Regions: stretches of memory in which many shards lie, each registered once with UCX for rdma, or
 * exported once by CUDA, when the first reader asks for it; and who is told when that ends.
 *
 * Shards in host memory merge into one region when every page between them also holds bytes of
 * a published shard, so that reads across the gaps between heap blocks never meet an unmapped
 * page. Those in device memory merge if they lie in one allocation, whatever is between them:
 * an allocation is mapped as a whole.
 */
#ifndef REGISTRATION_H
#define REGISTRATION_H

#include "array.h"
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

/** Gives the regions back; those that nobody uses any more are deregistered. */
void region_set_free(registrar *r, region_set *set);

/** Deregisters, for good, the regions in which bytes of @p s lie; NULL: all regions. Who maps
    them is noted for mappers_tell(). */
void region_set_forget(registrar *r, region_set *set, const shard *s);

/**
 * The memory is the trainer's until region_set_resume(). Regions for which keys were given out are
 * forgotten for good, as the same addresses may be other memory then; true: there were such, and a
 * new catalog is due.
 */
bool region_set_pause(registrar *r, region_set *set);
void region_set_resume(registrar *r, region_set *set);

/** Appends the region table without remote keys. All bases are 0: it is for readers that
    have no use for this process's addresses. FANIN_ERR_MEMORY. Takes no lock. */
fanin_status region_set_encode(const region_set *set, buffer *out, fanin_error *error);

/** Who asks for remote keys. */
typedef struct key_reader {
    const void *session; /**< its identity */
    const char *peer, *publication;
} key_reader;

/** What a path's remote keys are: bases alone, UCX's, CUDA's. */
typedef struct key_kind key_kind;
extern const key_kind base_keys, ucx_keys, ipc_keys;

/**
 * Appends the region table with remote keys of @p kind, registering or exporting what is not yet:
 * blocks for as long as that takes. Regions that have no key of that kind go without. With ipc_keys
 * @p to is a mapper from now on.
 * FANIN_ERR_STALE if memory has gone meanwhile, FANIN_ERR_MEMORY, or an error of
 * ucx_region_create().
 */
fanin_status region_set_encode_keys(registrar *r, region_set *set, const key_kind *kind,
                                    const key_reader *to, buffer *out,
                                    fanin_error *error);

/*
 * Mappers are sessions that were given the means to map device memory of this process. To free
 * memory that another process maps is undefined in CUDA, so the trainer is told who may. Each
 * function takes the registrar's lock.
 */

/** The session has closed. */
void mappers_drop(registrar *r, const void *session);
/** Logs (event "still-mapped") who still maps what was forgotten since the last call, and how
    much; @p what: "removed". Does not hold the lock while it logs. */
void mappers_tell(registrar *r, const char *publication, const char *what);
/** Everything that is mapped is about to go: as if it were forgotten. */
void mappers_lose_all(registrar *r);

#endif
