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
#include "tls.h"

#define PEERS_KEPT 4096 /**< as many are remembered although they have no connection */

/** One place: the server's own user (the Unix socket), other users of this host (127/8 and ::1), an
    IPv4 address, or a /64 of IPv6, which one host has to itself. */
struct peer_share {
    uint8_t key[17];             /**< family and bytes */
    bool is_own;                 /**< the server's own user */
    char name[64];               /**< for messages: "10.0.0.7", "fd00:0:0:1::/64" */
    bucket lines[2];             /**< information, and faults: below */
    atomic_uint_fast64_t unsaid; /**< lines that were left out and not told of yet */
    bucket work, sent;           /**< CPU time of its requests, and of tensors: below */
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

/* ---------------------------------------------------------------------- work */

/* The CPU time that strangers may take from the trainer. Their requests: a bucket for each peer,
   filled by a small share of one CPU, and one for all of them. Tensors that are sent to them, or
   digested: a tenth of the CPUs for all of them, half of it for one. Whoever has emptied a bucket
   is not refused: it waits. Any thread. */

/** What was not taken for so long may be taken at once: with 50 of 1000 a whole second of a CPU,
    the first pulls of hundreds of workers behind one address. */
#define WORK_WINDOW_NS UINT64_C(20000000000)
#define ALL_SHARES                                                                     \
    2              /**< of peer_cpu, that the requests of all strangers together take */
#define ONE_OF 2   /**< one peer has this part of what is sent to all */
#define REST_MS 10 /**< a connection whose peer has to wait is looked at so often */

/** CPU time of the calling thread. */
uint64_t thread_cpu_ns(void);
/** That of another thread, which has not been joined; 0: not known. */
uint64_t thread_cpu_ns_of(pthread_t thread);
/** Whether its work is counted: the own user's is not. */
static inline bool peer_is_counted(const fanin_server *s, const peer_share *of)
{
    return !of->is_own && s->peer_cpu > 0;
}
/** It was the cause of so much work. */
static inline void peer_charge(fanin_server *s, peer_share *of, uint64_t cpu_ns)
{
    if (!peer_is_counted(s, of))
        return;
    uint64_t now = clock_ns(), refill_ns = cpu_ns * 1000 / s->peer_cpu;
    bucket_take(&of->work, now, refill_ns);
    bucket_take(&s->strangers_work, now, refill_ns / ALL_SHARES);
}
/** So much of it was not for nothing. */
static inline void peer_refund(fanin_server *s, peer_share *of, uint64_t cpu_ns)
{
    if (!peer_is_counted(s, of))
        return;
    bucket_give(&of->work, cpu_ns * 1000 / s->peer_cpu);
    bucket_give(&s->strangers_work, cpu_ns * 1000 / s->peer_cpu / ALL_SHARES);
}
/** Whether all strangers together have had what their requests may take. */
static inline bool strangers_must_rest(const fanin_server *s)
{
    return bucket_ready(&s->strangers_work, WORK_WINDOW_NS) > clock_ns();
}
/** Whether its requests have to wait: for itself, or, if nobody there has ever proven the launch's
    secret, for other strangers. */
static inline bool peer_must_rest(const fanin_server *s, const peer_share *of)
{
    if (!peer_is_counted(s, of))
        return false;
    return bucket_ready(&of->work, WORK_WINDOW_NS) > clock_ns() ||
           (!of->has_proven && strangers_must_rest(s));
}

/** What is sent to it is counted: it is a stranger. */
static inline bool peer_send_is_counted(const fanin_server *s, const peer_share *of)
{
    return !of->is_own && !s->tls && !(s->flags & FANIN_SERVER_TRUSTED_NETWORK);
}
/** Sending tensors to it took so much. */
static inline void peer_charge_send(fanin_server *s, peer_share *of, uint64_t cpu_ns)
{
    uint64_t now = clock_ns(), refill_ns = cpu_ns * 1000 / s->stranger_cpu;
    bucket_take(&of->sent, now, refill_ns * ONE_OF);
    bucket_take(&s->strangers_sent, now, refill_ns);
}
/** Whether all strangers together have had what sending them tensors may take. */
static inline bool strangers_send_must_rest(const fanin_server *s)
{
    return bucket_ready(&s->strangers_sent, WORK_WINDOW_NS) > clock_ns();
}
/** Whether more of them have to wait. */
static inline bool peer_send_must_rest(const fanin_server *s, const peer_share *of)
{
    return bucket_ready(&of->sent, WORK_WINDOW_NS) > clock_ns() ||
           strangers_send_must_rest(s);
}

/* ----------------------------------------------------------------------- log */

/* What peers cause to be logged: a few lines a second of each and of all; how many more there were
   comes once a second. Nobody else's lines are held back. Any thread. */

/** Logs a line that @p from is the cause of, or counts it. Lock not held. */
void peer_log(fanin_server *s, peer_share *from, fanin_log_level level,
              const char *event, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
/** The same of @p peer, an address, with whom the server cannot go on by TLS, if that is so. */
void peer_log_broken(fanin_server *s, peer_share *from, const char *peer, const tls *t);
/** When peer_log_tell() is due; UINT64_MAX: nothing was left out. */
deadline peer_log_due(const fanin_server *s);
/** Logs what was left out since the last time. Takes the lock. */
void peer_log_tell(fanin_server *s);

/* --------------------------------------------------------------------- turns */

/* Who waits for a share that is common to all strangers: connections, in the order of their peers.
   Each peer has one turn, then the next peer has, so that many connections get no more than one.
   Everything of a queue belongs to one thread. */

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
