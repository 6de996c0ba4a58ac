/* SPDX-License-Identifier: Apache-2.0 */
/** @file Arrays that grow, searches in sorted ones, and stretches of memory. Any thread. */
#ifndef ARRAY_H
#define ARRAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A growable byte string; a failed allocation is remembered and tested once. */

typedef struct buffer {
    uint8_t *data;
    size_t size, capacity;
    /** an allocation failed; the content is not to be used until it is cleared */
    bool failed;
    bool sealed; /**< the frames that proto appends get checksums (frame.h) */
} buffer;

void buffer_append(buffer *b, const void *data, size_t size);
bool buffer_reserve(buffer *b, size_t more); /**< capacity for size + more */
void buffer_clear(buffer *b);                /**< empty and good; keeps the memory */
void buffer_free(buffer *b);                 /**< and zeroes it */

/** Memory for @p count elements, like malloc()'s and for free(). From a huge page on it lies on
    whole huge pages, where the kernel has some for who asks (madvise(2), MADV_HUGEPAGE): touching
    ordinary ones for the first time costs more than most of what is done with them. NULL: no
    memory. */
void *array_large(size_t count, size_t size);

/** Makes room for @p need elements of @p size bytes, doubling; @p array is a pointer to the
    array's pointer. The first room is array_large()'s. False: no memory, and nothing has changed.
    */
bool array_reserve(void *array, size_t *capacity, size_t need, size_t size);
/** Gives back what is behind @p count elements, as far as that is possible. */
void array_shrink(void *array, size_t count, size_t size);

/** Below, at or above 0, as @p key is below, at or above the element. */
typedef int (*array_compare)(const void *key, const void *element);
/** The first of @p count ascending elements that is not below @p key, which is where it is to be
    inserted; @p count: all are below. *found_out (may be NULL): whether it equals the key. */
size_t array_search(const void *key, const void *array, size_t count, size_t size,
                    array_compare compare, bool *found_out);
/** The element that equals @p key; NULL: none. */
const void *array_find(const void *key, const void *array, size_t count, size_t size,
                       array_compare compare);

/** Memory of a destination. */
typedef struct memory_range {
    uint8_t *base;
    size_t length;
    int32_t device; /**< CUDA device, -1: host memory */
} memory_range;

/** The range that holds @p at, among @p n that ascend and are disjoint. NULL: none. */
const memory_range *memory_range_find(const memory_range *ranges, size_t n,
                                      const void *at);
/** Whether some of them are on a device. */
bool memory_range_on_devices(const memory_range *ranges, size_t n);

#endif
