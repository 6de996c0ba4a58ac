/* SPDX-License-Identifier: Apache-2.0 */
#include "call.h"
#include "testing.h"

#include <time.h>

static void *run(void *cookie)
{
    call *c = cookie;
    fanin_status status = c->run(c->cookie);
    pthread_mutex_lock(&c->lock);
    c->status = status;
    c->returned = true;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

void call_start(call *c, fanin_status (*body)(void *), void *cookie)
{
    *c = (call){.run = body, .cookie = cookie};
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->changed, NULL);
    assert_int_equal(pthread_create(&c->thread, NULL, run, c), 0);
}

bool call_returns(call *c, uint32_t ms)
{
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += ms / 1000 + (end.tv_nsec + ms % 1000 * 1000000) / 1000000000;
    end.tv_nsec = (end.tv_nsec + ms % 1000 * 1000000) % 1000000000;
    pthread_mutex_lock(&c->lock);
    while (!c->returned && pthread_cond_timedwait(&c->changed, &c->lock, &end) == 0)
        continue;
    bool returned = c->returned;
    pthread_mutex_unlock(&c->lock);
    return returned;
}

fanin_status call_end(call *c)
{
    pthread_join(c->thread, NULL);
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    return c->status;
}
