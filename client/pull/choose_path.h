/* SPDX-License-Identifier: Apache-2.0 */
/** @file The paths that there are, and which one each rank's bytes take: proven by a probe read. */
#ifndef CHOOSE_PATH_H
#define CHOOSE_PATH_H

#include "path/path.h"

#define PATH_READERS 4
/** In the order in which they are tried, started and ended. */
extern const path_reader *const path_readers[PATH_READERS];
/** NULL: FANIN_PATH_AUTO, or there is none of that number. */
const path_reader *path_of_number(fanin_path number);

/** What paths keep of a client: when it is made, loses its ranks, ends. */
fanin_status paths_create(fanin_client *client, fanin_error *error);
void paths_disconnect(fanin_client *client);
void paths_destroy(fanin_client *client);

/** Begins what can be begun before there is a plan, if some rank's tables are not here; goal->ahead
    is to be ended, after path_prepare() or instead of it. @p known is to outlive that. */
void path_begin_ahead(fanin_client *client, publication *p, const path_foresight *known,
                      path_goal *goal, deadline at);
void path_end_ahead(path_goal *goal);

/**
 * Decides the path of every peer with want[i] that has none yet for this publication and sets it
 * up (endpoint, regions, remote keys, mappings); for those that have one, brings keys and
 * mappings to the current tables and the goal's devices. What was decided is in path_taken().
 * FANIN_ERR_UNSUPPORTED: the path that the configuration forces does not work (says why). With
 * FANIN_PATH_AUTO what fails falls back to stream, and the reason says why.
 */
fanin_status path_prepare(fanin_client *client, publication *p, const bool *want,
                          path_goal *goal, deadline at, fanin_error *error);

/** The publication is paused or gone: unmaps its memory, which the trainer wants to free. No
    reading is under way. */
void path_unmap(fanin_client *client, publication *p);
/** Likewise of publications of which no pull has begun since @p since_ns: their owners may want to
    free it, and a removal is told only to who asks for it. */
void path_unmap_idle(fanin_client *client, uint64_t since_ns);

#endif
