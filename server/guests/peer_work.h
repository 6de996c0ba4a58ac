/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The CPU time that strangers may take from the trainer. Their requests: a bucket for each peer,
 * filled by a small share of one CPU, and one for all of them. Tensors that are sent to them, or
 * digested: a tenth of the CPUs for all of them, half of it for one. Whoever has emptied a bucket
 * is not refused: it waits. Any thread.
 */
#ifndef PEER_WORK_H
#define PEER_WORK_H

#include "guests/peer.h"

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

#endif
