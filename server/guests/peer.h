/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Peers: whoever connects from one place, be it one client or many behind one address. The unit in
 * which connections, memory, requests and log lines are shared out, so that nobody's are the
 * trainer's.
 */
#ifndef PEER_H
#define PEER_H

#include "core/bucket.h"
#include "core/server_state.h"

#define PEERS_KEPT 4096 /**< as many are remembered although they have no connection */

/** One place: the server's own user (the Unix socket), other users of this host (127/8 and ::1), an
    IPv4 address, or a /64 of IPv6, which one host has to itself. */
struct peer_share {
    uint8_t key[17];             /**< family and bytes */
    bool is_own;                 /**< the server's own user */
    char name[64];               /**< for messages: "10.0.0.7", "fd00:0:0:1::/64" */
    bucket lines[2];             /**< information, and faults: peer_log.h */
    atomic_uint_fast64_t unsaid; /**< lines that were left out and not told of yet */
    bucket work, sent; /**< CPU time of its requests, and of tensors: peer_work.h */
    atomic_uint_fast64_t
        slow_at; /**< when the log was told that what is sent to it waits; 0: never */
    bool has_proven; /**< the launch's secret; the control thread's */
    /** When to look again for idle sessions that make room for it: its own, [true] anybody's; the
        control thread's. */
    deadline evict_again[2];
    atomic_uint_fast64_t memory; /**< bytes of its connections */
    bucket held_up;              /**< what it has had of its share (publish/lease.h) */
    uint64_t
        held_up_ns; /**< for which its leases held updates up; guarded by the server's lock */
    unsigned connections, sessions; /**< now; guarded by the server's lock */
    unsigned
        held; /**< by sessions, those too that are refused or over; the control thread's */
};

/** The entry of an address, made when it is new; NULL: no memory. @p is_own: it is that of the own
    user. It lives as long as it has connections, and for a while after, to be remembered by. Lock
    held. */
peer_share *peer_share_of(fanin_server *s, const socket_address *a, bool is_own);
/** No connection is left. */
void peers_free(fanin_server *s);

#endif
