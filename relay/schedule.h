/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Which unit is asked of whom, and when somebody is late. Source 0 is the trainer, the others are
 * holders: readers that hand on what they have. A unit is unproven, asked of one source, or proven;
 * it is never asked of two, since both would write the same memory. So who is late is broken off
 * first. Pure: times are given, one thread at a time.
 *
 * The rules: a holder is asked for what it has, what the fewest have first. The trainer is asked
 * for the reader's own duty (duty.h), and for what nobody has whose owner is late. The next by the
 * hash takes that over; twice as late, the next two; then four. The trainer is the last source of
 * everything.
 */
#ifndef SCHEDULE_H
#define SCHEDULE_H

#include "duty.h"

#define SCHEDULE_ORIGIN 0

/** Units [first, first + count). */
typedef struct unit_run {
    uint32_t first, count;
} unit_run;

typedef struct schedule schedule;

/** @p sizes: bytes of each unit; they stay the caller's. NULL: no memory. */
schedule *schedule_create(const uint64_t *sizes, size_t n_units, const member *self,
                          uint64_t now_ns);
void schedule_free(schedule *s); /**< NULL is fine */

/** The list: who wants the same, and is dealt duties; the reader itself is added. False: no memory,
    and nothing has changed. */
bool schedule_list(schedule *s, const member *members, size_t n, uint64_t now_ns);

/** A holder that is read from; its number, 0: no memory. It is asked for nothing that a nearer one
    has, or is to bring: of readers that are near each other one brings a unit from farther away. */
size_t schedule_join(schedule *s, const member *who, nearness near);
/** The trainer brings nothing any more, and the step is had of holders or not at all: they are not
    broken off for its sake. */
void schedule_without_trainer(schedule *s);
/** It is gone; what was asked of it is unproven. Its number may come again. */
void schedule_leave(schedule *s, size_t number);
/** It is there again, and says anew what it has. */
void schedule_forget(schedule *s, size_t number);
/** It has the unit. @p first: the first it has said; that tells nothing of its pace. */
void schedule_has(schedule *s, size_t number, size_t unit, bool first, uint64_t now_ns);

/**
 * What to ask of a source that owes nothing: at most @p most runs, which ascend, of at most
 * @p bytes unless one unit is larger. 0: nothing now; *wake_ns says when to look again, unless
 * something changes.
 */
size_t schedule_next(schedule *s, size_t number, uint64_t bytes, unit_run *runs,
                     size_t most, uint64_t now_ns, uint64_t *wake_ns);
/** Bytes that a holder has and that are neither proven nor asked for; *@p rest_out: all that are
    not. */
uint64_t schedule_offered(const schedule *s, size_t number, bool *rest_out);
/** What was just asked of it is not asked for. */
void schedule_return(schedule *s, size_t number);
/** These units are read, and wait for their confirmation: the source may be asked for others. */
void schedule_read(schedule *s, size_t number, const unit_run *runs, size_t n,
                   uint64_t now_ns);
/** They are proven. */
void schedule_confirmed(schedule *s, size_t number, const unit_run *runs, size_t n,
                        uint64_t now_ns);
/** It failed to bring what it was asked for, and is left alone for a while. */
void schedule_failed(schedule *s, size_t number, uint64_t now_ns);
/** Whether what was asked of it takes three times as long as usual, and somebody else is to bring
    it: the caller breaks it off, and calls schedule_failed(). It is told once. */
bool schedule_break_off(schedule *s, size_t number, uint64_t now_ns);
/** Whether it has brought nothing since it was broken off. */
bool schedule_is_broken(const schedule *s, size_t number);

size_t schedule_left(const schedule *s); /**< units that are not proven */
size_t schedule_owed(const schedule *s,
                     size_t number); /**< units that it was asked for */
/** Whether every unit is proven, or some holder has it. */
bool schedule_without_origin(const schedule *s);

typedef struct schedule_counts {
    uint64_t late;       /**< units that were asked for and broken off */
    uint64_t taken_over; /**< units that were another's duty */
} schedule_counts;
schedule_counts schedule_get_counts(const schedule *s);

#endif
