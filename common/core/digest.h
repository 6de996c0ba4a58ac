/* SPDX-License-Identifier: Apache-2.0 */
/** @file XXH3-128 digests (xxhash, canonical big-endian form) and random bytes. */
#ifndef DIGEST_H
#define DIGEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DIGEST_SIZE 16
#define DIGEST_PIECE ((uint64_t)4 << 20) /**< pieces of a file digest */

typedef struct digest {
    uint8_t bytes[DIGEST_SIZE];
} digest;

digest digest_of(const void *data, size_t size);
/** The digest whose words, as XXH3-128 computes them, are @p low and @p high. */
digest digest_of_words(uint64_t low, uint64_t high);
bool digest_equal(const digest *a, const digest *b);
/** 32 hex digits and a NUL. */
void digest_hex(const uint8_t bytes[16], char out[33]);

/** getrandom(2), retried; false only if the kernel has none. */
bool random_bytes(void *out, size_t size);

#endif
