/* SPDX-License-Identifier: Apache-2.0 */
#include "memory_range.h"

const memory_range *memory_range_find(const memory_range *ranges, size_t n,
                                      const void *at)
{
    const uint8_t *byte = at;
    size_t low = 0, high = n;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const memory_range *r = &ranges[middle];
        if (byte < r->base)
            high = middle;
        else if (byte >= r->base + r->length)
            low = middle + 1;
        else
            return r;
    }
    return NULL;
}
