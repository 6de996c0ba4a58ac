/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A pull by patches (patch.h): what changed since the step that the destination holds, read into
 * memory of its own and applied when all ranks have said that it counts. A patch is two boxes of
 * its rank, so a reader over data connections reads it as it reads any box: here are the plans for
 * that, first of all directories, then of the changes in the segments that are needed.
 */
#ifndef DELTA_H
#define DELTA_H

#include "patch.h"
#include "path/path.h"
#include <jansson.h>
#include <pthread.h>

/*
 * What a destination's memory holds: of each rank which copy, by the rank's incarnation, its
 * catalog version and the copy's generation. A step's number is no proof: a trainer that was
 * started again has the same steps with other bytes (base.c).
 */

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

/* A directory keeps its base in fanin.json, for another process. */

/** The copies of @p step, and the plan's @p seed: with another one replicas are others. NULL: no
    memory. */
json_t *base_json(const base_step *step, uint64_t seed);
/** Of the step @p step, to be freed; *@p seed: the plan's. NULL: base_json() did not make it, or no
    memory. */
base_step *base_of_json(const json_t *json, uint64_t step, uint64_t *seed);

/* What is read of patches (patches.c), and how it is applied (apply.c). */

/** The patches of one source that lead from the base to the announced step. */
typedef struct delta_source {
    const patch_offers *offers; /**< its rank's */
    uint32_t chain; /**< patches 0 .. chain - 1, newest first; 0: nothing has changed */
    uint64_t segments;
    uint64_t *first; /**< of each patch: segments + 1 numbers, patch_directory_read() */
    /** of each patch and segment: where its changes are in the staging, DELTA_NONE: they are not
        needed, or there are none */
    uint64_t *at;
    bool *needed;      /**< segments that the plan's pieces touch */
    size_t piece_room; /**< of what is read now */
} delta_source;

#define DELTA_NONE UINT64_MAX

typedef struct delta {
    fanin_client *client;
    const path_plan *whole;     /**< that the base holds, and whose bytes change */
    delta_source *sources;      /**< one each of the plan */
    const memory_range *ranges; /**< of the destination */
    size_t n_ranges;
    device_set devices; /**< that it is on */
    uint64_t base_step;
    uint64_t most; /**< bytes that patches may have: half of the whole */
    /** what is to be read now; of the whole's sources */
    path_plan read;
    const path_reader *reader; /**< that reads it */
    void **details;            /**< what it reads each source by: a read_list */
    /** where that lands: `to` of its pieces counts from here. With devices it is the client's, and
        pinned */
    uint8_t *staging;
    uint64_t bytes; /**< of all that was to be read up to now */
} delta;

/** What a pull has agreed upon. */
typedef struct delta_scene {
    fanin_client *client;
    const publication *publication;
    const path_plan *plan;         /**< its ranks have their paths */
    digest name;                   /**< base_name() of both */
    const announcement *announced; /**< one a peer */
    const memory_range *ranges;    /**< of the destination, kept by the caller */
    size_t n_ranges;
} delta_scene;

/** Whether patches lead from @p base (NULL: none) to what was announced: *@p out, whose first plan
    is of the directories. Else *@p because says why not, and *@p out is NULL. FANIN_ERR_MEMORY,
    FANIN_ERR_PROTOCOL (of a rank, which it names). */
fanin_status delta_choose(const delta_scene *s, const base_step *base, delta **out,
                          const char **because, fanin_error *error);
void delta_free(delta **d);
/** The directories have landed: the next plan is of the changes. *@p because: they are too many,
    and nothing is to be read. Errors likewise. */
fanin_status delta_plan_changes(delta *d, const char **because, fanin_error *error);
/** The changes have landed: whether part @p part of @p parts of them can be applied. Several
    threads may. FANIN_ERR_PROTOCOL likewise. */
fanin_status delta_check(const delta *d, size_t part, size_t parts, fanin_error *error);

/** Applies the source's patches, oldest first, to what its pieces [@p from, @p to) have filled of
    host memory; their places are added to @p base. Pieces of others are not touched. */
void delta_apply(const delta *d, size_t source, uint64_t from, uint64_t to,
                 uint8_t *base);
/** Waits for the work that is on @p after now, if the destination is on devices; nothing is written
    before. FANIN_ERR_TIMEOUT, FANIN_ERR_CANCELLED, FANIN_ERR_TRANSPORT. */
fanin_status delta_await_stream(const delta *d, const fanin_stream *after, deadline at,
                                fanin_error *error);
/** Applies all patches to what pieces have filled of devices' memory, and waits for that.
    FANIN_ERR_MEMORY, FANIN_ERR_TRANSPORT; FANIN_ERR_TIMEOUT: kernels may still write the
    destination, also later. */
fanin_status delta_apply_devices(const delta *d, const uint8_t *base,
                                 fanin_error *error);

/** The device that holds @p at of the destination, -1: host memory. */
static inline int delta_device_of(const delta *d, const void *at)
{
    const memory_range *range =
        d->devices.n > 0 ? memory_range_find(d->ranges, d->n_ranges, at) : NULL;
    return range ? range->device : -1;
}

/** Where the piece's first byte is in its rank's copy. */
static inline uint64_t delta_origin(const box_table *boxes, const piece *p)
{
    box_place place;
    box_table_get(boxes, p->box, NULL, NULL, &place);
    return place.offset + p->offset;
}

#endif
