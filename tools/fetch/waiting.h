/* SPDX-License-Identifier: Apache-2.0 */
/** @file Whom a pull waits for, told on stderr by a thread with a client of its own. */
#ifndef WAITING_H
#define WAITING_H

#include "fetch/session.h"

typedef struct waiting waiting;

/** From two seconds on, every two seconds: what the ranks do that have not committed @p step
    (0: any). NULL if no thread can be had: then nothing is told. */
waiting *waiting_start(const session *s, uint64_t step);
/** The waiting is over: the pull reads. Does not block; NULL is fine. */
void waiting_hush(waiting *w);
/** Ends the thread; NULL is fine. */
void waiting_end(waiting **w);

#endif
