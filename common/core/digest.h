/* SPDX-License-Identifier: Apache-2.0 */
/** @file XXH3-128 digests (xxhash, canonical big-endian form) and random bytes. */
#ifndef DIGEST_H
#define DIGEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* XXH3-64 (seed 0), by the widest instructions that the CPU has. */

uint64_t checksum_of(const void *data, size_t size);

/** The same of bytes that come piece by piece. */
typedef struct checksum checksum;

checksum *checksum_create(void); /**< of nothing yet; NULL: no memory */
void checksum_free(checksum *c); /**< NULL is fine */
void checksum_reset(checksum *c);
void checksum_add(checksum *c, const void *data, size_t size);
uint64_t checksum_get(const checksum *c); /**< of what was added; more may be */

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
/** So many bytes of two hex digits each, of either case. False: one of them is no digit, and
    nothing behind it was looked at. */
bool hex_read(const char *text, uint8_t *out, size_t size);

/** getrandom(2), retried; false only if the kernel has none. */
bool random_bytes(void *out, size_t size);

/*
 * The digest by which a rank and a client compare what they hold (PROTOCOL.md, "digest"): XXH3-64
 * of each piece of 4 KiB, XXH3-128 of those. Pieces do not depend on each other.
 */

#define BOX_DIGEST_PIECE 4096

typedef struct box_digest box_digest;

/** How many pieces so many bytes have. */
static inline uint64_t box_digest_pieces(uint64_t length)
{
    return length / BOX_DIGEST_PIECE + (length % BOX_DIGEST_PIECE > 0);
}

/** NULL: no memory. */
box_digest *box_digest_create(void);
void box_digest_free(box_digest *d); /**< NULL is fine */
/** More bytes; @p convert (CONVERT_...): what they become first. */
void box_digest_add(box_digest *d, const void *data, size_t size, uint32_t convert);
/** @p length bytes more, of which somebody else has made the XXH3-64s of their pieces; they begin a
    piece, and nothing follows if they do not end one. */
void box_digest_add_pieces(box_digest *d, const uint64_t *pieces, uint64_t length);
/** Of all that was added since the last one, which is forgotten. */
digest box_digest_take(box_digest *d);

#endif
