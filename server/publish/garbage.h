/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Catalogs without references, until somebody may wait while they go, and with them arenas and
 * registered memory. CUDA frees memory of a device when all that is queued there has ended, which
 * may be the trainer's, or never, where a collective hangs: no thread that serves readers may.
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
/** For the control thread: lets a thread collect, if there is anything, and does not wait. */
void garbage_leave(fanin_server *s);
/** Waits for that thread. The control thread has ended. */
void garbage_join(fanin_server *s);

#endif
