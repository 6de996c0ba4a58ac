/* SPDX-License-Identifier: Apache-2.0 */
#include "versioned.h"

#include <stdint.h>
#include <string.h>

static size_t versioned_size_of(const void *s)
{
    size_t size;
    memcpy(&size, s, sizeof size);
    return size;
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

void versioned_init(void *to, size_t size, const void *defaults, size_t known)
{
    if (!to || size < sizeof size)
        return;
    memset(to, 0, size);
    memcpy(to, defaults, smaller(size, known));
    memcpy(to, &size, sizeof size);
}

bool versioned_read(void *to, size_t known, const void *from, size_t least)
{
    if (!from || versioned_size_of(from) < least ||
        versioned_size_of(from) < sizeof(size_t))
        return false;
    memcpy(to, from, smaller(versioned_size_of(from), known));
    memcpy(to, &known, sizeof known);
    return true;
}

void versioned_write(void *to, const void *from, size_t known)
{
    size_t skip = sizeof(size_t), both = smaller(versioned_size_of(to), known);
    if (both > skip)
        memcpy((uint8_t *)to + skip, (const uint8_t *)from + skip, both - skip);
}

void versioned_element(void *to, size_t known, const void *array, size_t index)
{
    memset(to, 0, known);
    (void)versioned_read(to, known,
                         (const uint8_t *)array + index * versioned_size_of(array), 0);
}
