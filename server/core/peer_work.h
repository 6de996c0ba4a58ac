/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The CPU time that a peer's requests may take from the trainer: a bucket each, filled by a small
 * share of one CPU. Whoever has emptied it is not refused: its requests wait. Any thread.
 */
#ifndef PEER_WORK_H
#define PEER_WORK_H

#include "core/peer.h"

/** What was not taken for so long may be taken at once: with 50 of 1000 a whole second of a CPU, the
    first pulls of hundreds of workers behind one address. */
#define WORK_WINDOW_NS UINT64_C(20000000000)
#define REST_MS 10 /**< a connection whose peer has to wait is looked at so often */

/** CPU time of the calling thread. */
uint64_t thread_cpu_ns(void);
/** Whether its work is counted: the own user's is not. */
static inline bool peer_is_counted(const fanin_server *s, const peer_share *of)
{
    return !of->is_own && s->peer_cpu > 0;
}
/** It was the cause of so much work. */
static inline void peer_charge(const fanin_server *s, peer_share *of, uint64_t cpu_ns)
{
    if (peer_is_counted(s, of))
        bucket_take(&of->work, clock_ns(), cpu_ns * 1000 / s->peer_cpu);
}
/** So much of it was not for nothing. */
static inline void peer_refund(const fanin_server *s, peer_share *of, uint64_t cpu_ns)
{
    if (peer_is_counted(s, of))
        bucket_give(&of->work, cpu_ns * 1000 / s->peer_cpu);
}
/** Whether its requests have to wait. */
static inline bool peer_must_rest(const fanin_server *s, const peer_share *of)
{
    return peer_is_counted(s, of) &&
           bucket_ready(&of->work, WORK_WINDOW_NS) > clock_ns();
}

#endif
