/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A call that blocks, in a thread of its own: whether it has returned, and with what.
 */
#ifndef CALL_H
#define CALL_H

#include <fanin/error.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct call {
    fanin_status (*run)(void *);
    void *cookie;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool returned;
    fanin_status status;
} call;

/** Calls @p run(@p cookie); @p c must stay where it is until call_end(). */
void call_start(call *c, fanin_status (*run)(void *), void *cookie);
/** Whether it returns within @p ms. */
bool call_returns(call *c, uint32_t ms);
/** Blocks until it has returned; what it returned. */
fanin_status call_end(call *c);

#endif
