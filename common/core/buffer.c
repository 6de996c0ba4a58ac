/* SPDX-License-Identifier: Apache-2.0 */
#include "buffer.h"

#include <stdlib.h>
#include <string.h>

bool buffer_reserve(buffer *b, size_t more)
{
    if (b->failed)
        return false;
    if (more <= b->capacity - b->size)
        return true;
    if (more > SIZE_MAX / 2 - b->size) {
        b->failed = true;
        return false;
    }
    size_t capacity = b->capacity ? b->capacity : 256;
    while (capacity < b->size + more)
        capacity *= 2;
    uint8_t *data = realloc(b->data, capacity);
    if (!data) {
        b->failed = true;
        return false;
    }
    b->data = data;
    b->capacity = capacity;
    return true;
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
