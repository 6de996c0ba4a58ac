/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Checks the checksums of bodies in threads beside the pulling one, which is what bounds a stream's
 * rate and has no time for them. They live for one read phase.
 */
#ifndef SEAL_CHECKS_H
#define SEAL_CHECKS_H

#include "net/loop.h"
#include "plan/plan.h"
#include "checksum.h"
#include "frame.h"

typedef struct seal_checks seal_checks;

/** A body that comes straight to where it belongs. */
typedef struct sealed_body {
    uint8_t header[FRAME_SIZE];
    uint8_t seal[SEAL_SIZE];
    const plan *plan;    /**< of the pieces */
    const piece *pieces; /**< one behind the other; they land as they come */
    uint32_t n_pieces;
    const uint8_t *base; /**< of pieces[].to; the bytes must stay until the verdict */
    uint64_t bytes;
    void *owner;
    /** In the loop's thread. */
    void (*verdict)(void *owner, uint64_t bytes, bool fits);
} sealed_body;

/** NULL: there is no CPU to spare, or no memory; who receives then checks by itself. */
seal_checks *seal_checks_create(loop *l);
/** For the body that comes next, to be filled in. NULL: the threads do not keep up, or there is no
    memory, or no @p c; who receives then sums the body up by itself, while caches hold the bytes.
    */
sealed_body *seal_checks_take(seal_checks *c);
/** It has come whole: the verdict follows, unless there is an end before. */
void seal_checks_submit(seal_checks *c, sealed_body *body);
/** It does not come. */
void seal_checks_give_back(sealed_body *body);
/** Makes one check that no thread has begun; false: there is none. NULL is fine. */
bool seal_checks_help(seal_checks *c);
/** Drops what has no verdict yet and waits for what is being read: a millisecond or so. NULL and
    *c == NULL are fine. */
void seal_checks_destroy(seal_checks **c);

#endif
