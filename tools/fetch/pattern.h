/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The bytes that `serve` publishes and `pull --check-pattern` proves: little-endian 8-byte
 * word i of a tensor's row-major bytes at step s is
 *     splitmix64(XXH3_64(key) + s * 0x9E3779B97F4A7C15 + i)
 * with the whole key ("lora:<run>:<name>"). Every byte tells tensor, step and place. Where ranks or
 * pulls convert F32, the pattern is converted as well.
 */
#ifndef PATTERN_H
#define PATTERN_H

#include <fanin/types.h>
#include <stddef.h>
#include <stdint.h>

/** Metadata pair by which a publication says that it follows the pattern. */
#define PATTERN_PAIR_KEY "fanin_pattern"
#define PATTERN_PAIR_VALUE "splitmix64-xxh3"

/** And by which it names the dtype of those bytes: tensors of another one (a cast by the ranks or
    by the pull) are the pattern's elements, converted. */
#define PATTERN_DTYPE_KEY "fanin_pattern_dtype"

/** XXH3_64 of the whole key. */
uint64_t pattern_seed(const char *key);

/** What word 0 at @p step is made of. */
uint64_t pattern_start(uint64_t seed, uint64_t step);

/** Writes the tensor's bytes [offset, offset + size) to @p out. */
void pattern_fill(void *out, uint64_t start, uint64_t offset, size_t size);

/** Index of the first of @p size bytes that is not the tensor's; @p size: all are. */
size_t pattern_compare(const void *bytes, uint64_t start, uint64_t offset, size_t size);

/** Whether @p from becomes @p to here: F32 to BF16 or F16. */
bool half_converts(fanin_dtype from, fanin_dtype to);

/** Rounds @p count elements to the nearest, ties to even, to FANIN_DTYPE_BF16 or _F16: too large
    is infinite, any NaN is 0x7fc0 or 0x7e00 with its sign. Both little-endian, any alignment. */
void half_convert(fanin_dtype to, uint8_t *out, const uint8_t *in, size_t count);

#endif
