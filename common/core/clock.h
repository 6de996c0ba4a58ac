/* SPDX-License-Identifier: Apache-2.0 */
/** @file Time and deadlines. */
#ifndef CLOCK_H
#define CLOCK_H

#include <stdbool.h>
#include <stdint.h>

/** CLOCK_MONOTONIC, nanoseconds. */
uint64_t clock_ns(void);
/** CLOCK_REALTIME, nanoseconds since 1970: to be told, never waited for. */
uint64_t clock_unix_ns(void);

/** A point in time on clock_ns(); UINT64_MAX: never. */
typedef uint64_t deadline;

deadline deadline_in_ms(uint64_t ms); /**< saturates */
bool deadline_passed(deadline at);
uint64_t deadline_left_ns(deadline at); /**< 0 when passed */
int deadline_poll_ms(deadline at); /**< for poll(2)/epoll_wait(2): rounded up, 0 when
                                                 passed, at most INT_MAX */
deadline deadline_sooner(deadline a, deadline b);

#endif
