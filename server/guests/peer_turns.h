/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Who waits for a share that is common to all strangers: connections, in the order of their peers.
 * Each peer has one turn, then the next peer has, so that many connections get no more than one.
 * Everything of a queue belongs to one thread.
 */
#ifndef PEER_TURNS_H
#define PEER_TURNS_H

#include "guests/peer.h"

/** A connection's place in a queue. Zeroed: it has none. */
typedef struct peer_turn {
    bool waits;
    void *of;               /**< the connection */
    const peer_share *from; /**< its peer, which is there for as long as it waits */
    struct peer_turn *next; /**< of the same peer */
    struct peer_turn *last; /**< first of its peer: that peer's last */
    struct peer_turn
        *next_peer; /**< first of its peer: the first of the peer after it */
} peer_turn;

/** Zeroed: empty. */
typedef struct peer_turns {
    peer_turn *first, *last; /**< the first of each peer */
    size_t n;                /**< that wait */
} peer_turns;

/** @p t gets the last place of its peer, and a peer that had none the last of all. */
void turns_append(peer_turns *q, peer_turn *t, void *of, const peer_share *from);
/** Whoever @p t is of waits no longer. */
void turns_leave(peer_turns *q, peer_turn *t);
/** The first peer's first that may go on leaves the queue, and its peer goes behind all others;
    NULL: none may. Of each peer only the first is asked. */
void *turns_next(peer_turns *q, bool (*may_go_on)(void *cookie, void *of),
                 void *cookie);

#endif
