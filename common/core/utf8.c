/* SPDX-License-Identifier: Apache-2.0 */
#include "utf8.h"

#include <stdint.h>
#include <string.h>

/* Eight bytes of ASCII without a NUL at once: tensor names are nothing else. */
static bool plain8(const uint8_t *p)
{
    const uint64_t ones = UINT64_C(0x0101010101010101), high = ones << 7;
    uint64_t word;
    memcpy(&word, p, sizeof word);
    return !(word & high) && !((word - ones) & ~word & high);
}

/* Length of the sequence at p (NUL excluded), 0: invalid. */
static size_t sequence(const uint8_t *p, size_t left)
{
    uint8_t lead = p[0], low = 0x80, high = 0xbf;
    size_t size;
    if (lead < 0x80)
        return lead != 0;
    if (lead >= 0xc2 && lead <= 0xdf)
        size = 2;
    else if ((lead & 0xf0) == 0xe0)
        size = 3;
    else if (lead >= 0xf0 && lead <= 0xf4)
        size = 4;
    else
        return 0;
    /* The second byte's range excludes overlong forms, surrogates and > U+10FFFF. */
    if (lead == 0xe0)
        low = 0xa0;
    else if (lead == 0xed)
        high = 0x9f;
    else if (lead == 0xf0)
        low = 0x90;
    else if (lead == 0xf4)
        high = 0x8f;
    if (left < size || p[1] < low || p[1] > high)
        return 0;
    for (size_t i = 2; i < size; i++)
        if ((p[i] & 0xc0) != 0x80)
            return 0;
    return size;
}

bool utf8_valid(const void *data, size_t size)
{
    const uint8_t *p = data;
    for (size_t i = 0; i < size;) {
        if (size - i >= 8 && plain8(p + i)) {
            i += 8;
            continue;
        }
        size_t step = sequence(p + i, size - i);
        if (step == 0)
            return false;
        i += step;
    }
    return true;
}

void utf8_copy(char *to, size_t capacity, const char *from)
{
    size_t size = from ? strnlen(from, capacity) : 0;
    if (size == capacity) {
        size--;
        while (size > 0 && ((unsigned char)from[size] & 0xc0) == 0x80)
            size--;
    }
    if (size)
        memcpy(to, from, size);
    to[size] = '\0';
}
