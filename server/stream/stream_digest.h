/* SPDX-License-Identifier: Apache-2.0 */
/** @file A job that is answered by digests of its ranges instead of their bytes, and those that
    were made. */
#ifndef STREAM_DIGEST_H
#define STREAM_DIGEST_H

#include "copy_list.h"
#include "digest.h"
#include "stream/read_job.h"

typedef struct digester {
    bool on;
    uint64_t request;
    uint32_t convert; /**< CONVERT_...: what happens to the bytes first */
    box_digest *sum;
    uint32_t range;  /**< of the job: whose bytes come next */
    uint64_t left;   /**< of it */
    digest *digests; /**< one a range */
    size_t capacity;
} digester;

/** For a job whose ranges are set. NULL, or why not; *code_out says whose fault it is. */
const char *digester_start(digester *d, const job *j, uint64_t request, uint32_t dtype,
                           fanin_status *code_out);
/** The job's next bytes, in its order. */
void digester_add(digester *d, const job *j, const uint8_t *data, size_t size);
/** The same of whole ranges, from the XXH3-64s of their pieces. */
void digester_add_pieces(digester *d, const job *j, const digest_list *made);
size_t digester_memory(const digester *d);
void digester_free(digester *d);

/**
 * Digests that were made, for whoever asks for the same bytes under the same epoch. The epochs of
 * all publications come from one counter that never goes back, and bytes do not change while their
 * epoch stands: what is found is true, and only its epoch is to be looked at before it is told.
 * A table of fixed size, in which newer epochs take the places of older ones. Any thread, the
 * server's lock not held.
 */
typedef struct kept_digests kept_digests;

kept_digests *kept_digests_create(void); /**< NULL: no memory */
void kept_digests_free(kept_digests *k); /**< NULL is fine */
/** The digests of all ranges of the job, converted by @p convert; false: not all are known. */
bool kept_digests_find(kept_digests *k, const job *j, uint32_t convert, digest *out);
/** All bytes of the job were read while its epoch stood. */
void kept_digests_add(fanin_server *s, kept_digests *k, const job *j, uint32_t convert,
                      const digest *digests);

#endif
