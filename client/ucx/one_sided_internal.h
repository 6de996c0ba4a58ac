/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Reading by one-sided gets: spans are fetched into registered staging slots, or straight
 * into registered destinations, and scattered from there. The server takes no part.
 */
#ifndef ONE_SIDED_INTERNAL_H
#define ONE_SIDED_INTERNAL_H

#include "device/device_sink.h"
#include "worker_pool.h"
#include "ucx/ucx_end.h"

/** One rank's reading in one attempt. */
typedef struct one_sided_work {
    size_t peer;
    uint32_t rank;
    const region_table *regions;
    ucx_rkey *const *rkeys;  /**< one a region */
    const plan_spans *spans; /**< NULL: another path's source */
    /** added to the spans' regions: which of the regions and rkeys hold the bytes */
    uint32_t first_region;
    uint64_t next_span, done_spans, bytes; /**< bytes: fetched */
    bool failed; /**< if device_sink_failed() too, no other attempt would mend it */
    fanin_error error;
} one_sided_work;

typedef struct one_sided one_sided;

/** Gets under way that land directly: bounds what a failing endpoint has to drain. */
#define MAX_DIRECT 64

typedef struct get {
    worker_job job; /* first: the pool hands it back */
    sink_job copy;  /* the part of a staged one that lands on devices */
    struct one_sided *reader;
    uint64_t scatter_ns;
    one_sided_work *work;
    const span *span;
    uint8_t *slot;          /* of the staged ones */
    const ucx_local *local; /* that the slot is in */
    int device;             /* that the get writes to, -1: host memory */
    bool busy, direct;
    bool to_host, to_devices; /* where its pieces go */
    unsigned parts;           /* still being copied out of the slot */
} get;

/* Gets that can be under way: slots of host memory, direct ones, slots of each device. */
#define FIRST_DIRECT ((size_t)STAGING_SLOTS)
#define FIRST_DEVICE ((size_t)STAGING_SLOTS + MAX_DIRECT)

struct one_sided {
    const path_reading *r;
    ucx_end *end;
    size_t n, turn;
    uint64_t bytes; /* to be fetched */
    ucx_local *
        *locals; /* of each range of the destination, NULL: it is not registered */
    size_t n_locals;
    int context; /* a device whose memory UCX writes to, -1: none */
    get *gets;
    size_t n_gets;
    size_t outstanding; /* gets that have not called back */
    size_t scattering;  /* slots that have been handed to the pool */
    worker_pool *pool;
    uint64_t scatter_ns;
    loop_source source;
    one_sided_work works[]; /* one a source */
};

/* What gets land in (one_sided_memory.c). */

/** The client's staging of host memory: made by the first pull, kept until its UCX end goes. */
fanin_status one_sided_make_staging(ucx_end *end, fanin_error *error);
/** o->gets with their slots. What fails may be left half made. */
fanin_status one_sided_make_gets(one_sided *o, fanin_error *error);
/** Registers what can be registered of the destination. */
void one_sided_register(one_sided *o);

/* Out of the slots (one_sided_land.c). */

void work_fail(const one_sided *o, one_sided_work *w, const char *what);
/** The pool's: in any thread. */
void get_scatter(worker_job *job);
/** The slot is filled: to the threads, to the devices, or to both. */
void get_distribute(one_sided *o, get *g);
/** The span's bytes are in place. */
void get_finish(one_sided *o, get *g);
/** What an adapter wrote to a device is to be seen by what runs there from now on. False: the work
    has failed. */
bool get_flush(one_sided *o, const get *g);
/** Takes what the pool is through with; true: there was something. */
bool get_collect(one_sided *o);

#endif
