/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/numbers.h"
#include "fetch/output.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* What is special in a small float. */
typedef enum specials {
    IEEE,   /**< the last exponent's are infinite or no numbers */
    FINITE, /**< nothing is */
    FN,     /**< of the last exponent only all ones is no number */
    FNUZ,   /**< minus zero is no number */
    POWERS, /**< an exponent alone; all ones is no number */
} specials;

/* Floats of at most 16 bits: a sign, an exponent, a mantissa. */
typedef struct small_float {
    uint8_t exponent, mantissa; /**< bits; 0: it is none */
    uint8_t bias;
    specials specials;
} small_float;

static const small_float small_floats[FANIN_DTYPE_U64 + 1] = {
    [FANIN_DTYPE_F4] = {2, 1, 1, FINITE},
    [FANIN_DTYPE_F6_E2M3] = {2, 3, 1, FINITE},
    [FANIN_DTYPE_F6_E3M2] = {3, 2, 3, FINITE},
    [FANIN_DTYPE_F8_E5M2] = {5, 2, 15, IEEE},
    [FANIN_DTYPE_F8_E4M3] = {4, 3, 7, FN},
    [FANIN_DTYPE_F8_E8M0] = {8, 0, 127, POWERS},
    [FANIN_DTYPE_F8_E4M3FNUZ] = {4, 3, 8, FNUZ},
    [FANIN_DTYPE_F8_E5M2FNUZ] = {5, 2, 16, FNUZ},
    [FANIN_DTYPE_F16] = {5, 10, 15, IEEE},
    [FANIN_DTYPE_BF16] = {8, 7, 127, IEEE},
};

unsigned numbers_parts(fanin_dtype dtype)
{
    return dtype == FANIN_DTYPE_C64 ? 2 : 1;
}

uint64_t numbers_bytes(fanin_dtype dtype, uint64_t count)
{
    return count / 8 * fanin_dtype_bits(dtype) +
           count % 8 * fanin_dtype_bits(dtype) / 8;
}

/* Of 4 or 6 bits. */
static void unpack(uint32_t width, const uint8_t *in, size_t count, uint64_t *out)
{
    uint32_t held = 0, bits = 0;
    for (size_t i = 0; i < count; i++) {
        if (bits < width) {
            held |= (uint32_t)*in++ << bits;
            bits += 8;
        }
        out[i] = held & ((1u << width) - 1);
        held >>= width;
        bits -= width;
    }
}

void numbers_bits(fanin_dtype dtype, const uint8_t *in, size_t count, uint64_t *out)
{
    uint32_t width = fanin_dtype_bits(dtype);
    if (width < 8) {
        unpack(width, in, count, out);
    } else if (width == 8) {
        for (size_t i = 0; i < count; i++) {
            out[i] = in[i];
        }
    } else if (width == 16) {
        for (size_t i = 0; i < count; i++) {
            out[i] = (uint64_t)(in[2 * i] | in[2 * i + 1] << 8);
        }
    } else if (width == 32) {
        for (size_t i = 0; i < count; i++, in += 4) {
            out[i] = (uint32_t)in[0] | (uint32_t)in[1] << 8 | (uint32_t)in[2] << 16 |
                     (uint32_t)in[3] << 24;
        }
    } else {
        for (size_t i = 0; i < count; i++, in += 8) {
            out[i] = 0;
            for (unsigned j = 0; j < 8; j++) {
                out[i] |= (uint64_t)in[j] << 8 * j;
            }
        }
    }
}

static float small_value(const small_float *f, uint32_t bits)
{
    uint32_t last = (1u << f->exponent) - 1;
    uint32_t exponent = bits >> f->mantissa & last;
    uint32_t mantissa = bits & ((1u << f->mantissa) - 1);
    float sign = bits >> (f->exponent + f->mantissa) != 0 ? -1.0F : 1.0F;
    if (f->specials == POWERS) {
        return exponent == last ? NAN : ldexpf(1.0F, (int)exponent - f->bias);
    }
    bool ones = exponent == last && mantissa == (1u << f->mantissa) - 1;
    if (f->specials == IEEE && exponent == last) {
        return mantissa != 0 ? NAN : sign * INFINITY;
    }
    if ((f->specials == FN && ones) ||
        (f->specials == FNUZ && bits == 1u << (f->exponent + f->mantissa))) {
        return NAN;
    }
    float units = (float)(exponent == 0 ? mantissa : mantissa | 1u << f->mantissa);
    int unit = (exponent == 0 ? 1 : (int)exponent) - f->bias - f->mantissa;
    return sign * ldexpf(units, unit);
}

/* The value of every pattern of bits; made once, for as long as the process lives. */
static const float *table_of(fanin_dtype dtype)
{
    static float *tables[FANIN_DTYPE_U64 + 1];
    const small_float *f = &small_floats[dtype];
    if (tables[dtype] == NULL) {
        uint32_t count = 1u << fanin_dtype_bits(dtype);
        tables[dtype] = output_require(calloc(count, sizeof(float)));
        for (uint32_t i = 0; i < count; i++) {
            tables[dtype][i] = small_value(f, i);
        }
    }
    return tables[dtype];
}

static double float_of(uint64_t bits)
{
    uint32_t half = (uint32_t)bits;
    float value;
    memcpy(&value, &half, sizeof value);
    return (double)value;
}

static double integer_of(fanin_dtype dtype, uint64_t bits)
{
    switch (dtype) {
    case FANIN_DTYPE_BOOL:
        return bits != 0 ? 1.0 : 0.0;
    case FANIN_DTYPE_I8:
        return (double)(int8_t)bits;
    case FANIN_DTYPE_I16:
        return (double)(int16_t)bits;
    case FANIN_DTYPE_I32:
        return (double)(int32_t)bits;
    case FANIN_DTYPE_I64:
        return (double)(int64_t)bits;
    default:
        return (double)bits;
    }
}

void numbers_values(fanin_dtype dtype, const uint64_t *bits, size_t count, double *out)
{
    if (small_floats[dtype].exponent != 0) {
        const float *table = table_of(dtype);
        for (size_t i = 0; i < count; i++) {
            out[i] = (double)table[bits[i]];
        }
    } else if (dtype == FANIN_DTYPE_F32) {
        for (size_t i = 0; i < count; i++) {
            out[i] = float_of(bits[i]);
        }
    } else if (dtype == FANIN_DTYPE_C64) {
        for (size_t i = 0; i < count; i++) {
            out[2 * i] = float_of(bits[i]);
            out[2 * i + 1] = float_of(bits[i] >> 32);
        }
    } else if (dtype == FANIN_DTYPE_F64) {
        memcpy(out, bits, count * sizeof *out);
    } else {
        for (size_t i = 0; i < count; i++) {
            out[i] = integer_of(dtype, bits[i]);
        }
    }
}

bool numbers_difference(fanin_dtype dtype, uint64_t a, uint64_t b, double *out)
{
    bool is_signed = dtype == FANIN_DTYPE_I64;
    if (!is_signed && dtype != FANIN_DTYPE_U64) {
        return false;
    }
    bool rises = is_signed ? (int64_t)b > (int64_t)a : b > a;
    *out = rises ? (double)(b - a) : -(double)(a - b);
    return true;
}
