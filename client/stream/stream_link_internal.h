/* SPDX-License-Identifier: Apache-2.0 */
/** @file What data connections are made of, for their own files. */
#ifndef STREAM_LINK_INTERNAL_H
#define STREAM_LINK_INTERNAL_H

#include "framing.h"
#include "socket.h"
#include "stream/stream_link.h"

#define QUEUE 4        /* requests under way on one connection */
#define MAX_IOVECS 256 /* in one readv */

typedef enum stage { CONNECTING, HELLO, IDLE_OR_FRAME, BODY, SEAL } stage;

typedef struct data_connection {
    loop_source source; /* first: the loop hands it back */
    struct stream_link *link;
    loop *loop;          /* of who reads it */
    stream_share *share; /* the reader's; NULL: it was not dealt */
    stage stage;
    deadline made_by; /* else it is given up, while it is CONNECTING or in HELLO */
    outgoing out;
    tls *tls;              /* NULL: there is none, or not yet */
    uint64_t queue[QUEUE]; /* requests, oldest first */
    unsigned queued;
    uint64_t requests; /* sent, with the hello: the last one's number */
    framing in;        /* but for the bytes that were asked for */
    checksum *sum;     /* sealed: of the reply to a read that is coming, up to now */
    /* where in the oldest request's pieces the bytes that come next belong */
    uint64_t piece, pieces_end, run;
    struct iovec iov[MAX_IOVECS];
    size_t lengths[MAX_IOVECS]; /* of the iovecs, before anything came */
    unsigned n_iov, at_iov;
    size_t iov_left; /* bytes of the batch that have not come */
    bool staged;     /* the batch is one piece in `staging` */
    uint8_t *staging;
    /* what lands on devices: the job that is being filled, and those that were submitted, in
       order: a request is done when all are that hold pieces of it */
    sink_job *job;
    sink_job *first_job, **end_job;
    bool on_device; /* pieces of the oldest request are in jobs */
    sink_waiter waiter;
    bool paused; /* waits for a chunk */
} data_connection;

struct stream_link {
    fanin_client *client;
    const connection *control;
    const tls_end *end; /* as the control connection was secured; NULL: it was not */
    stream_work *work;  /* NULL: idle */
    data_connection *connections[STREAMS_MOST];
    unsigned n;
    unsigned reads; /* under way on one connection; of digests QUEUE */
    bool sealed;    /* frames have checksums */
};

/* stream_link.c */

/** The connection is of no use any more, and the work has failed for that, or for what it says
    already. */
void data_lose(data_connection *d, fanin_status status, int sys_errno,
               const char *what);
/** The same because of the sink, which says what failed. */
void data_lose_device(data_connection *d);
/** Tells the loop what to wait for. */
void data_want(data_connection *d);
/** The sink is through with a job. */
void data_landed(sink_job *job, bool ok);

/* Where a body's bytes go (stream_batch.c). */

/** The oldest request's body begins. */
void batch_begin(data_connection *d);
/** Destinations of the bytes that come next; at least one if any piece is left. False: nothing can
    be received, now or ever. */
bool batch_fill(data_connection *d);
/** So many bytes have come. */
void batch_consume(data_connection *d, size_t bytes);
/** Hands what was received for devices to the sink. */
void batch_submit(data_connection *d);

#endif
