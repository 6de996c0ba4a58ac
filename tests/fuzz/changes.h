/* SPDX-License-Identifier: Apache-2.0 */
/** @file A reader's memory for the publication CHANGES of two_ranks.h, which stays as it is between
    pulls: they read patches where they can. */
#ifndef CHANGES_H
#define CHANGES_H

#include "two_ranks.h"
#include <stdbool.h>

typedef struct changes {
    uint8_t all[SLOW + 2]; /**< a guard at both ends */
    fanin_destination *into;
    uint64_t step; /**< that the last pull said it is; 0: it failed */
    bool doubted;  /**< lies were believed: digests have to tell what it holds */
} changes;

void changes_prepare(changes *c);
void changes_end(changes *c);
/** Nothing beside its bytes is written. */
fanin_status changes_pull(fanin_client *client, changes *c, bool verify,
                          uint32_t timeout_ms, fanin_error *error);
/** They are of the step that was said. */
void changes_check(const changes *c);

#endif
