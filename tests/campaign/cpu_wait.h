/* SPDX-License-Identifier: Apache-2.0 */
/** @file How long a process has waited for a CPU: what a busy machine adds to its calls. */
#ifndef CAMPAIGN_CPU_WAIT_H
#define CAMPAIGN_CPU_WAIT_H

#include <stdint.h>

/** Nanoseconds that the threads of this process were ready to run and did not, all together; of those that
    have ended nothing. 0 where the kernel does not count it, or no descriptor is left. */
uint64_t cpu_wait_ns(void);

#endif
