/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * What one copy of bytes is to the copy kernel: equal runs at equal distances on either side,
 * perhaps converted on the way. Included by the kernel's source too: nothing but C.
 */
#ifndef COPY_ENTRY_H
#define COPY_ENTRY_H

#include "convert.h"
#include <stdint.h>

/** Laid out for the device: 48 bytes, no padding. */
typedef struct copy_entry {
    uint64_t from; /**< of the first run, added to the base */
    uint64_t to;
    int64_t from_step, to_step; /**< bytes between the starts of neighbouring runs */
    uint32_t run;               /**< bytes of one run, on the source's side */
    uint32_t runs;
    uint32_t base;    /**< which base `from` is relative to */
    uint32_t convert; /**< CONVERT_... */
} copy_entry;

#endif
