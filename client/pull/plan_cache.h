/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The plan of a pull and what the paths read by, kept for as long as nothing that it was made from
 * changes; and the publications of which a client keeps plans, catalogs and paths between calls:
 * those that were used last. A worker may live for thousands of runs.
 */
#ifndef PLAN_CACHE_H
#define PLAN_CACHE_H

#include "digest.h"
#include "pull/choose_path.h"
#include "pull/destination.h"

/** What one read brings: all of a plan, or what fills some of the destination's tensors. */
typedef struct plan_part {
    group_run run;                /**< tensors, of one that is kept */
    path_plan plan;               /**< of a part: sources are the whole's */
    void **details[PATH_READERS]; /**< what each path reads each source by */
    void *shared[PATH_READERS];   /**< and all of them */
    memory_range *ranges; /**< the destination's that it reaches, if they last */
    size_t n_ranges;
} plan_part;

/** A plan and what it was made from. */
typedef struct plan_cache {
    bool valid;
    bool proven;      /**< leases were taken for it: all is at hand */
    digest made_from; /**< of tables, participants and destination layout */
    digest layout;    /**< the destination's */
    digest base;      /**< base_name() of the whole; 0: not asked for yet */
    uint64_t used;    /**< greater than that of all that were used before; 0: never */
    plan_part whole;
    plan_index index;  /**< no places: not made yet */
    plan_part **parts; /**< that are kept, by their runs */
    size_t n_parts, part_capacity;
    uint64_t part_pieces; /**< of all those */
    plan_part *passing;   /**< the last one that is not kept */
} plan_cache;

/**
 * The publication's for a destination: of a directory there is one, of memory that whose layout is
 * the destination's, if it is among those of the last three layouts; a plan that brings more than 4
 * GiB stays only as long as no other is wanted. Valid until the next call. NULL: out of memory.
 */
plan_cache *plan_cache_of(publication *p, const destination *d);
/** Drops the publication's plans. */
void plan_cache_drop(publication *p);

/** Makes the plan for the ranks with use[i] and the destination, unless it is there. Errors of
    plan_build(). */
fanin_status plan_cache_make(plan_cache *cache, fanin_client *client,
                             const publication *p, const bool *use,
                             const destination *d, deadline at, fanin_error *error);
/** Whether plan_cache_make() has nothing to do. */
bool plan_cache_fits(const plan_cache *cache, const fanin_client *client,
                     const publication *p, const bool *use, const destination *d);
/**
 * What fills the tensors of @p runs, as in plan_slice_build(), of the destination's @p total, whose
 * ranges last: at hand, or made, which takes as long as what it holds (the first one: as all).
 * @p keep, of one run: it stays with the plan. Valid until the next call. FANIN_ERR_MEMORY,
 * FANIN_ERR_LIMIT, FANIN_ERR_TIMEOUT (stopped).
 */
fanin_status plan_cache_part(plan_cache *cache, const group_run *runs, size_t n_runs,
                             bool keep, size_t total, work_stop *stop, plan_part **out,
                             fanin_error *error);
/** The destination's ranges, from the cache if they last. The cache's or the destination's. */
fanin_status plan_cache_ranges(plan_cache *cache, const destination *d,
                               const memory_range **ranges, size_t *n,
                               fanin_error *error);

/** The readers of the sources, by the paths that were taken last. */
void plan_detail_readers(const path_plan *plan, const publication *p);
/** Makes what the sources' paths read the part by, as far as it is not there. FANIN_ERR_TIMEOUT,
    FANIN_ERR_CANCELLED, FANIN_ERR_MEMORY, and errors of the paths. */
fanin_status plan_detail_make(plan_part *part, fanin_client *client, publication *p,
                              path_goal *goal, deadline at, fanin_error *error);
/**
 * The same of the sources of peers with mask[peer], which @p reader will probably read: while it
 * finds out. What else comes of it than FANIN_OK says nothing about the pull, unless it is
 * FANIN_ERR_CANCELLED.
 */
fanin_status plan_detail_ahead(plan_part *part, fanin_client *client, publication *p,
                               path_goal *goal, const path_reader *reader,
                               const bool *mask, deadline at, fanin_error *error);

/** When a call begins, while no other runs and no session is open: what is kept of @p name, which
    may be nothing yet. One that was used longer ago than many others goes. NULL: out of memory. */
publication *kept_of(fanin_client *client, const char *name);
/** Keeps nothing, at the end: before the paths' ends. */
void kept_free(fanin_client *client);

#endif
