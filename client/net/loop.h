/* SPDX-License-Identifier: Apache-2.0 */
/** @file The client's event loop: one epoll set, stepped by the calling thread. */
#ifndef LOOP_H
#define LOOP_H

#include "clock.h"
#include <fanin/error.h>
#include <sys/epoll.h>

typedef struct loop_source loop_source;
typedef void (*loop_ready_fn)(loop_source *source, uint32_t events);

/** Embedded in what owns the descriptor; fd -1: not in the set. */
struct loop_source {
    int fd;
    uint32_t events;
    loop_ready_fn ready;
};

typedef struct loop {
    int epoll;
    struct epoll_event *batch; /**< being dispatched: remove can void them */
    int batch_size;
} loop;

fanin_status loop_init(loop *l, fanin_error *error);
void loop_finish(loop *l);

/** Makes *@p source an eventfd, which the caller closes: wake_up() ends a step, and that is all.
    FANIN_ERR_LIMIT. */
fanin_status loop_source_wake(loop_source *source, fanin_error *error);
/** Adds source->fd. FANIN_ERR_LIMIT, FANIN_ERR_MEMORY. */
fanin_status loop_add(loop *l, loop_source *source, fanin_error *error);
/** Changes what is waited for; does nothing if it is the same. */
void loop_want(loop *l, loop_source *source, uint32_t events);
/** Takes the source out; it is not called again, also not in the running step. Does not
    close the descriptor. Fine if it is not in the set. */
void loop_remove(loop *l, loop_source *source);

/** Waits for events until @p at and dispatches them once. */
void loop_step(loop *l, deadline at);

#endif
