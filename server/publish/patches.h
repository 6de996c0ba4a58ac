/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The patches (PROTOCOL.md, "Patches") of a publication: made while a commit copies its shards, for
 * readers that have the step before; shown together with the step. Each leads from one generation
 * to the next, so those that are kept are one chain. It ends with the catalog.
 */
#ifndef PATCHES_H
#define PATCHES_H

#include "patch.h"
#include "publish/commit.h"
#include "shards/patch_maker.h"

/** Does not change, once it is shown, but for `older`. */
typedef struct patch {
    uint64_t from, to; /**< generations */
    uint64_t bytes;    /**< of its changes */
    /** a device makes it: how many changes it has, when the commit's streams have got there, or
        PATCH_TOO_LARGE; NULL: `bytes` says so */
    const uint64_t *made;
    shard_catalog *boxes; /**< directory and changes, with a reference */
    struct patch *older;
} patch;

/** With the writer lock, when the arena to fill is taken. NULL: no patch is made, as nobody asked,
    there is no step to begin with, or there cannot be one. */
patch_maker *patches_begin(fanin_server *s, commit *c);
/** Makes the commit's patch of what was found, if all was copied; frees @p m, which may be NULL.
    Takes the lock. Never fails: there is no patch then. */
void patches_make(fanin_server *s, commit *c, patch_maker *m, bool copied);

/** The same for a snapshot of which part @p part, of a device, is being copied: before the copies
    are queued, and behind them. With the writer lock, and takes the lock. Never fail likewise. */
void patches_prepare(commit *c, uint32_t part);
void patches_queue(fanin_server *s, commit *c, uint32_t part);

/* With the lock held. */

/** Before the commit does: its patch is the newest, or there are none any more. */
void patches_take_effect(fanin_server *s, commit *c);
/** All of a chain. NULL is fine. */
void patches_discard(fanin_server *s, patch *newest);
/** The publication keeps none until a commit says otherwise. */
void patches_drop(fanin_server *s, publication *p);
/** What is told to who asks for patches; all 0: nothing. */
void patches_tell(const publication *p, patch_offers *out);
/** The boxes of patch @p k, counted backwards from the generation @p to; NULL: it is not there. */
shard_catalog *patches_find(const publication *p, uint64_t to, uint64_t k);

#endif
