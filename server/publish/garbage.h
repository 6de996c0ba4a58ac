/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Catalogs without references, until somebody may wait while they go, and with them arenas and
 * registered memory.
 */
#ifndef GARBAGE_H
#define GARBAGE_H

#include "core/server_state.h"
#include "shards/shard_catalog.h"

/** Gives a reference back; garbage_collect() frees what is left without one. NULL is fine. Lock
    held. */
void catalog_discard(fanin_server *s, shard_catalog *catalog);
/** The same, lock not held: for the threads that serve readers. */
void catalog_retire(fanin_server *s, shard_catalog *catalog);
/** No lock held but a writer's. May block for as long as deregistering memory takes. What was left
    without a reference before the call is freed when it returns, by whichever thread. */
void garbage_collect(fanin_server *s);

#endif
