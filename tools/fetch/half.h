/* SPDX-License-Identifier: Apache-2.0 */
/** @file What F32 elements become as BF16 or F16, worked out apart from the library. */
#ifndef HALF_H
#define HALF_H

#include <fanin/types.h>

/** Whether @p from becomes @p to here: F32 to BF16 or F16. */
bool half_converts(fanin_dtype from, fanin_dtype to);

/** Rounds @p count elements to the nearest, ties to even, to FANIN_DTYPE_BF16 or _F16: too large
    is infinite, any NaN is 0x7fc0 or 0x7e00 with its sign. Both little-endian, any alignment. */
void half_convert(fanin_dtype to, uint8_t *out, const uint8_t *in, size_t count);

#endif
