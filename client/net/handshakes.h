/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Threads that compute TLS handshakes while a client connects to many ranks, which the thread of
 * its loop would do one after the other. They live as long as connecting takes, so that nothing of
 * a client runs between calls.
 */
#ifndef HANDSHAKES_H
#define HANDSHAKES_H

#include "net/loop.h"
#include "tls.h"
#include "worker_pool.h"

typedef struct handshakes handshakes;

/** Embedded in what is shaken hands with; zeros at first. */
typedef struct handshake {
    worker_job job; /**< first: the pool hands it back */
    tls *tls;
    tls_step step; /**< what came of it */
    bool is_out; /**< nobody else may touch the tls; the loop's thread sets and looks */
    /** In the loop's thread, when it is not out any more. @p made: a thread has gone on with it as
        far as the socket let it, see `step`; else none has come to it. */
    void (*back)(struct handshake *h, bool made);
} handshake;

/** @p threads of them, fewer if no more can be had. NULL: there is none, or no memory; the caller
    shakes hands himself. */
handshakes *handshakes_open(loop *l, unsigned threads);
/** Has a thread go on with a handshake that is not out. */
void handshakes_go_on(handshakes *all, handshake *one);
/** All are handed back: those that no thread has begun at once, the others within the millisecond
    or so that one takes. Ends the threads. *of NULL is fine. */
void handshakes_close(handshakes **of);

#endif
