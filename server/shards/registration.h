/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Registration of regions for one-sided reads, and who is told when it ends.
 *
 * Mappers are sessions that were given the means to map device memory of this process. To free
 * memory that another process maps is undefined in CUDA, so the trainer is told who may.
 *
 * Every function takes the registrar's lock.
 */
#ifndef REGISTRATION_H
#define REGISTRATION_H

#include "array.h"
#include "shards/region.h"

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

/** The session has closed. */
void mappers_drop(registrar *r, const void *session);
/** Logs (event "still-mapped") who still maps what was forgotten since the last call, and how
    much; @p what: "removed". Does not hold the lock while it logs. */
void mappers_tell(registrar *r, const char *publication, const char *what);
/** Everything that is mapped is about to go: as if it were forgotten. */
void mappers_lose_all(registrar *r);

#endif
