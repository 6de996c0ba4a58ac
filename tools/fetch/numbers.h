/* SPDX-License-Identifier: Apache-2.0 */
/** @file Elements of every dtype as numbers. */
#ifndef NUMBERS_H
#define NUMBERS_H

#include <fanin/types.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** Numbers that make an element: 2 of a complex one, real part and imaginary part; else 1. */
unsigned numbers_parts(fanin_dtype dtype);

/** Bytes of @p count packed elements; they must fill whole bytes. */
uint64_t numbers_bytes(fanin_dtype dtype, uint64_t count);

/** The elements' bits, each in a word of its own. Elements of less than a byte follow each other
    from a byte's low bits on. Little-endian, any alignment. */
void numbers_bits(fanin_dtype dtype, const uint8_t *in, size_t count, uint64_t *out);

/** What such bits mean; numbers_parts() numbers an element. Integers of 64 bits are rounded. Not
    for several threads: tables are made when a dtype first comes. */
void numbers_values(fanin_dtype dtype, const uint64_t *bits, size_t count, double *out);

/** @p b - @p a of two integers of 64 bits, rounded once; false: the dtype is another, whose values
    subtract exactly enough. */
bool numbers_difference(fanin_dtype dtype, uint64_t a, uint64_t b, double *out);

#endif
