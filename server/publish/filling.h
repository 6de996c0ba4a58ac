/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Publications that fill: readers may begin before all bytes are there, and read the boxes that are
 * proven. A relay publishes so what it is still reading. Which boxes are proven belongs to the
 * epoch: a new one begins with none.
 */
#ifndef FILLING_H
#define FILLING_H

#include "publish/publication.h"

/**
 * As fanin_server_commit() by reference of what was put, but no box is proven yet. The step may be
 * any, also one that was there before. Needs an update that is open, or a first commit, as that
 * does. Errors: those of fanin_server_commit().
 */
fanin_status server_fill(fanin_server *s, const char *name, uint64_t step,
                         fanin_error *error);

/**
 * The boxes of @p ranges, by their numbers in the box table, are of @p step, for good until the
 * next begin_update. Tells those that wait for them once. Any thread; one that proves boxes of a
 * pull has ended before the next fill, whose step may be the same.
 *
 * FANIN_ERR_NOT_FOUND: no such publication; FANIN_ERR_STALE: it does not fill, or is not at that
 * step (any more); FANIN_ERR_ARGUMENT: no such boxes; FANIN_ERR_MEMORY.
 */
fanin_status server_prove(fanin_server *s, const char *name, uint64_t step,
                          const landed_range *ranges, size_t n, fanin_error *error);

/* All with the lock held, for an epoch that stands. */

/** Whether all of these boxes, which there are, may be read. */
bool filling_has(const publication *p, uint64_t first, uint64_t count);
/** What has come since the version that a reader knows, of @p n_boxes; points into the publication.
    False: there is no such version. */
bool filling_since(const publication *p, uint64_t n_boxes, uint64_t version,
                   landed_range *whole, msg_landed_ok *out);

#endif
