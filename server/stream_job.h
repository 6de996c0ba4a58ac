/* SPDX-License-Identifier: Apache-2.0 */
/** @file One read request: from its entries to the iovecs of its reply. */
#ifndef STREAM_JOB_H
#define STREAM_JOB_H

#include "server_internal.h"

#include <sys/uio.h>

#define SEND_MOST ((size_t)1 << 20) /**< bytes of one sendmsg */
#define IOVEC_MOST 1024
#define GATHER_RUN 64 /**< shorter contiguous runs are copied together first */

/** Bytes that lie one behind the other when all boxes are packed in the order of the box
    table; `box` holds the first of them. */
typedef struct job_range {
    uint64_t at, length, box;
} job_range;

/** A read that is being answered. Zeroed: none. */
typedef struct job {
    publication *of;
    uint64_t epoch;
    snapshot *catalog; /**< with a reference */
    bool is_void;      /**< the epoch has gone: the rest of the reply is zeros */
    job_range *ranges; /**< what is left of ranges[current] shrinks as bytes leave */
    uint32_t n_ranges, current, capacity;
    uint64_t left; /**< bytes of the reply that have not left yet */
} job;

/** What one sendmsg sends. */
typedef struct gather {
    struct iovec iov[IOVEC_MOST];
    int n;
    size_t bytes, most;
    uint8_t *bounce; /**< SEND_MOST bytes */
    size_t bounced;
} gather;

/**
 * Turns entries into ranges; checks each against the catalog. FANIN_ERR_ARGUMENT with a
 * static sentence in *why, FANIN_ERR_MEMORY. Uses the job's catalog.
 */
fanin_status job_set_ranges(job *j, const msg_read *m, const char **why);
size_t job_memory(const job *j);
/** Gives the catalog back, keeps the array. */
void job_end(job *j);
void job_free(job *j);

/** False: full. Bytes that follow the last ones in memory extend its iovec. */
bool gather_add(gather *g, const void *data, size_t size);
/** Adds as much of the reply as fits; reads the tensors' memory only for short runs. */
void job_gather(const job *j, gather *g);
/** Adds zeros for the rest of the reply. */
void job_gather_zeros(const job *j, gather *g);
/** @p bytes of the reply have left. */
void job_advance(job *j, uint64_t bytes);

#endif
