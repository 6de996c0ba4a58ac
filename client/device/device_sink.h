/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Landing in CUDA memory what came by a path that ends in host memory or in a staging slot
 * (stream, cma, rdma): pieces lie packed in a chunk that the device can read, and the copy kernel
 * takes them to their places while the next chunk arrives. Chunks are few and bound the memory.
 *
 * All functions are for the pulling thread; none but device_sink_recall() and _destroy() waits for
 * a device.
 */
#ifndef DEVICE_SINK_H
#define DEVICE_SINK_H

#include "block.h"
#include "device/devices.h"
#include "gpu.h"
#include "array.h"
#include "net/loop.h"

typedef struct device_sink device_sink;

/**
 * For the @p ranges (ascending, disjoint, kept by the caller) that are CUDA memory; everything
 * on devices comes after the work that is on @p after now (its handle may be NULL). *out NULL:
 * all is host memory, nothing was made.
 */
fanin_status device_sink_create(gpu *g, const memory_range *ranges, size_t n,
                                const fanin_stream *after, device_sink **out,
                                fanin_error *error);
/** Waits for the copies under way; NULL is fine. True: nothing writes the destinations any more.
    False: a device did not finish in time; what it writes and reads must never be freed. */
bool device_sink_destroy(device_sink **sink);
/** The device that holds @p to, -1: host memory. @p sink may be NULL. */
int device_sink_device(const device_sink *sink, const void *to);
/** Whether a device or the driver has failed, which is final: @p error (may be NULL) says which
    and how. @p sink may be NULL. */
bool device_sink_failed(const device_sink *sink, fanin_error *error);

/* ------------------------------------------ for the files that receive */

/** Streams, a place in @p l and the client's pinned memory (*pool is made if need be); only the
    first call does something. False: device_sink_failed(). */
bool device_sink_attach(device_sink *sink, loop *l, device_memory **pool);
/** Whether the work that everything has to come after is done: others than the sink (an RDMA
    adapter) may write the destinations. The loop turns when it gets there. */
bool device_sink_ready(const device_sink *sink);
gpu *device_sink_gpu(const device_sink *sink);
/** Ends everything with @p error; the first one counts. */
void device_sink_fail(device_sink *sink, const fanin_error *error);

/** A copy of several pieces. */
typedef struct sink_job sink_job;
/** Called once for each job that was submitted and not recalled, by the loop. The job is the
    owner's again, not its chunk's: sink_job_give(). @p ok false: device_sink_failed(). */
typedef void (*sink_done_fn)(sink_job *job, bool ok);

typedef struct sink_item sink_item;
struct sink_job {
    /* the owner's, at will */
    sink_job *next;
    void *owner;
    uint64_t requests, bytes;
    bool finished;
    /* the sink's */
    device_sink *sink;
    pool_chunk *chunk;   /* NULL: the bytes lie elsewhere */
    size_t used;         /* of the chunk's bytes */
    copy_entry *entries; /* pinned */
    size_t n_entries, max_entries, expected;
    sink_item *items;
    size_t n_items, max_items;
    gpu_table **tables; /* a device, for what does not fit the entries */
    unsigned running;   /* devices at work; under the signal's lock */
    bool broken;        /* one of them has failed; likewise */
    sink_done_fn done;
    sink_job *later; /* in the sink's list */
};

/** A job with an empty chunk. NULL: none is free now, or device_sink_failed(). */
sink_job *device_sink_take(device_sink *sink, void *owner);
/** Where the next piece's @p length packed bytes are to be put, which then go to @p to as @p view
    says (NULL: contiguous, as they are; kept by the caller). NULL: the job is full, or memory is
    short; never full if nothing is in it. */
uint8_t *sink_job_place(sink_job *job, uint64_t length, uint8_t *to,
                        const strided *view);
/** Gives an own job (and what was placed in it) back, at any time but between device_sink_submit()
    and done. */
void sink_job_give(sink_job *job);

/** Makes a job of @p area (of the pool) for bytes that lie in memory of the owner; items as by
    sink_job_add(). sink_job_give() frees what it grew, not the job itself. */
void sink_job_init(sink_job *job, device_sink *sink, unsigned area, void *owner);
/** @p length packed bytes at @p from; false: memory is short. */
bool sink_job_add(sink_job *job, const uint8_t *from, uint64_t length, uint8_t *to,
                  const strided *view);
/** Forgets the items; the job is as after sink_job_init(). */
void sink_job_clear(sink_job *job);

/** Starts the copies, or queues the start. Never calls @p done itself. */
void device_sink_submit(sink_job *job, sink_done_fn done);
/** Waits for what runs for @p owner and forgets what does not run yet; done is not called, jobs
    with chunks are given back. False: a device did not finish. */
bool device_sink_recall(device_sink *sink, const void *owner);

/** Embedded in who waits for a chunk; zeroed: does not wait. */
typedef struct sink_waiter {
    struct sink_waiter *next, **link;
    void (*ready)(struct sink_waiter *waiter);
} sink_waiter;

/** ready() is called once, by the loop, when a chunk may be free or the sink has failed. */
void device_sink_wait(device_sink *sink, sink_waiter *waiter);
void device_sink_unwait(sink_waiter *waiter);       /**< fine if it does not wait */
bool device_sink_is_short(const device_sink *sink); /**< somebody waits */

#endif
