/* SPDX-License-Identifier: Apache-2.0 */
/** @file The plan of a pull, kept for as long as nothing that it was made from changes. */
#ifndef PLAN_CACHE_H
#define PLAN_CACHE_H

#include "digest.h"
#include "pull/choose_path.h"
#include "pull/destination.h"

/** What one read brings: all of a plan, or what fills some of the destination's tensors. */
typedef struct plan_part {
    size_t first, count;          /**< tensors; of the whole: 0, 0 */
    path_plan plan;               /**< of a part: sources are the whole's */
    void **details[PATH_READERS]; /**< what each path reads each source by */
    void *shared[PATH_READERS];   /**< and all of them */
    memory_range *
        ranges; /**< the destination's that it reaches, if they follow from its layout */
    size_t n_ranges;
} plan_part;

/** A plan and what it was made from. */
typedef struct plan_cache {
    bool valid;
    bool
        proven; /**< leases were taken for it: tables, paths and details were at hand */
    digest made_from; /**< of tables, participants and destination layout */
    digest layout;    /**< the destination's */
    uint64_t used;    /**< greater than that of all that were used before; 0: never */
    plan_part whole;
    plan_index index;  /**< no places: not made yet */
    plan_part **parts; /**< by (first, count) */
    size_t n_parts, part_capacity;
    uint64_t part_pieces; /**< of all parts */
} plan_cache;

/**
 * The publication's for a destination: of a directory there is one, of memory that whose layout is
 * the destination's, if it is among those of the last three layouts; a plan that brings more than 4
 * GiB stays only as long as no other is wanted. Valid until the next call. NULL: out of memory.
 */
plan_cache *plan_cache_of(publication *p, const destination *d);
/** Drops the publication's plans. */
void plan_cache_drop(publication *p);
/** The same; none is valid any more. */
void plan_cache_free(publication *p);

/** Makes the plan for the ranks with use[i] and the destination, unless it is there. Errors of
    plan_build(). */
fanin_status plan_cache_make(plan_cache *cache, fanin_client *client,
                             const publication *p, const bool *use,
                             const destination *d, deadline at, fanin_error *error);
/** Whether plan_cache_make() has nothing to do. */
bool plan_cache_fits(const plan_cache *cache, const fanin_client *client,
                     const publication *p, const bool *use, const destination *d);
/**
 * What fills the tensors [first, first + count) of the destination's @p total, whose ranges last:
 * kept
 * with the plan, or made, which takes as long as what it holds (the first one: as all). Valid until
 * the next call. FANIN_ERR_MEMORY, FANIN_ERR_LIMIT, FANIN_ERR_TIMEOUT (stopped).
 */
fanin_status plan_cache_part(plan_cache *cache, size_t first, size_t count,
                             size_t total, work_stop *stop, plan_part **out,
                             fanin_error *error);
/** The destination's ranges, from the cache if they last. The cache's or the destination's. */
fanin_status plan_cache_ranges(plan_cache *cache, const destination *d,
                               const memory_range **ranges, size_t *n,
                               fanin_error *error);

#endif
