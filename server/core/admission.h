/* SPDX-License-Identifier: Apache-2.0 */
/** @file Who may connect, how many, for how long, and how much memory all of them may take. */
#ifndef ADMISSION_H
#define ADMISSION_H

#include "core/server_state.h"

#define STALL_MS 10000   /**< a peer that owes room for bytes so long is dropped */
#define LINGER_MS 1000   /**< a refused peer gets so long to read why */
#define REFUSED_PEERS 16 /**< connections that are only told why, beyond max_sessions */

/** Connections of one address; those of the server's own user are not counted. */
struct peer_count {
    uint8_t address[17]; /**< family and bytes */
    unsigned connections;
    peer_count *next;
};

/** One network peer gets at most half of the connections, but never less than two: one for
    control and one for data. */
unsigned most_per_peer(const fanin_server *s);
/** What makes room for more connections. */
const char *sessions_remedy(const fanin_server *s);
/** Why a connection is refused: FANIN_ERR_AUTH or FANIN_ERR_LIMIT with a sentence. On
    FANIN_OK it is counted; *counted_out may be NULL, and *differs_out says in what a peer on the
    Unix socket is none of the server's own (neighbour.h). Takes the lock. */
fanin_status admit(fanin_server *s, int fd, const socket_address *peer,
                   unsigned *differs_out, peer_count **counted_out, fanin_error *error);
/** The connection is gone. Takes the lock. */
void dismiss(fanin_server *s, peer_count *counted);
/** Counts @p now instead of *counted bytes; false: more than max_memory in all. */
bool memory_account(fanin_server *s, size_t *counted, size_t now);
/** Whether @p more bytes still fit. */
bool memory_fits(const fanin_server *s, size_t more);

#endif
