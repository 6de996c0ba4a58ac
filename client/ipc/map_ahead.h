/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Other processes' memory is mapped beside what else a first pull does: the driver maps one
 * allocation after the other, so a thread waits for it. It begins when ranks have announced a
 * catalog whose tables are not here yet; their regions are asked for before those.
 */
#ifndef MAP_AHEAD_H
#define MAP_AHEAD_H

#include "device/ipc_map.h"
#include "net/crew.h"
#include "path/reader.h"

/** The thread that opens what is taken. Zeroed: none. */
typedef struct map_opener {
    const fanin_client *client;
    ipc_map *map;
    crew *thread;
    uint64_t before_ns; /**< spent by openers before it */
} map_opener;

/** @p threads false: the caller does it in map_opener_finish(). False: no memory. */
bool map_opener_start(map_opener *o, fanin_client *client, deadline at, bool threads);
/** Nothing is taken any more; returns when all is opened, or was tried. FANIN_ERR_TIMEOUT,
    FANIN_ERR_CANCELLED. */
fanin_status map_opener_finish(map_opener *o, uint64_t *spent_ns, fanin_error *error);
/** Stops it where it is. */
void map_opener_close(map_opener *o);

/** A path_reader's. */
void *map_ahead_begin(fanin_client *client, publication *p, const path_foresight *known,
                      deadline at);
void map_ahead_free(void *ahead);
/* Of all these @p ahead may be NULL. */
/** No region is waited for any longer. */
void map_ahead_settle(void *ahead);
/** NULL: there is none. */
map_opener *map_ahead_opener(void *ahead);
/** Stops opening. */
void map_ahead_close(void *ahead);

#endif
