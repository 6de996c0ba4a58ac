/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A token bucket without a lock: all that it holds is when it is full again. What is taken moves
 * that time on; a bucket that will not be full within its window is empty. Zeroed: full. Any
 * thread.
 */
#ifndef BUCKET_H
#define BUCKET_H

#include "clock.h"

#include <stdatomic.h>

typedef struct bucket {
    atomic_uint_fast64_t full_at; /**< on clock_ns() */
} bucket;

/** When something may be taken again: not after @p now if it may be now. */
static inline deadline bucket_ready(const bucket *b, uint64_t window_ns)
{
    uint64_t full_at = atomic_load_explicit(&b->full_at, memory_order_relaxed);
    return full_at > window_ns ? full_at - window_ns : 0;
}

/** Takes what it needs @p refill_ns to be filled with again, be it empty or not. */
static inline void bucket_take(bucket *b, uint64_t now, uint64_t refill_ns)
{
    uint64_t before = atomic_load_explicit(&b->full_at, memory_order_relaxed), after;
    do
        after = (before > now ? before : now) + refill_ns;
    while (!atomic_compare_exchange_weak(&b->full_at, &before, after));
}

/** Puts back what was taken. */
static inline void bucket_give(bucket *b, uint64_t refill_ns)
{
    uint64_t before = atomic_load_explicit(&b->full_at, memory_order_relaxed), after;
    do
        after = before > refill_ns ? before - refill_ns : 0;
    while (!atomic_compare_exchange_weak(&b->full_at, &before, after));
}

/** As bucket_take() unless it is empty; false: it is, and nothing was taken. */
static inline bool bucket_try(bucket *b, uint64_t now, uint64_t refill_ns,
                              uint64_t window_ns)
{
    if (bucket_ready(b, window_ns) > now)
        return false;
    bucket_take(b, now, refill_ns);
    return true;
}

#endif
