/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The digest by which a rank and a client compare what they hold (PROTOCOL.md, "digest"): XXH3-64
 * of each piece of 4 KiB, XXH3-128 of those. Pieces do not depend on each other.
 */
#ifndef BOX_DIGEST_H
#define BOX_DIGEST_H

#include "digest.h"

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
