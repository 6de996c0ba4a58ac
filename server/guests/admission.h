/* SPDX-License-Identifier: Apache-2.0 */
/** @file Who may connect, how many, for how long, and how much memory all of them may take. */
#ifndef ADMISSION_H
#define ADMISSION_H

#include "guests/peer.h"

#define STALL_MS 10000   /**< a peer that owes room for bytes so long is dropped */
#define LINGER_MS 1000   /**< a refused peer gets so long to read why */
#define REFUSED_PEERS 16 /**< connections that are only told why, beyond max_sessions */

/** Whether there is one more, and if not, whose the others are. */
typedef enum admission_room {
    ROOM_LEFT,
    ROOM_NOT_FOR_PEER, /**< it has its share */
    ROOM_NONE,
} admission_room;

/** Control sessions: one network peer gets at most half of all connections, but never less than
    two, one for control and one for data, and half of these are for sessions. Lock held. */
admission_room sessions_left(const fanin_server *s, const peer_share *from);
/** What makes room for more connections. */
const char *sessions_remedy(const fanin_server *s);
/** Who a connection comes from. */
typedef struct newcomer {
    peer_share *share;   /**< NULL only without memory */
    unsigned differs;    /**< in what it is none of the server's own (neighbour.h) */
    admission_room room; /**< of FANIN_ERR_LIMIT: whose the connections are */
} newcomer;

/** Why a connection is refused: FANIN_ERR_AUTH, LIMIT, CLOSED or MEMORY with a sentence. On
    FANIN_OK it is counted. Takes the lock. */
fanin_status admit(fanin_server *s, int fd, const socket_address *peer, newcomer *out,
                   fanin_error *error);
/** The connection is gone. Takes the lock. */
void dismiss(fanin_server *s, peer_share *from);
/** A control session is open (1), or gone (-1). Lock held. */
void count_session(fanin_server *s, peer_share *from, int change);
/** Of max_memory, for all network peers and what is kept for all: three quarters where the own user
    has a socket. */
uint64_t memory_of_network(const fanin_server *s);
/** Counts @p now instead of *counted bytes; false: more than max_memory in all, than half of it for
    one network peer, or than memory_of_network(). @p of NULL: kept for all, and so counted with all
    network peers': the own user may have more of it, as far as memory_fits(). */
bool memory_account(fanin_server *s, peer_share *of, size_t *counted, size_t now);
/** Whether @p more bytes still fit. */
bool memory_fits(const fanin_server *s, const peer_share *of, size_t more);

#endif
