/* SPDX-License-Identifier: Apache-2.0 */
#include "call.h"
#include "testing.h"
#include "thread.h"

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
    condition_init(&c->changed);
    assert_int_equal(pthread_create(&c->thread, NULL, run, c), 0);
}

bool call_returns(call *c, uint32_t ms)
{
    deadline end = deadline_in_ms(ms);
    pthread_mutex_lock(&c->lock);
    while (!c->returned && condition_wait(&c->changed, &c->lock, end))
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
