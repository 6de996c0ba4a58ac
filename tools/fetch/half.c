/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/half.h"

#include <math.h>

bool half_converts(fanin_dtype from, fanin_dtype to)
{
    return from == FANIN_DTYPE_F32 && (to == FANIN_DTYPE_BF16 || to == FANIN_DTYPE_F16);
}

static uint16_t bf16_of(uint32_t bits)
{
    uint32_t kept = bits >> 16;
    uint32_t lost = bits & 0xffff;
    if ((bits & 0x7f800000) == 0x7f800000 && (bits & 0x7fffff) != 0) {
        return (uint16_t)((kept & 0x8000) | 0x7fc0);
    }
    /* The next one up is the next number in size, the infinite one last. */
    return (uint16_t)(kept + (lost > 0x8000 || (lost == 0x8000 && kept % 2 != 0)));
}

/* By arithmetic: the value in units of what the last bit of a half is worth, rounded. */
static uint16_t f16_of(uint32_t bits)
{
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    int exponent = (int)(bits >> 23 & 0xff) - 127;
    uint32_t mantissa = bits & 0x7fffff;
    if (exponent == 128) {
        return (uint16_t)(sign | (mantissa != 0 ? 0x7e00 : 0x7c00));
    }
    if (exponent > 15) {
        return (uint16_t)(sign | 0x7c00);
    }
    if (exponent < -25) {
        return sign;
    }
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
