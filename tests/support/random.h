/* SPDX-License-Identifier: Apache-2.0 */
/** @file A seeded generator (splitmix64), so that a failing case can be repeated. */
#ifndef RANDOM_H
#define RANDOM_H

#include <stdint.h>

typedef struct random_source {
    uint64_t state;
} random_source;

static inline uint64_t random_next(random_source *r)
{
    uint64_t x = r->state += UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ x >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ x >> 27) * UINT64_C(0x94D049BB133111EB);
    return x ^ x >> 31;
}

/** 0 .. bound-1 */
static inline uint64_t random_below(random_source *r, uint64_t bound)
{
    return random_next(r) % bound;
}

#endif
