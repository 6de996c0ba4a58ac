/* SPDX-License-Identifier: Apache-2.0 */
/** @file How long computations look whether they are still wanted. */
#ifndef WORK_STOP_H
#define WORK_STOP_H

#include <fanin/types.h>
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

/** Small steps between two looks; a step takes a microsecond at most. */
#define WORK_STEPS 4096

/** To be called for every @p steps small steps of the work, at most WORK_STEPS; asks only now and
    then. NULL: never stops. */
static inline bool work_stopped_after(work_stop *w, uint32_t steps)
{
    if (!w || w->stopped)
        return w != NULL;
    w->steps += steps;
    if (w->steps < WORK_STEPS)
        return false;
    w->steps -= WORK_STEPS;
    w->stopped = w->fn(w->cookie);
    return w->stopped;
}

/** The same for one step. */
static inline bool work_stopped(work_stop *w)
{
    return work_stopped_after(w, 1);
}

/** Why work was not completed: FANIN_ERR_TIMEOUT ("the deadline passed while @p doing") if it was
    stopped, else FANIN_ERR_MEMORY. @p stop may be NULL. */
fanin_status work_broken_off(const work_stop *stop, const char *phase,
                             const char *doing, fanin_error *error);

#endif
