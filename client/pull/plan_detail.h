/* SPDX-License-Identifier: Apache-2.0 */
/** @file What the paths of a plan's sources read it by: made by several threads, kept with the
    plan. */
#ifndef PLAN_DETAIL_H
#define PLAN_DETAIL_H

#include "pull/plan_cache.h"

/** By the paths that were taken last. */
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

#endif
