/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A link between readers and one rank that takes their frames apart, alters them, and puts them together
 * again so that only what stands in them is wrong. It has a thread of its own.
 */
#ifndef LYING_LINK_H
#define LYING_LINK_H

#include "edits.h"
#include "socket.h"
#include <fanin/client.h>
#include <pthread.h>

#define LINK_PAIRS 8

/** A reader's connection and the one to the rank that belongs to it. */
typedef struct link_pair {
    int fds[2];     /**< by the end that they lead to; -1: free */
    buffer come[2]; /**< not yet passed on, by the end that it goes to */
    bool begun[2];  /**< the hello has been passed on; its answer */
    buffer hello;   /**< as the reader said it */
    bool sealed;    /**< the ends have agreed on checksums */
} link_pair;

typedef struct lying_link {
    char address[32]; /**< that readers connect to */
    socket_address rank;
    void (*act)(uint16_t number);
    int listener, wake;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool serves;          /**< between the two calls, and nothing has been at rest */
    bool ends, has_ended; /**< the second one is made; all is closed */
    fanin_client *reader; /**< of now: cancelled when nothing goes on */
    edits edits;
    unsigned accepted, passed[2]; /**< frames by the end that they go to */
    link_pair pairs[LINK_PAIRS];
} lying_link;

/** A link to 127.0.0.1:@p rank, for the rest of the process; @p act is called in its thread. */
void lying_link_start(lying_link *l, uint16_t rank, void (*act)(uint16_t number));
/** Frames of @p reader, counted over all its connections, are altered by these edits, which stay the caller's.
    When nothing has gone either way for some milliseconds all are closed, and its call is cancelled; unless
    there are no edits. */
void lying_link_serve(lying_link *l, fanin_client *reader, edits edits);
/** No call of that reader is under way. Returns when its connections are closed at both ends. */
void lying_link_end(lying_link *l);

#endif
