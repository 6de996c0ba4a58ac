/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A link between readers and one rank that alters what passes (link_pair.h). It has a thread of its
 * own.
 */
#ifndef LYING_LINK_H
#define LYING_LINK_H

#include "link_pair.h"
#include "socket.h"
#include <fanin/client.h>
#include <pthread.h>

#define LINK_PAIRS 8

typedef struct lying_link {
    char address[32];         /**< that readers connect to */
    socket_address ranks[2];  /**< the rank's, by TCP and by its Unix name */
    socket_address name;      /**< the link's Unix name */
    const tls_end *played[2]; /**< by the end that they lead to: link_pair_open() */
    void (*act)(void *cookie, uint16_t number);
    void *cookie;
    int listeners[2], wake; /**< by TCP, by the Unix name, or -1 */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool serves;          /**< from lying_link_serve() on, until all are closed */
    bool stays;           /**< they are not closed when nothing goes on */
    bool ends, has_ended; /**< the second one is made; all is closed */
    fanin_client *reader; /**< of now: cancelled whenever nothing goes on */
    unsigned accepted;
    link_talk talk;
    link_pair pairs[LINK_PAIRS];
} lying_link;

/** A link to 127.0.0.1:@p rank, for the rest of the process; @p act is called in its thread. @p
    played: as the rank, and as a reader, when it speaks TLS; both outlive it. NULL: it does not. */
void lying_link_start(lying_link *l, uint16_t rank, tls_end *const played[2],
                      void (*act)(void *cookie, uint16_t number), void *cookie);
/** What readers find. */
typedef enum link_kind {
    LINK_BY_TCP,
    LINK_BY_NAME, /**< it has the Unix name of its address, too, as a rank of this host has */
    LINK_RECORDS, /**< by TCP: it alters the records of TLS, not frames */
    LINK_NOISY,   /**< by TCP: checksums are not those of what it has altered */
} link_kind;

/** What @p reader and the rank say, counted over all its connections, is altered by these edits,
    which stay the caller's. Whenever nothing has gone either way for some milliseconds its call is
    cancelled and, unless the link @p stays, all are closed and no more accepted; not if there are
    no edits. */
void lying_link_serve(lying_link *l, fanin_client *reader, edits edits, link_kind kind,
                      bool stays);
/** A link that stays alters nothing more. What it has done to its connections it has done. */
void lying_link_mend(lying_link *l);
/** No call of that reader is under way. Returns when its connections are closed at both ends. */
void lying_link_end(lying_link *l);

#endif
