/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Reading by process_vm_readv. A source's spans are cut into batches once a plan; threads take
 * batches of any source until there are none, and fill the destination with one call of the kernel
 * or a few each. What changes on its way, or lies in short runs, comes into a slot of the thread
 * first; what goes to devices, into a chunk of the sink.
 */
#ifndef CMA_H
#define CMA_H

#include "device/device_sink.h"
#include "net/threads.h"
#include "path/path.h"
#include "worker_pool.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

/* Another process's memory, which the kernel copies (process_vm_readv), and the proof that it is
   the rank's: its incarnation lies where the rank said. A process that came after it, by exec or
   under its number, has other bytes there, or none. */

#define CMA_IOVECS 1024 /**< of one call, on either side: the kernel's most */

/** A rank's process. */
typedef struct cma_process {
    pid_t pid;        /**< here */
    uint64_t witness; /**< where its incarnation lies, there */
    uint8_t incarnation[16];
} cma_process;

/** 0: it is the rank's. ESTALE: it is another one. Else why it cannot be read, an errno. */
int cma_prove(const cma_process *p);

/** Reads @p from, one behind the other, into @p to, of which there are as many bytes and at most
    CMA_IOVECS each; they are used up. 0, or an errno: then *from[*at].iov_base could not be read,
    or what is left of @p to not be written. */
int cma_read(pid_t pid, struct iovec *to, unsigned n_to, struct iovec *from,
             unsigned n_from, unsigned *at);

/** What an errno of these means, and what can be done; never NULL. */
const char *cma_why(int error);

#define CMA_SPAN_MAX ((uint64_t)512 << 10) /**< bytes of one span, and of one slot */
/** Gaps of at most so many bytes are read along: that costs less than another iovec there. */
#define CMA_GAP 512

/** What a source is read by: its pieces by remote memory, and where batches begin. */
typedef struct cma_detail {
    plan_spans *spans;
    uint64_t bytes;  /**< of all pieces */
    uint64_t *first; /**< n_batches + 1: of spans */
    uint64_t n_batches, capacity;
} cma_detail;

/** One rank's reading in one attempt. */
typedef struct cma_source {
    const cma_detail *detail; /**< NULL: another path's source */
    size_t index, peer;
    const region_entry *regions; /**< those of the lease's arena */
    cma_process process;
    atomic_uint_fast64_t next;  /**< batch that nobody has taken */
    atomic_uint_fast64_t done;  /**< bytes in place */
    atomic_uint_fast64_t calls; /**< of the kernel */
    bool proven;                /**< it was the rank, up to the last byte */
    atomic_bool failed;         /**< the two below do not change any more */
    fanin_status status;
    fanin_error error;
} cma_source;

/** One thread's, or where devices are filled one chunk's. Kept by the client between pulls. */
typedef struct cma_copier {
    worker_job job; /**< first: the pool hands it back */
    struct cma_reading *of;
    bool busy, good;    /**< the pool has it; what it had is read */
    cma_source *source; /**< of the batch that is under way; NULL: none is */
    uint64_t span, end_span, piece; /**< what of it is to be added next */
    uint64_t first;                 /**< piece: those from it to `piece` are added */
    size_t at;                      /**< source that is looked at next */
    unsigned n_to, n_from;
    uint32_t region; /**< of the last of `from` */
    uint64_t scatter_ns;
    size_t used;     /**< of the slot */
    uint8_t *slot;   /**< NULL: not needed yet */
    sink_job *chunk; /**< that is being filled; NULL: none */
    uint8_t gap[CMA_GAP];
    struct iovec to[CMA_IOVECS], from[CMA_IOVECS];
} cma_copier;

typedef struct cma_reading {
    const path_reading *r;
    atomic_bool failed;   /**< some source has */
    pthread_mutex_t lock; /**< who fails first says why */
    unsigned n_copiers;
    cma_copier **copiers;  /**< the client's; the first is the calling thread's */
    unsigned first_thread; /**< of the client's readers, beside the calling one */
    /* where devices are filled */
    worker_pool *pool;
    unsigned busy; /**< copiers that the pool has */
    sink_waiter waiter;
    bool paused; /**< no chunk is free */
    size_t n;
    cma_source sources[];
} cma_reading;

/** What a client keeps between pulls. */
struct cma_end {
    cma_copier
        *copiers[READING_THREADS_MOST + 1]; /**< the first is the calling thread's */
};

/** Takes one step with the batch that the copier is at, or with a new one: a call of the kernel or
    a few. False: none is left, or the reading has failed. */
bool cma_copy(cma_copier *c);

/** Whether something could be done where devices are filled: helpers read into chunks, which
    devices copy from. The calling thread's. */
bool cma_feed(cma_reading *of);
/** What the pool of cma_feed() does: a job's run(). */
void cma_feed_job(worker_job *job);
/** A chunk may be free: a sink_waiter's ready(). */
void cma_on_chunk(sink_waiter *waiter);
/** Gives up what a copier is in the middle of. */
void cma_copier_stop(cma_copier *c);

/** The source cannot be read, by an errno of cma_read() at @p piece (NULL: none) or cma_prove();
    the first reason counts. In any thread. */
void cma_fail_read(cma_source *s, cma_reading *of, int error, const span_piece *piece);

extern const path_reader cma_reader;

#endif
