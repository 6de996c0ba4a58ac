/* SPDX-License-Identifier: Apache-2.0 */
/** @file Where a pull's bytes go, as stretches of memory. */
#ifndef MEMORY_RANGE_H
#define MEMORY_RANGE_H

#include <stddef.h>
#include <stdint.h>

/** Memory of a destination. */
typedef struct memory_range {
    uint8_t *base;
    size_t length;
    int32_t device; /**< CUDA device, -1: host memory */
} memory_range;

/** The range that holds @p at, among @p n that ascend and are disjoint. NULL: none. */
const memory_range *memory_range_find(const memory_range *ranges, size_t n,
                                      const void *at);

#endif
