/* SPDX-License-Identifier: Apache-2.0 */
#include "clock.h"

#include <limits.h>
#include <time.h>

#define NS_PER_S UINT64_C(1000000000)
#define NS_PER_MS UINT64_C(1000000)

static uint64_t ns_of(clockid_t id)
{
    struct timespec now;
    clock_gettime(id, &now);
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

uint64_t clock_ns(void)
{
    return ns_of(CLOCK_MONOTONIC);
}

uint64_t clock_unix_ns(void)
{
    return ns_of(CLOCK_REALTIME);
}

deadline deadline_in_ms(uint64_t ms)
{
    uint64_t now = clock_ns();
    if (ms > (UINT64_MAX - now) / NS_PER_MS)
        return UINT64_MAX;
    return now + ms * NS_PER_MS;
}

uint64_t deadline_left_ns(deadline at)
{
    if (at == UINT64_MAX)
        return UINT64_MAX;
    uint64_t now = clock_ns();
    return at > now ? at - now : 0;
}

bool deadline_passed(deadline at)
{
    return deadline_left_ns(at) == 0;
}

int deadline_poll_ms(deadline at)
{
    uint64_t left = deadline_left_ns(at);
    /* Rounded up: a poll that wakes early would spin until the deadline. */
    uint64_t ms = left / NS_PER_MS + (left % NS_PER_MS != 0);
    return ms > INT_MAX ? INT_MAX : (int)ms;
}

deadline deadline_sooner(deadline a, deadline b)
{
    return a < b ? a : b;
}
