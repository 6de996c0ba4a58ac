/* SPDX-License-Identifier: Apache-2.0 */
/** @file What others need of commits: waiting for them, their catalogs, their end. */
#ifndef COMMIT_H
#define COMMIT_H

#include "publish/publication.h"

/** How long a commit waits for one that has not taken effect, and for itself if it is asked to;
    and whoever changes shards for a copy of them that is under way. */
#define COMMIT_WAIT_MS 60000

/* ------------------------------------------------------ make_catalog.c */

/**
 * The publication's catalog as @p c will have it, NULL: by reference; its last one if nothing has
 * changed. With a reference. With the writer lock, which also keeps p->catalog from changing;
 * builds outside of the server's lock. FANIN_ERR_MEMORY, FANIN_ERR_LIMIT.
 */
fanin_status make_catalog(fanin_server *s, publication *p, const commit *c,
                          shard_catalog **out, fanin_error *error);

/* ------------------------------------------------------- commit_list.c */

/** Takes the writer lock, then the lock, once nothing is pending; waits at most COMMIT_WAIT_MS for
    that. FANIN_ERR_TIMEOUT: none is held. */
fanin_status commit_enter(fanin_server *s, publication *p, fanin_error *error);
/** Waits, at most COMMIT_WAIT_MS, until no copy of the publication's shards is under way. With
    the writer lock. FANIN_ERR_TIMEOUT. */
fanin_status commit_wait_for_copies(fanin_server *s, publication *p,
                                    fanin_error *error);
/** Settles what can be settled, logs and frees what was put off. No lock held. */
void commit_tidy(fanin_server *s);
/** Withdraws everything; streams that get there later find nothing. */
void commit_stop(fanin_server *s);
/** After commit_stop() and the threads' ends. NULL hub is fine. */
void commit_destroy(fanin_server *s);

#endif
