/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Where many addresses are, asking the driver about each allocation once: adapters have tens of
 * thousands of tensors in some hundred allocations. For one call of put or pull, since memory may
 * be freed afterwards. Thread: one.
 */
#ifndef GPU_FINDER_H
#define GPU_FINDER_H

#include "gpu.h"

#define GPU_FINDER_STRETCHES 64
#define GPU_FINDER_KNOWN 1024 /**< of more allocations the driver is asked again */

/** Zeroed but for the driver. */
typedef struct gpu_finder {
    gpu *g;           /**< not NULL when something is looked for */
    gpu_range *known; /**< allocations on devices, ascending */
    size_t n_known, last;
    /** 1 + stretches of addresses (GPU_ADDRESS_GRAIN) that are host memory */
    uint64_t host[GPU_FINDER_STRETCHES];
} gpu_finder;

/** gpu_range_of(), from what is known already if it can. */
fanin_status gpu_find(gpu_finder *f, const void *address, gpu_range *out,
                      fanin_error *error);
void gpu_finder_free(gpu_finder *f);

/** Whether the bytes [@p low, @p end) are in the allocation @p in, or, since memory of the
    virtual-memory API may be several side by side, begin and end in such memory of its device. */
bool gpu_find_holds(gpu_finder *f, const gpu_range *in, uint64_t low, uint64_t end);

/** Whether memory that begins at @p low is one piece with some of @p before that ends at @p end:
    they overlap, lie in one allocation of a device, or have no whole page of the host between. */
bool gpu_range_continues(const gpu_range *before, uint64_t end, const gpu_range *one,
                         uint64_t low, uint64_t page);

/** What a tensor says of its memory against where one of its boxes is: NULL if it is true, else
    the remedy, and what is wrong in @p why. The CPU may use managed memory, so it may be said to
    be the host's. */
const char *gpu_contradiction(fanin_memory said, const gpu_range *here, char why[160]);

#endif
