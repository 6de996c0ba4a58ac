/* SPDX-License-Identifier: Apache-2.0 */
/** @file How much a tensor has changed: two of one shape, taken a piece at a time. */
#ifndef CHANGE_H
#define CHANGE_H

#include <fanin/types.h>
#include <stddef.h>
#include <stdint.h>

enum { CHANGE_PIECE = 1024 }; /**< elements, the most that one call takes */

/** Index 0 is of the old tensor, 1 of the new. Norms are Euclidean, of what is finite (of the
    change: of elements that are finite in both); infinite themselves if they are too large for a
    double. */
typedef struct change {
    uint64_t elements;
    uint64_t changed; /**< with other bits; of other dtypes: with another value */
    uint64_t nans[2], infinite[2];
    uint64_t lost; /**< finite in one of both alone */
    double norm[2];
    double norm_of_change;
    double largest; /**< change of an element, absolute */
} change;

/** Adds @p count elements of two dtypes with as many numbers an element (numbers_parts()). */
void change_add(change *c, const fanin_dtype dtypes[2], const uint8_t *const bytes[2],
                size_t count);

/** Norm of the change by the old norm: 0 if nothing has changed; infinite: from zero, or no longer
    finite where it was, or finite where it was not. */
double change_relative(const change *c);

/** Numbers that make an element: 2 of a complex one, real part and imaginary part; else 1. */
unsigned numbers_parts(fanin_dtype dtype);

/** Bytes of @p count packed elements; they must fill whole bytes. */
uint64_t numbers_bytes(fanin_dtype dtype, uint64_t count);

#endif
