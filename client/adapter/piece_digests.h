/* SPDX-License-Identifier: Apache-2.0 */
/** @file The digest of a file that fills in any order, made in threads while it fills. */
#ifndef PIECE_DIGESTS_H
#define PIECE_DIGESTS_H

#include "digest.h"
#include "worker_pool.h"

#include <fanin/error.h>

typedef struct piece_digests piece_digests;

/** Threads for files of @p size bytes together. NULL: out of memory. */
worker_pool *piece_digests_pool(uint64_t size);

/**
 * For @p size bytes at @p base; they and @p pool, which several files may share, outlive the
 * result. Nothing has landed yet. If the pool has no thread, piece_digests_finish() does the work.
 * @p file: the file that is mapped there, whose pieces are on their way to the disk once they are
 * whole, so that memory never holds all of it; -1: when the kernel likes. NULL: out of memory.
 */
piece_digests *piece_digests_start(const uint8_t *base, uint64_t size,
                                   worker_pool *pool, int file);

/**
 * Bytes [offset, offset + length) are final; reported once each. Costs a few nanoseconds, and
 * a lock once for each DIGEST_PIECE. Thread: any, several at once, while none calls another
 * function.
 */
void piece_digests_landed(piece_digests *p, uint64_t offset, uint64_t length);

/** The DIGEST_PIECE bytes at @p offset, a multiple of that, are final and have the digest @p known;
    reported once, instead of piece_digests_landed(). Thread: as that. */
void piece_digests_known(piece_digests *p, uint64_t offset, const digest *known);

/** Everything will land again. Waits until the pool's threads rest, a millisecond or so: of all
    files that share it. */
void piece_digests_restart(piece_digests *p);

/** The XXH3-128 of the pieces' XXH3-128s. False: some bytes did not land, or landed twice. */
bool piece_digests_finish(piece_digests *p, digest *out);

/** Waits until the pool's threads rest, frees. NULL and *p == NULL are fine. */
void piece_digests_stop(piece_digests **p);

#endif
