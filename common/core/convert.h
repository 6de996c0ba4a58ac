/* SPDX-License-Identifier: Apache-2.0 */
/** @file Element types that change on the way. Plain C: the copy kernel's source includes it. */
#ifndef CONVERT_H
#define CONVERT_H

#include <stddef.h>
#include <stdint.h>

/** What happens to elements that are copied. */
enum {
    CONVERT_NONE = 0,
    /** Round to nearest, ties to even, as torch does; a NaN becomes the quiet NaN 0x7fc0 or
        0x7e00 with its sign, and what is too large becomes infinite. */
    CONVERT_F32_BF16 = 1,
    CONVERT_F32_F16 = 2,
};

#ifdef __CUDACC__
#define CONVERT_CODE static __host__ __device__ inline
#else
#define CONVERT_CODE static inline
#endif

/** One element, from the bits of a float. The same as c10's round_to_nearest_even, but for the
    sign of a NaN. */
CONVERT_CODE uint16_t convert_to_bf16(uint32_t bits)
{
    if ((bits & UINT32_C(0x7fffffff)) > UINT32_C(0x7f800000))
        return (uint16_t)(0x7fc0 | (bits >> 16 & 0x8000));
    return (uint16_t)((bits + UINT32_C(0x7fff) + (bits >> 16 & 1)) >> 16);
}

/** IEEE 754 binary16, subnormals included. */
CONVERT_CODE uint16_t convert_to_f16(uint32_t bits)
{
    uint32_t sign = bits >> 16 & 0x8000;
    uint32_t magnitude = bits & UINT32_C(0x7fffffff);
    if (magnitude > UINT32_C(0x7f800000))
        return (uint16_t)(sign | 0x7e00);
    if (magnitude >= UINT32_C(0x477ff000)) /* 65520 rounds beyond the largest, 65504 */
        return (uint16_t)(sign | 0x7c00);
    uint32_t value, lost;
    if (magnitude >= UINT32_C(0x38800000)) { /* 2^-14: a normal number */
        value = (magnitude - UINT32_C(0x38000000)) >> 13;
        lost = magnitude << 19; /* what is shifted out, as a fraction of 2^32 */
    } else {
        uint32_t exponent = magnitude >> 23;
        if (exponent < 102) /* below 2^-25, half of the smallest */
            return (uint16_t)sign;
        uint32_t mantissa = (magnitude & UINT32_C(0x7fffff)) | UINT32_C(0x800000);
        uint32_t shift = 126 - exponent; /* 14 .. 24 */
        value = mantissa >> shift;
        lost = mantissa << (32 - shift);
    }
    value +=
        lost > UINT32_C(0x80000000) || (lost == UINT32_C(0x80000000) && (value & 1));
    return (uint16_t)(sign | value);
}

/** The conversion from @p from to @p to (fanin_dtype): CONVERT_NONE if they are equal, -1 if
    there is none. */
int convert_between(int32_t from, int32_t to);
/** Bytes that @p bytes of source become. */
static inline uint64_t convert_bytes(uint32_t convert, uint64_t bytes)
{
    return convert == CONVERT_NONE ? bytes : bytes / 2;
}
/** @p bytes of source, whole elements, any alignment, no overlap. CONVERT_NONE copies. */
void convert_run(uint32_t convert, void *to, const void *from, size_t bytes);

#endif
