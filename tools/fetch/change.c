/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/change.h"
#include "fetch/output.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------- elements as numbers */

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

/* The elements' bits, each in a word of its own. Elements of less than a byte follow each other
   from a byte's low bits on. Little-endian, any alignment. */
static void numbers_bits(fanin_dtype dtype, const uint8_t *in, size_t count,
                         uint64_t *out)
{
    uint32_t width = fanin_dtype_bits(dtype);
    if (width < 8) {
        unpack(width, in, count, out);
    } else if (width == 8) {
        for (size_t i = 0; i < count; i++)
            out[i] = in[i];
    } else if (width == 16) {
        for (size_t i = 0; i < count; i++)
            out[i] = (uint64_t)(in[2 * i] | in[2 * i + 1] << 8);
    } else if (width == 32) {
        for (size_t i = 0; i < count; i++, in += 4)
            out[i] = (uint32_t)in[0] | (uint32_t)in[1] << 8 | (uint32_t)in[2] << 16 |
                     (uint32_t)in[3] << 24;
    } else {
        for (size_t i = 0; i < count; i++, in += 8) {
            out[i] = 0;
            for (unsigned j = 0; j < 8; j++)
                out[i] |= (uint64_t)in[j] << 8 * j;
        }
    }
}

static float small_value(const small_float *f, uint32_t bits)
{
    uint32_t last = (1u << f->exponent) - 1;
    uint32_t exponent = bits >> f->mantissa & last;
    uint32_t mantissa = bits & ((1u << f->mantissa) - 1);
    float sign = bits >> (f->exponent + f->mantissa) != 0 ? -1.0F : 1.0F;
    if (f->specials == POWERS)
        return exponent == last ? NAN : ldexpf(1.0F, (int)exponent - f->bias);
    bool ones = exponent == last && mantissa == (1u << f->mantissa) - 1;
    if (f->specials == IEEE && exponent == last)
        return mantissa != 0 ? NAN : sign * INFINITY;
    if ((f->specials == FN && ones) ||
        (f->specials == FNUZ && bits == 1u << (f->exponent + f->mantissa)))
        return NAN;
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
        for (uint32_t i = 0; i < count; i++)
            tables[dtype][i] = small_value(f, i);
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

static double change_integer_of(fanin_dtype dtype, uint64_t bits)
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

/* What such bits mean; numbers_parts() numbers an element. Integers of 64 bits are rounded. Not
   for several threads: tables are made when a dtype first comes. */
static void numbers_values(fanin_dtype dtype, const uint64_t *bits, size_t count,
                           double *out)
{
    if (small_floats[dtype].exponent != 0) {
        const float *table = table_of(dtype);
        for (size_t i = 0; i < count; i++)
            out[i] = (double)table[bits[i]];
    } else if (dtype == FANIN_DTYPE_F32) {
        for (size_t i = 0; i < count; i++)
            out[i] = float_of(bits[i]);
    } else if (dtype == FANIN_DTYPE_C64) {
        for (size_t i = 0; i < count; i++) {
            out[2 * i] = float_of(bits[i]);
            out[2 * i + 1] = float_of(bits[i] >> 32);
        }
    } else if (dtype == FANIN_DTYPE_F64) {
        memcpy(out, bits, count * sizeof *out);
    } else {
        for (size_t i = 0; i < count; i++)
            out[i] = change_integer_of(dtype, bits[i]);
    }
}

/* b - a of two integers of 64 bits, rounded once; false: the dtype is another, whose values
   subtract exactly enough. */
static bool numbers_difference(fanin_dtype dtype, uint64_t a, uint64_t b, double *out)
{
    bool is_signed = dtype == FANIN_DTYPE_I64;
    if (!is_signed && dtype != FANIN_DTYPE_U64)
        return false;
    bool rises = is_signed ? (int64_t)b > (int64_t)a : b > a;
    *out = rises ? (double)(b - a) : -(double)(a - b);
    return true;
}

/* A piece of both tensors. */
typedef struct piece {
    uint64_t bits[2][CHANGE_PIECE];
    double values[2][2 * CHANGE_PIECE]; /**< of an element one, or two */
    double steps[2 * CHANGE_PIECE];     /**< from the old ones to the new ones */
    size_t count, parts;
    bool one_dtype;
} piece;

/* Squares that a double cannot hold are made of numbers that are scaled. */
static double norm_of(const double *values, size_t count)
{
    double parts[4] = {0.0}, most = 0.0; /* sums that need not wait for each other */
    for (size_t i = 0; i < count; i++)
        parts[i % 4] += values[i] * values[i];
    double sum = parts[0] + parts[1] + (parts[2] + parts[3]);
    if (sum > 1e-280 && sum < 1e280)
        return sqrt(sum);
    for (size_t i = 0; i < count; i++)
        most = fmax(most, fabs(values[i]));
    sum = 0.0;
    for (size_t i = 0; most > 0.0 && isfinite(most) && i < count; i++)
        sum += values[i] / most * (values[i] / most);
    return isfinite(most) ? most * sqrt(sum) : most;
}

static bool is_changed(const piece *p, size_t i)
{
    bool changed = false;
    if (p->one_dtype)
        return p->bits[0][i] != p->bits[1][i];
    for (size_t j = i * p->parts; j < (i + 1) * p->parts; j++) {
        double x = p->values[0][j], y = p->values[1][j];
        changed |= x != y && !(isnan(x) && isnan(y));
    }
    return changed;
}

/* Whether an element is finite; counts what is not. */
static bool count_special(change *c, unsigned side, const double *values, size_t parts)
{
    bool nan = false, infinite = false;
    for (size_t j = 0; j < parts; j++) {
        nan |= isnan(values[j]);
        infinite |= isinf(values[j]);
    }
    c->nans[side] += nan;
    c->infinite[side] += infinite && !nan;
    return !nan && !infinite;
}

/* The step of an element that is finite in both. */
static void step(change *c, piece *p, fanin_dtype dtype, size_t i)
{
    size_t at = i * p->parts;
    double size = 0.0;
    for (size_t j = at; j < at + p->parts; j++) {
        p->steps[j] = p->values[1][j] - p->values[0][j];
        size = p->parts == 1 ? fabs(p->steps[j]) : hypot(size, p->steps[j]);
    }
    if (p->one_dtype &&
        numbers_difference(dtype, p->bits[0][i], p->bits[1][i], &p->steps[at]))
        size = fabs(p->steps[at]);
    c->largest = size > c->largest ? size : c->largest;
}

/* What is not finite counts, and is no part of norms: becomes 0. Of elements of two numbers, or of
   integers of 64 bits. */
static void compare_slowly(change *c, piece *p, fanin_dtype dtype)
{
    for (size_t i = 0; i < p->count; i++) {
        size_t at = i * p->parts;
        bool finite[2];
        c->changed += is_changed(p, i);
        for (unsigned side = 0; side < 2; side++)
            finite[side] = count_special(c, side, &p->values[side][at], p->parts);
        if (finite[0] && finite[1])
            step(c, p, dtype, i);
        else
            memset(&p->steps[at], 0, p->parts * sizeof p->steps[0]);
        c->lost += finite[0] != finite[1];
        for (unsigned side = 0; side < 2; side++)
            if (!finite[side])
                memset(&p->values[side][at], 0, p->parts * sizeof(double));
    }
}

/* The same of other elements: no calls and few branches, as whole models come this way. */
static void change_compare(change *c, piece *p)
{
    uint64_t changed = 0, lost = 0, nans[2] = {0}, odd[2] = {0};
    double largest = c->largest;
    for (size_t i = 0; i < p->count; i++) {
        double x = p->values[0][i], y = p->values[1][i];
        bool finite_x = fabs(x) <= DBL_MAX, finite_y = fabs(y) <= DBL_MAX;
        bool same = p->one_dtype ? p->bits[0][i] == p->bits[1][i]
                                 : x == y || (x != x && y != y);
        double d = finite_x && finite_y ? y - x : 0.0;
        changed += !same;
        lost += finite_x != finite_y;
        nans[0] += x != x;
        nans[1] += y != y;
        odd[0] += !finite_x;
        odd[1] += !finite_y;
        largest = fabs(d) > largest ? fabs(d) : largest;
        p->steps[i] = d;
        p->values[0][i] = finite_x ? x : 0.0;
        p->values[1][i] = finite_y ? y : 0.0;
    }
    c->changed += changed;
    c->lost += lost;
    c->largest = largest;
    for (unsigned side = 0; side < 2; side++) {
        c->nans[side] += nans[side];
        c->infinite[side] += odd[side] - nans[side];
    }
}

void change_add(change *c, const fanin_dtype dtypes[2], const uint8_t *const bytes[2],
                size_t count)
{
    piece p; /* large: only what is used is written */
    p.count = count;
    p.parts = numbers_parts(dtypes[0]);
    p.one_dtype = dtypes[0] == dtypes[1];
    for (unsigned side = 0; side < 2; side++) {
        numbers_bits(dtypes[side], bytes[side], count, p.bits[side]);
        numbers_values(dtypes[side], p.bits[side], count, p.values[side]);
    }
    if (p.parts > 1 || (p.one_dtype && fanin_dtype_bits(dtypes[0]) == 64))
        compare_slowly(c, &p, dtypes[0]);
    else
        change_compare(c, &p);
    size_t numbers = count * p.parts;
    for (unsigned side = 0; side < 2; side++)
        c->norm[side] = hypot(c->norm[side], norm_of(p.values[side], numbers));
    c->norm_of_change = hypot(c->norm_of_change, norm_of(p.steps, numbers));
    c->elements += count;
}

double change_relative(const change *c)
{
    if (c->changed == 0)
        return 0.0;
    if (c->lost > 0 || (c->norm[0] == 0.0 && c->norm_of_change > 0.0))
        return INFINITY;
    return c->norm[0] > 0.0 ? c->norm_of_change / c->norm[0] : 0.0;
}
