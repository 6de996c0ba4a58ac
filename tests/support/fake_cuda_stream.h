/* SPDX-License-Identifier: Apache-2.0 */
/** @file Streams of the stand-in for the CUDA driver. All is called with the lock held. */
#ifndef FAKE_CUDA_STREAM_H
#define FAKE_CUDA_STREAM_H

#include "fake_cuda_internal.h"

/* Something told to a stream. */
typedef struct op {
    struct op *next;
    enum { OP_COPY, OP_FILL, OP_KERNEL, OP_HOST, OP_CALLBACK, OP_RECORD, OP_WAIT } kind;
    uint64_t to, from, length;
    uint8_t value;
    uint8_t *staged; /**< copied already: pageable memory, as it was */
    fake_launch *launch;
    CUhostFn host;
    CUstreamCallback callback;
    void *cookie;
    CUevent event;
    uint64_t turn; /* which of the event's records */
} op;

struct CUstream_st {
    CUcontext context;
    CUstream next; /* of the context */
    pthread_t thread;
    op *first, **last;
    uint64_t queued, finished; /* operations, ever */
    bool held, dying, is_default, ended;
};

struct CUevent_st {
    CUcontext context;
    uint64_t recorded, reached; /* turns */
    unsigned uses;              /* by queued operations, and by its owner */
};

/** Queues a copy of @p like. */
CUresult fake_queue(CUstream s, op like);
/** Waits until the stream has done its first @p turn operations. */
CUresult fake_wait_for(CUstream s, uint64_t turn);
/** Any context's stream; the defaults are those of the current one. NULL: none. */
CUstream fake_find_stream(CUstream handle);
/** The stream of a function that needs any context to be current; takes the lock, as
    fake_enter(). Default streams are those of the current context. */
CUresult fake_enter_stream(const char *function, CUstream handle, CUstream *out);
bool fake_is_idle(const struct CUctx_st *context);
void fake_put_event(CUevent event);
/** Ends the holding of streams that were destroyed meanwhile. */
void fake_release_zombies(const struct CUctx_st *context);

#endif
