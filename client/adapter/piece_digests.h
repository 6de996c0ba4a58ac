/* SPDX-License-Identifier: Apache-2.0 */
/** @file The digest of a file that fills in any order, made in threads while it fills. */
#ifndef PIECE_DIGESTS_H
#define PIECE_DIGESTS_H

#include "digest.h"

#include <fanin/error.h>

typedef struct piece_digests piece_digests;

/**
 * For @p size bytes at @p base, both of which outlive the result. Nothing has landed yet. If no
 * thread can be had, piece_digests_finish() does the work. NULL: out of memory.
 */
piece_digests *piece_digests_start(const uint8_t *base, uint64_t size);

/**
 * Bytes [offset, offset + length) are final; reported once each. Costs a few nanoseconds, and
 * a lock once for each DIGEST_PIECE. Thread: one, the same that calls the functions below.
 */
void piece_digests_landed(piece_digests *p, uint64_t offset, uint64_t length);

/** Everything will land again. Waits until nothing reads @p base, a millisecond or so. */
void piece_digests_restart(piece_digests *p);

/** The XXH3-128 of the pieces' XXH3-128s. False: some bytes did not land, or landed twice. */
bool piece_digests_finish(piece_digests *p, digest *out);

/** Ends the threads, frees. NULL and *p == NULL are fine. */
void piece_digests_stop(piece_digests **p);

#endif
