/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/pattern.h"

#include <endian.h>
#include <math.h>
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
    if (size % 8 != 0)
        part(to + 8 * words, start, index + words, 0, size % 8);
}

/* Plain comparison of a piece that is known to differ, or is short. */
static size_t compare_bytes(const uint8_t *bytes, uint64_t start, uint64_t offset,
                            size_t size)
{
    uint8_t expected[64] = {0};
    for (size_t done = 0; done < size;) {
        size_t n = size - done < sizeof expected ? size - done : sizeof expected;
        pattern_fill(expected, start, offset + done, n);
        for (size_t i = 0; i < n; i++)
            if (bytes[done + i] != expected[i])
                return done + i;
        done += n;
    }
    return size;
}

size_t pattern_compare(const void *bytes, uint64_t start, uint64_t offset, size_t size)
{
    enum { BLOCK = 512 }; /* words without a branch */
    const uint8_t *from = bytes;
    size_t done = (8 - offset % 8) % 8;
    if (done > size)
        done = size;
    size_t wrong = compare_bytes(from, start, offset, done);
    if (wrong < done)
        return wrong;
    while (size - done >= 8) {
        size_t words = (size - done) / 8 < BLOCK ? (size - done) / 8 : BLOCK;
        uint64_t index = (offset + done) / 8;
        uint64_t difference = 0;
        for (size_t i = 0; i < words; i++) {
            uint64_t value;
            memcpy(&value, from + done + 8 * i, 8);
            difference |= value ^ word(start, index + i);
        }
        if (difference != 0)
            return done + compare_bytes(from + done, start, offset + done, 8 * words);
        done += 8 * words;
    }
    return done + compare_bytes(from + done, start, offset + done, size - done);
}

bool half_converts(fanin_dtype from, fanin_dtype to)
{
    return from == FANIN_DTYPE_F32 && (to == FANIN_DTYPE_BF16 || to == FANIN_DTYPE_F16);
}

static uint16_t bf16_of(uint32_t bits)
{
    uint32_t kept = bits >> 16;
    uint32_t lost = bits & 0xffff;
    if ((bits & 0x7f800000) == 0x7f800000 && (bits & 0x7fffff) != 0)
        return (uint16_t)((kept & 0x8000) | 0x7fc0);
    /* The next one up is the next number in size, the infinite one last. */
    return (uint16_t)(kept + (lost > 0x8000 || (lost == 0x8000 && kept % 2 != 0)));
}

/* By arithmetic: the value in units of what the last bit of a half is worth, rounded. */
static uint16_t f16_of(uint32_t bits)
{
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    int exponent = (int)(bits >> 23 & 0xff) - 127;
    uint32_t mantissa = bits & 0x7fffff;
    if (exponent == 128)
        return (uint16_t)(sign | (mantissa != 0 ? 0x7e00 : 0x7c00));
    if (exponent > 15)
        return (uint16_t)(sign | 0x7c00);
    if (exponent < -25)
        return sign;
    double value = ldexp(1.0 + (double)mantissa / 8388608.0, exponent);
    int unit = exponent < -14 ? -24 : exponent - 10;
    uint32_t count = (uint32_t)nearbyint(ldexp(value, -unit));
    /* 1024 units of an exponent's are its hidden bit; a carry goes on into the exponent. */
    uint32_t base = exponent < -14 ? 0 : (uint32_t)(exponent + 14) << 10;
    return (uint16_t)(sign | (base + count));
}

void half_convert(fanin_dtype to, uint8_t *out, const uint8_t *in, size_t count)
{
    for (size_t i = 0; i < count; i++, in += 4, out += 2) {
        uint32_t bits = (uint32_t)in[0] | (uint32_t)in[1] << 8 | (uint32_t)in[2] << 16 |
                        (uint32_t)in[3] << 24;
        uint16_t half = to == FANIN_DTYPE_BF16 ? bf16_of(bits) : f16_of(bits);
        out[0] = (uint8_t)half;
        out[1] = (uint8_t)(half >> 8);
    }
}
