/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Touching the pages of a mapping ahead of those who write them, in a few threads: a fault costs
 * more than the copy of a page, and faults of one file scale to about four threads.
 */
#ifndef POPULATE_H
#define POPULATE_H

#include <stdbool.h>
#include <stdint.h>

typedef struct populator populator;

/** From the start upwards; the content stays as it is. NULL: not a thread could be had, which
    costs nothing but time. */
populator *populator_start(uint8_t *base, uint64_t size);
/** Waits for the end. False: the pages could not all be had. NULL is fine, and false. */
bool populator_finish(populator **p);

#endif
