/* SPDX-License-Identifier: Apache-2.0 */
#include "buffer.h"

#include "array.h"
#include <stdlib.h>
#include <string.h>

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
