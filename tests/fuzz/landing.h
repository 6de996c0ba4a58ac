/* SPDX-License-Identifier: Apache-2.0 */
/** @file A reader's memory for the tensors of two_ranks.h, on the host or on a device, and a pull
    into it. */
#ifndef LANDING_H
#define LANDING_H

#include "two_ranks.h"

#define ROOM (COLUMNS + 3) /* of a row */

typedef struct landed {
    uint8_t bytes[BYTES];
    float matrix[ROWS][ROOM];
} landed;

typedef struct landing {
    uint64_t step;  /**< that the last pull into it said it is; 0: it failed */
    bool on_device; /**< where there is one memory for all of these */
    landed here;
    fanin_box boxes[2];
    fanin_tensor tensors[2];
} landing;

/** Describes and overwrites it; what is said of the device stays. */
void landing_prepare(landing *to);
/** Nothing beside the boxes has been written; takes the step of @p result, and frees it. NULL: it
    failed. */
void landing_end(landing *to, fanin_result *result);
/** It is the step that was said. */
void landing_check(const landing *to);

#endif
