/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A link between readers and one rank that takes their frames apart, alters them, and puts them together
 * again so that only what stands in them is wrong. It has a thread of its own. An edit has six bytes, and as
 * many behind them as it says:
 *
 *   0     bit 0: of a frame to the rank or to the reader; the others: of which one in that direction, counted
 *         over all connections
 *   1     bits 0-3: what is done (edit_kind), the others: how many bytes follow, or are meant
 *   2, 3  where in the frame's body, little-endian; modulo its size
 *   4, 5  a number
 */
#ifndef LYING_LINK_H
#define LYING_LINK_H

#include "buffer.h"
#include <fanin/client.h>
#include <pthread.h>

typedef enum edit_kind {
    EDIT_OVERWRITE, /**< bytes of the body by those that follow */
    EDIT_INSERT,    /**< them into the body */
    EDIT_REMOVE,    /**< so many bytes of the body */
    EDIT_TYPE,      /**< it becomes that of the number */
    EDIT_REQUEST,   /**< the request's number, xor the number */
    EDIT_LENGTH,    /**< that the header tells, xor the number */
    EDIT_TWICE,     /**< the frame comes twice */
    EDIT_CLOSE,     /**< the frame is the last one of the connection */
    EDIT_ACT, /**< no lie: the trainer acts by the number before the frame goes on */
} edit_kind;

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
    uint16_t rank;    /**< the rank's port */
    void (*act)(uint16_t number);
    int listener, wake;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool serves;          /**< between the two calls, and nothing has been at rest */
    bool ends, has_ended; /**< the second one is made; all is closed */
    fanin_client *reader; /**< of now: cancelled when nothing goes on */
    const uint8_t *edits;
    size_t size;
    unsigned accepted, passed[2]; /**< frames by the end that they go to */
    link_pair pairs[LINK_PAIRS];
} lying_link;

/** A link to 127.0.0.1:@p rank, for the rest of the process; @p act is called in its thread. */
void lying_link_start(lying_link *l, uint16_t rank, void (*act)(uint16_t number));
/** @p reader's connections are altered by these edits, which stay the caller's. When nothing has gone either
    way for some milliseconds all are closed, and its call is cancelled; unless there are no edits. */
void lying_link_serve(lying_link *l, fanin_client *reader, const uint8_t *edits,
                      size_t size);
/** No call of that reader is under way. Returns when its connections are closed at both ends. */
void lying_link_end(lying_link *l);

/** Whether one of these edits is more than a trainer that acts. */
bool lying_link_lies(const uint8_t *edits, size_t size);

#endif
