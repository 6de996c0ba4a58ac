/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Checksums of what is sent, made by a thread of their own while sendmsg copies the same bytes:
 * both
 * have ended before begin_update goes on.
 */
#ifndef STREAM_SUM_H
#define STREAM_SUM_H

#include "digest.h"
#include "stream/read_job.h"

typedef struct side_sum side_sum;

/** NULL: there is no CPU to spare, or no memory; who sends then adds up by itself. */
side_sum *side_sum_create(void);
/** NULL and *s == NULL are fine. */
void side_sum_destroy(side_sum **s);

/** Begins to add to @p sum the @p bytes behind the first @p skip of what was gathered. Until
    side_sum_end() both stay as they are. */
void side_sum_begin(side_sum *s, checksum *sum, const gather *g, size_t skip,
                    uint64_t bytes);
/** Waits for the thread, or does its work if it has not begun. @p sent: of the bytes, those that
    have left; no others are in the sum then. */
void side_sum_end(side_sum *s, uint64_t sent);

/** The same in the calling thread. */
void gather_sum(const gather *g, size_t skip, uint64_t bytes, checksum *sum);

#endif
