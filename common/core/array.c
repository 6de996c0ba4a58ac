/* SPDX-License-Identifier: Apache-2.0 */
#include "array.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ------------------------------------------------------------------------- buffer */

bool buffer_reserve(buffer *b, size_t more)
{
    b->failed = b->failed || more > SIZE_MAX / 2 - b->size ||
                !array_reserve(&b->data, &b->capacity, b->size + more, 1);
    return !b->failed;
}

void buffer_append(buffer *b, const void *data, size_t size)
{
    if (size && buffer_reserve(b, size)) {
        memcpy(b->data + b->size, data, size);
        b->size += size;
    }
}

void buffer_clear(buffer *b)
{
    b->size = 0;
    b->failed = false;
}

void buffer_free(buffer *b)
{
    free(b->data);
    memset(b, 0, sizeof *b);
}

/* -------------------------------------------------------------------------- array */

#define LEAST 16
/* Bytes of a huge page on x86-64, and on aarch64 with pages of 4 KiB. */
#define HUGE ((size_t)2 << 20)

void *array_large(size_t count, size_t size)
{
    void *array;
    if (size != 0 && count > (SIZE_MAX - HUGE) / size)
        return NULL;
    size_t bytes = count * size;
    if (bytes < HUGE)
        return malloc(bytes ? bytes : 1);
    if (posix_memalign(&array, HUGE, bytes) != 0)
        return NULL;
    /* Whole ones only: what is not wanted takes no memory. It only makes it faster. */
    (void)madvise(array, bytes / HUGE * HUGE, MADV_HUGEPAGE);
    return array;
}

bool array_reserve(void *array, size_t *capacity, size_t need, size_t size)
{
    if (need <= *capacity)
        return true;
    size_t wanted = *capacity > SIZE_MAX / 2 ? need : *capacity * 2;
    wanted = wanted < LEAST ? LEAST : wanted;
    wanted = wanted < need ? need : wanted;
    if (wanted > SIZE_MAX / size)
        return false;
    void *old, *grown;
    memcpy(&old, array, sizeof old);
    grown = old ? realloc(old, wanted * size) : array_large(wanted, size);
    if (!grown)
        return false;
    memcpy(array, &grown, sizeof grown);
    *capacity = wanted;
    return true;
}

void array_shrink(void *array, size_t count, size_t size)
{
    void *old, *shrunk;
    memcpy(&old, array, sizeof old);
    if (!old)
        return;
    shrunk = realloc(old, (count ? count : 1) * size);
    if (shrunk)
        memcpy(array, &shrunk, sizeof shrunk);
}

size_t array_search(const void *key, const void *array, size_t count, size_t size,
                    array_compare compare, bool *found_out)
{
    size_t low = 0, high = count;
    bool found = false;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = compare(key, (const char *)array + middle * size);
        found = found || order == 0;
        if (order > 0)
            low = middle + 1;
        else
            high = middle;
    }
    if (found_out)
        *found_out = found;
    return low;
}

const void *array_find(const void *key, const void *array, size_t count, size_t size,
                       array_compare compare)
{
    bool found;
    size_t at = array_search(key, array, count, size, compare, &found);
    return found ? (const char *)array + at * size : NULL;
}

static int compare_range(const void *key, const void *element)
{
    const uint8_t *at = key;
    const memory_range *r = element;
    return at < r->base ? -1 : at >= r->base + r->length;
}

const memory_range *memory_range_find(const memory_range *ranges, size_t n,
                                      const void *at)
{
    return array_find(at, ranges, n, sizeof *ranges, compare_range);
}

bool memory_range_on_devices(const memory_range *ranges, size_t n)
{
    bool some = false;
    for (size_t i = 0; i < n && !some; i++)
        some = ranges[i].device >= 0;
    return some;
}
