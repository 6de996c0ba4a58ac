/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/pattern.h"

#include <endian.h>
#include <string.h>
#include <xxhash.h>

#define GOLDEN UINT64_C(0x9E3779B97F4A7C15)

static uint64_t splitmix64(uint64_t x)
{
    x += GOLDEN;
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

uint64_t pattern_seed(const char *key)
{
    return XXH3_64bits(key, strlen(key));
}

uint64_t pattern_start(uint64_t seed, uint64_t step)
{
    return seed + step * GOLDEN;
}

static uint64_t word(uint64_t start, uint64_t index)
{
    return htole64(splitmix64(start + index));
}

/* Bytes [skip, skip + size) of one word. */
static void part(uint8_t *out, uint64_t start, uint64_t index, size_t skip, size_t size)
{
    uint64_t value = word(start, index);
    memcpy(out, (const uint8_t *)&value + skip, size);
}

void pattern_fill(void *out, uint64_t start, uint64_t offset, size_t size)
{
    uint8_t *to = out;
    uint64_t index = offset / 8;
    size_t skip = offset % 8;
    if (skip != 0 && size > 0) {
        size_t head = 8 - skip < size ? 8 - skip : size;
        part(to, start, index++, skip, head);
        to += head;
        size -= head;
    }
    size_t words = size / 8;
    for (size_t i = 0; i < words; i++) {
        uint64_t value = word(start, index + i);
        memcpy(to + 8 * i, &value, 8);
    }
    if (size % 8 != 0) {
        part(to + 8 * words, start, index + words, 0, size % 8);
    }
}

/* Plain comparison of a piece that is known to differ, or is short. */
static size_t compare_bytes(const uint8_t *bytes, uint64_t start, uint64_t offset,
                            size_t size)
{
    uint8_t expected[64] = {0};
    for (size_t done = 0; done < size;) {
        size_t n = size - done < sizeof expected ? size - done : sizeof expected;
        pattern_fill(expected, start, offset + done, n);
        for (size_t i = 0; i < n; i++) {
            if (bytes[done + i] != expected[i]) {
                return done + i;
            }
        }
        done += n;
    }
    return size;
}

size_t pattern_compare(const void *bytes, uint64_t start, uint64_t offset, size_t size)
{
    enum { BLOCK = 512 }; /* words without a branch */
    const uint8_t *from = bytes;
    size_t done = (8 - offset % 8) % 8;
    if (done > size) {
        done = size;
    }
    size_t wrong = compare_bytes(from, start, offset, done);
    if (wrong < done) {
        return wrong;
    }
    while (size - done >= 8) {
        size_t words = (size - done) / 8 < BLOCK ? (size - done) / 8 : BLOCK;
        uint64_t index = (offset + done) / 8;
        uint64_t difference = 0;
        for (size_t i = 0; i < words; i++) {
            uint64_t value;
            memcpy(&value, from + done + 8 * i, 8);
            difference |= value ^ word(start, index + i);
        }
        if (difference != 0) {
            return done + compare_bytes(from + done, start, offset + done, 8 * words);
        }
        done += 8 * words;
    }
    return done + compare_bytes(from + done, start, offset + done, size - done);
}
