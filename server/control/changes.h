/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * What has become of publications, copied out under the lock in one go, so that the parked waits
 * and watches of however many sessions are answered without it: the trainer's calls take the same
 * lock.
 */
#ifndef CHANGES_H
#define CHANGES_H

#include "publish/publication.h"

#define CHANGES_MOST 32 /**< publications that are looked at in one go */

/** A publication at a moment. */
typedef struct publication_view {
    char name[PUBLICATION_NAME_SIZE];
    bool is_stable, is_away; /**< ready to be read; paused */
    uint64_t step, catalog_version, stable_ns;
    uint8_t key_digest[DIGEST_SIZE];
    char reason[REASON_SIZE];
    uint64_t changes;
    state_change history[HISTORY];
} publication_view;

typedef struct changes {
    unsigned n;
    publication_view views[CHANGES_MOST];
} changes;

/** Lock held. @p p NULL: neither stable nor away. */
void view_take(const publication *p, publication_view *out);
/** Those that have changed since the last call, which only the control thread makes. Takes the
    lock. True: there are more. */
bool changes_take(fanin_server *s, changes *out);
/** NULL: it has not changed. */
const publication_view *changes_find(const changes *c, const char *name);

#endif
