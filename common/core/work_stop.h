/* SPDX-License-Identifier: Apache-2.0 */
/** @file How long computations look whether they are still wanted. */
#ifndef WORK_STOP_H
#define WORK_STOP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** Zeroed but for fn and cookie. */
typedef struct work_stop {
    bool (*fn)(void *cookie); /**< true: stop; from then on it is not asked again */
    void *cookie;
    uint32_t steps;
    bool stopped;
} work_stop;

/** To be called at every small step of the work; asks only now and then. NULL: never stops. */
static inline bool work_stopped(work_stop *w)
{
    if (!w || w->stopped)
        return w != NULL;
    if (++w->steps % 4096 == 0)
        w->stopped = w->fn(w->cookie);
    return w->stopped;
}

#endif
