/* SPDX-License-Identifier: Apache-2.0 */
#include "net/loop.h"

#include "error_set.h"
#include "wake.h"
#include <errno.h>
#include <stddef.h>
#include <unistd.h>

#define BATCH 64

fanin_status loop_init(loop *l, fanin_error *error)
{
    *l = (loop){.epoll = epoll_create1(EPOLL_CLOEXEC)};
    if (l->epoll < 0)
        return error_set_errno(error, FANIN_ERR_LIMIT, errno, NULL,
                               "cannot create an epoll descriptor");
    return FANIN_OK;
}

void loop_finish(loop *l)
{
    if (l->epoll >= 0)
        close(l->epoll);
    l->epoll = -1;
}

static void on_wake(loop_source *source, uint32_t events)
{
    (void)events;
    wake_heard(source->fd);
}

fanin_status loop_source_wake(loop_source *source, fanin_error *error)
{
    *source = (loop_source){.fd = wake_open(), .events = EPOLLIN, .ready = on_wake};
    if (source->fd < 0)
        return error_set_errno(error, FANIN_ERR_LIMIT, errno, NULL,
                               "cannot create an eventfd");
    return FANIN_OK;
}

fanin_status loop_add(loop *l, loop_source *source, fanin_error *error)
{
    struct epoll_event event = {.events = source->events, .data.ptr = source};
    if (epoll_ctl(l->epoll, EPOLL_CTL_ADD, source->fd, &event) != 0)
        return error_set_errno(error, FANIN_ERR_LIMIT, errno, NULL,
                               "cannot watch a descriptor");
    return FANIN_OK;
}

void loop_want(loop *l, loop_source *source, uint32_t events)
{
    if (source->events == events)
        return;
    source->events = events;
    struct epoll_event event = {.events = events, .data.ptr = source};
    epoll_ctl(l->epoll, EPOLL_CTL_MOD, source->fd, &event);
}

void loop_remove(loop *l, loop_source *source)
{
    if (source->fd < 0)
        return;
    epoll_ctl(l->epoll, EPOLL_CTL_DEL, source->fd, NULL);
    for (int i = 0; i < l->batch_size; i++) {
        if (l->batch[i].data.ptr == source)
            l->batch[i].data.ptr = NULL;
    }
}

static void dispatch_events(loop *l, struct epoll_event *batch, int n)
{
    l->batch = batch;
    l->batch_size = n > 0 ? n : 0;
    for (int i = 0; i < l->batch_size; i++) {
        loop_source *source = batch[i].data.ptr;
        if (source)
            source->ready(source, batch[i].events);
    }
    l->batch = NULL;
    l->batch_size = 0;
}

void loop_step(loop *l, deadline at)
{
    struct epoll_event batch[BATCH];
    dispatch_events(l, batch, epoll_wait(l->epoll, batch, BATCH, deadline_poll_ms(at)));
}
