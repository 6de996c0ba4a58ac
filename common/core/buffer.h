/* SPDX-License-Identifier: Apache-2.0 */
/** @file A growable byte string; a failed allocation is remembered and tested once. */
#ifndef BUFFER_H
#define BUFFER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

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

#endif
