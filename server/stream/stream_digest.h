/* SPDX-License-Identifier: Apache-2.0 */
/** @file A job that is answered by digests of its ranges instead of their bytes. */
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

#endif
