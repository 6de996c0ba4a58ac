/* SPDX-License-Identifier: Apache-2.0 */
#include "cpus.h"

#include <sched.h>

unsigned usable_cpus(void)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return n > 0 ? (unsigned)n : 1;
}
