/* SPDX-License-Identifier: Apache-2.0 */
/** @file The plan of a pull, taken from the cache when nothing it was made from changed. */
#ifndef PULL_PLAN_H
#define PULL_PLAN_H

#include "pull/choose_path.h"
#include "pull/pull.h"

/** cache->plan for the ranks with use[i] and the destination. Errors of plan_build(); a hole
    whose holder is a rank that is down becomes that rank's error. */
fanin_status pull_plan(fanin_client *client, publication *p, const bool *use,
                       destination *d, deadline at, fanin_error *error);

/** Why the connection is not there, and that nobody else holds @p key ("": not known). Returns its status. */
fanin_status pull_blame(const connection *c, const char *key, fanin_error *error);

/** Makes what the source's path needs: its request list, or its spans. FANIN_ERR_TIMEOUT: stopped. */
fanin_status pull_plan_source(fanin_client *client, publication *p, plan_cache *cache,
                              size_t source, work_stop *stop, fanin_error *error);

/** The destination's ranges, from the cache if they last. The cache's or the destination's. */
fanin_status pull_plan_ranges(plan_cache *cache, destination *d,
                              const memory_range **ranges, size_t *n,
                              fanin_error *error);

/** The copy tables of the sources that are read by cuda_ipc, all of whose spans are there. */
fanin_status pull_plan_tables(fanin_client *client, plan_cache *cache,
                              const path_goal *goal, uint8_t *base, work_stop *stop,
                              fanin_error *error);

#endif
