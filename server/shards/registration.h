/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Mappers: sessions that were given the means to map device memory of this process. To free
 * memory that another process maps is undefined in CUDA, so the trainer is told who may.
 */
#ifndef REGISTRATION_H
#define REGISTRATION_H

#include "shards/region.h"

/** One session and the regions of one publication, as it fetched them last. */
typedef struct mapper {
    const void *session;
    char peer[64], publication[PUBLICATION_NAME_SIZE];
    region_set mapped; /**< those with a key, each with a use */
    uint64_t lost; /**< bytes of allocations that were forgotten and not told of yet */
    struct mapper *next;
} mapper;

/** Lock held. @p set's regions with a key replace what the session had of the publication.
    FANIN_ERR_MEMORY. */
fanin_status mapper_note(registrar *r, const key_reader *who, const region_set *set,
                         fanin_error *error);
/** Lock held. The region is being forgotten. */
void mappers_lose(registrar *r, const region *one);
/** The session has closed. Takes the lock. */
void mappers_drop(registrar *r, const void *session);
/** Logs (event "still-mapped") who still maps what was forgotten since the last call, and how
    much; @p what: "removed". Takes the lock, not while it logs. */
void mappers_tell(registrar *r, const logger *log, const char *publication,
                  const char *what);
/** Everything that is mapped is about to go: as if it were forgotten. Takes the lock. */
void mappers_lose_all(registrar *r);

#endif
