/* SPDX-License-Identifier: Apache-2.0 */
/** @file Who has brought how much of a pull, and whom it waits for: told to the caller, and to the
    log. */
#ifndef RANK_WATCH_H
#define RANK_WATCH_H

#include "pull/choose_path.h"

/** How far an attempt is, over all its reads. */
typedef struct read_progress {
    const path_plan *whole; /**< that the reads are parts of */
    uint64_t done, total;   /**< bytes; done: by the reads that have ended */
    uint64_t told_ns;       /**< when the caller was told last */
} read_progress;

typedef struct rank_watch rank_watch;

/** Of one read. NULL: no memory. */
rank_watch *rank_watch_create(const path_reading *r, read_progress *progress,
                              const fanin_pull_options *options);
void rank_watch_destroy(rank_watch **w);

/** Looks, if it is time to, at what the readings have brought, and tells it. The loop is to come by
    again at *@p wake at the latest, which becomes sooner. @p readings: one a path, NULL: none. */
void rank_watch_look(rank_watch *w, void *const *readings, deadline *wake);

#endif
