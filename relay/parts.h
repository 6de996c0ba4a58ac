/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * What a reader wants, cut into parts that are handed on one by one: boxes of at most a unit's
 * bytes, in the order of names and offsets. A unit is a run of parts of together at most so many
 * bytes. Readers that want the same cut it alike, whatever the order and the memory that they
 * name; their holdings are equal.
 */
#ifndef PARTS_H
#define PARTS_H

#include "digest.h"
#include <fanin/types.h>

#define PARTS_UNIT_MOST ((uint64_t)4 << 20)
#define PARTS_UNIT_STEP ((uint64_t)64 << 10)
#define PARTS_UNITS                                                                    \
    512 /**< so many units at least, if they are not smaller than a step */

typedef struct parts {
    size_t n;
    fanin_tensor *origin; /**< one box each, by the names that the trainer publishes */
    fanin_tensor
        *own; /**< the same memory as a relay publishes it: whole tensors "%08x" */
    fanin_box *boxes; /**< of origin, then of own */
    char *names;
    size_t n_units;
    uint32_t
        *unit_first;     /**< a unit's first part; n_units + 1 of them, the last is n */
    uint32_t *unit_of;   /**< of each part */
    uint64_t *unit_size; /**< bytes of each unit */
    uint64_t unit_bytes; /**< the most that a unit has */
    uint64_t bytes;      /**< of all */
    digest
        holding; /**< equal: the same parts and units, of the same tensors and dtypes */
} parts;

/** @p unit_bytes 0: by the size of all. FANIN_ERR_ARGUMENT, naming the tensor; FANIN_ERR_LIMIT,
    FANIN_ERR_MEMORY. After an error there is nothing to free. */
fanin_status parts_cut(parts *out, const fanin_tensor *tensors, size_t count,
                       uint64_t unit_bytes, fanin_error *error);
void parts_free(parts *p);
/** Whether both are the same, in the same memory. */
bool parts_same_memory(const parts *a, const parts *b);

#endif
