/* SPDX-License-Identifier: Apache-2.0 */
/** @file One read request: from its entries to the iovecs of its reply. */
#ifndef READ_JOB_H
#define READ_JOB_H

#include "copy_list.h"
#include "digest.h"
#include "guarded.h"
#include "guests/admission.h"
#include "publish/lease.h"
#include <sys/uio.h>

#define SEND_MOST ((size_t)1 << 20) /**< bytes of one sendmsg */
#define IOVEC_MOST 1024
#define GATHER_RUN 64 /**< shorter contiguous runs are copied together first */

/** Bytes that lie one behind the other when all boxes are packed in the order of the box
    table; `box` holds the first of them. */
typedef struct job_range {
    uint64_t at, length, box;
    uint64_t whole; /**< length at first */
} job_range;

/** A read that is being answered. Zeroed: none. */
typedef struct job {
    publication *of;
    uint64_t epoch;
    uint32_t first_region; /**< of the lease */
    bool fills;            /**< what is not proven may not be read (filling.h) */
    bool is_patch;         /**< the catalog is a patch's (patches.h) */
    uint8_t token[16];
    uint64_t request;
    shard_catalog *catalog; /**< with a reference */
    bool is_void;           /**< the epoch has gone: the rest of the reply is zeros */
    bool is_staged;         /**< some of it is device memory: stage.h */
    bool header_due;        /**< staged: the reply's header waits for the first bytes */
    /** what is left of ranges[current] shrinks as bytes leave, or are gathered into a chunk */
    job_range *ranges;
    uint32_t n_ranges, current;
    size_t capacity;
    uint64_t left;       /**< bytes of the reply that have not left yet */
    uint64_t ungathered; /**< staged: ... that are in no chunk yet */
} job;

/** What one sendmsg sends. */
typedef struct gather {
    struct iovec iov[IOVEC_MOST];
    int n;
    size_t bytes, most;
    bool
        copies; /**< the process reads it itself, so that all of the job is copied first */
    bool failed;                     /**< what follows cannot be read */
    struct iovec runs[GUARDED_RUNS]; /**< to be copied together */
    int n_runs;
    size_t run_bytes;
    guarded bounce; /**< SEND_MOST bytes */
    size_t bounced;
} gather;

/**
 * Turns entries into ranges, of @p most bytes together; checks each against the job's catalog, or
 * that of the patch which the first one names, the job's from then on. FANIN_ERR_ARGUMENT with a
 * static sentence in *why, FANIN_ERR_STALE of a patch that is not there, FANIN_ERR_MEMORY. Takes
 * the lock for patches.
 */
fanin_status job_set_ranges(fanin_server *s, job *j, const msg_read *m, uint64_t most,
                            const char **why);
size_t job_memory(const job *j);
/** Gives the catalog back, keeps the array. */
void job_end(fanin_server *s, job *j);
void job_free(fanin_server *s, job *j);

/** False: full. Bytes that follow the last ones in memory extend its iovec. */
bool gather_add(gather *g, const void *data, size_t size);
/** Adds as much of the reply as fits, up to the first byte that cannot be read: then failed is set,
    unless nothing is copied but short runs and those before it fill the gather. */
void job_gather(const job *j, gather *g);
/** Adds to @p sum the @p bytes behind the first @p skip of what was gathered. */
void gather_sum(const gather *g, size_t skip, uint64_t bytes, checksum *sum);
/** Adds zeros for the rest of the reply. */
void job_gather_zeros(const job *j, gather *g);
/** @p bytes of the reply have left. */
void job_advance(job *j, uint64_t bytes);
/** Moves the ranges on by @p bytes, or back. */
void job_skip(job *j, uint64_t bytes);
void job_rewind(job *j, uint64_t bytes);
/** Whether nothing has left yet, nor been gathered. */
static inline bool job_is_whole(const job *j)
{
    return j->current == 0 && j->ranges[0].length == j->ranges[0].whole;
}
/** Whether any of the reply is device memory. */
bool job_needs_stage(const job *j);

static inline uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/** Of a box's packed bytes those that come next: whole runs at equal distances, or a part of one.
    */
typedef struct stretch {
    int64_t at; /**< from the box's first byte */
    uint64_t size, runs;
    int64_t step; /**< from run to run */
} stretch;
/** From @p offset on, at most @p room bytes, more than 0, of a box that is packed or has a view. */
stretch stretch_of(const job *j, const source_box *b, uint64_t offset, uint64_t room);

/** Bytes [offset, offset + length) of box @p b; false: enough. */
typedef bool (*job_piece_fn)(void *cookie, const job *j, const source_box *b,
                             uint64_t offset, uint64_t length);
/** Calls @p fn for what has not left yet, in the reply's order. */
static inline void job_each(const job *j, job_piece_fn fn, void *cookie)
{
    const shard_catalog *catalog = j->catalog;
    for (uint32_t i = j->current; i < j->n_ranges; i++) {
        uint64_t at = j->ranges[i].at, end = at + j->ranges[i].length;
        for (const source_box *b = &catalog->boxes[j->ranges[i].box]; at < end; b++) {
            uint64_t stop = b[1].start < end ? b[1].start : end;
            if (!fn(cookie, j, b, at - b->start, stop - at))
                return;
            at = stop;
        }
    }
}

/**
 * Announces that the memory of that epoch is about to be read; false: the epoch has gone, and
 * nothing may be read. Each success is to be followed by publication_read_leave() when nothing
 * reads it any more. This takes the server's lock, the other needs it.
 */
bool bracket_enter(fanin_server *s, publication *of, uint64_t epoch);

/* A job that is answered by digests of its ranges instead of their bytes, and those made. */

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
