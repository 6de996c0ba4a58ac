/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * What a destination's memory holds: of each rank which copy, by the rank's incarnation, its
 * catalog version and the copy's generation. A step's number is no proof: a trainer that was
 * started again has the same steps with other bytes.
 */
#ifndef BASE_H
#define BASE_H

#include "path/path.h"
#include <jansson.h>
#include <pthread.h>

/** Which copy the bytes of one source are of. */
typedef struct base_rank {
    uint8_t incarnation[16];
    uint64_t version, generation; /**< generation 0: nothing is of this source */
} base_rank;

/** One proven content. */
typedef struct base_step {
    digest of; /**< base_name() */
    uint64_t step;
    size_t n;
    base_rank ranks[]; /**< one a source */
} base_step;

/** A prepared destination's; a session into it may outlast that. */
typedef struct delta_base {
    pthread_mutex_t lock; /**< held for the members below */
    base_step *held;      /**< NULL: it is not known what the memory holds */
    uint64_t drops;       /**< that there were */
    unsigned users, writers;
} delta_base;

/** With one user; NULL: no memory. */
delta_base *delta_base_create(void);
/** One user more; NULL stays NULL. Thread: any. */
delta_base *delta_base_retain(delta_base *b);
/** One less: the last one frees. NULL is fine. Thread: any. */
void delta_base_release(delta_base *b);
/** A pull or a session may write the memory from now on, until delta_base_leave(): what others
    bring meanwhile does not count. Thread: any. */
void delta_base_enter(delta_base *b);
void delta_base_leave(delta_base *b);
/** Something begins to write the memory: returns the number of drops up to now. Thread: any. */
uint64_t delta_base_drop(delta_base *b);
/** The memory holds @p step, which is taken, unless something has begun to write it after the drop
    that returned @p drops, or another one than the caller has written it meanwhile, or still may.
    Thread: any. */
void delta_base_set(delta_base *b, base_step *step, uint64_t drops);
/** A copy of what it holds, for free(); *@p drops: up to now. NULL: not known, or no memory. */
base_step *delta_base_copy(delta_base *b, uint64_t *drops);

/** What is read now, as a base; NULL: no memory, or a rank that is read did not say which copy its
    lease is of. @p name: base_name(); @p leases and @p announced: one a peer. */
base_step *base_step_of(const fanin_client *client, const digest *name,
                        const path_plan *plan, const announcement *announced,
                        const reader_lease *leases);
/** Names the publication and which byte of which box of which source lands where: replicas may
    differ, and another plan may read a box from another one. Zeroes, no memory: like no other. */
digest base_name(const publication *p, const plan *plan);

/* A directory keeps its base in fanin.json, for another process (base_json.c). */

/** The copies of @p step, and the plan's @p seed: with another one replicas are others. NULL: no
    memory. */
json_t *base_json(const base_step *step, uint64_t seed);
/** Of the step @p step, to be freed; *@p seed: the plan's. NULL: base_json() did not make it, or no
    memory. */
base_step *base_of_json(const json_t *json, uint64_t step, uint64_t *seed);

#endif
