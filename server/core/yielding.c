/* SPDX-License-Identifier: Apache-2.0 */
#include "core/yielding.h"

#include <errno.h>
#include <sys/resource.h>

#define NICE_MOST 19

/* On Linux the nice value is a thread's, whatever POSIX says of processes. */
int yielding_value(int32_t more)
{
    int value = getpriority(PRIO_PROCESS, 0) + more;
    return value < NICE_MOST ? value : NICE_MOST;
}

void yielding_begin(const fanin_server *s)
{
    if (s->is_nice && setpriority(PRIO_PROCESS, 0, s->nice) != 0)
        log_write(&s->log, FANIN_LOG_WARNING, "nice",
                  "a thread's nice value cannot be %d (errno %d)", s->nice, errno);
}
