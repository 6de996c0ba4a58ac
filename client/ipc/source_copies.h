/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * What one source is read by, for kernels: its pieces as copy entries, device by device, and those
 * for host memory. Made of each source by itself, so that threads can; device_plan.h joins them.
 */
#ifndef SOURCE_COPIES_H
#define SOURCE_COPIES_H

#include "array.h"
#include "copy_list.h"
#include "plan/plan.h"

/** A region of which something is read. */
typedef struct read_region {
    uint32_t number; /**< as the box table counts: of the first arena */
    uint64_t reach;  /**< bytes from its beginning to the end of what is read */
} read_region;

/** What lands on one device. */
typedef struct device_copies {
    int device;
    copy_list list; /**< bases are indices of source_copies.regions */
    uint64_t bytes; /**< of the source */
} device_copies;

/** A piece that goes to host memory. */
typedef struct host_piece {
    uint64_t from, to;
    uint64_t length;     /**< of the source, if it is contiguous */
    const strided *view; /**< in source_copies.views; NULL: contiguous */
    uint32_t base;
} host_piece;

typedef struct host_pieces {
    host_piece *pieces;
    uint64_t n, capacity;
} host_pieces;

typedef struct source_copies {
    read_region *regions;
    uint32_t n_regions;
    device_copies *devices;
    size_t n_devices;
    host_pieces host;
    strided *views;
    uint64_t reads; /**< spans that it was made of */
} source_copies;

/** Where a plan's bytes go. */
typedef struct copies_target {
    uint8_t *base;
    const memory_range *ranges;
    size_t n_ranges;
} copies_target;

/** @p spans of a source with @p n_regions regions. Takes the spans' views, which stay theirs
    otherwise. FANIN_ERR_MEMORY, FANIN_ERR_TIMEOUT (stopped). Any thread. */
fanin_status source_copies_build(plan_spans *spans, uint32_t n_regions,
                                 const copies_target *target, work_stop *stop,
                                 source_copies **out, fanin_error *error);
/** *c NULL is fine. */
void source_copies_free(source_copies **c);

#endif
