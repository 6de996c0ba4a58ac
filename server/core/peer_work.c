/* SPDX-License-Identifier: Apache-2.0 */
#include "core/peer_work.h"

#include <time.h>

uint64_t thread_cpu_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}
