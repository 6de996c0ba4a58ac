/* SPDX-License-Identifier: Apache-2.0 */
#include "net/late_sends.h"

#include "thread.h"
#include <stdlib.h>

struct late_sends {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t go, sent;
    bool quit;
    const late_send *running; /* in none of the thread's sends: NULL */
    late_send first;          /* of a ring: what comes behind it is sent next */
};

static void take_out(late_send *send)
{
    send->previous->next = send->next;
    send->next->previous = send->previous;
}

/* Who sees that it is gone sees all that sending has changed. */
static void set_queued(late_send *send, bool queued)
{
    atomic_store_explicit(&send->queued, queued, memory_order_release);
}

static void send_next(late_sends *s)
{
    late_send *send = s->first.next;
    take_out(send);
    s->running = send;
    pthread_mutex_unlock(&s->lock);
    send->run(send);
    pthread_mutex_lock(&s->lock);
    s->running = NULL;
    set_queued(send, false);
    pthread_cond_signal(&s->sent);
}

static void *work(void *cookie)
{
    late_sends *s = cookie;
    pthread_setname_np(pthread_self(), "fanin-late");
    pthread_mutex_lock(&s->lock);
    for (;;) {
        if (s->first.next != &s->first)
            send_next(s);
        else if (s->quit)
            break;
        else
            pthread_cond_wait(&s->go, &s->lock);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static void release(late_sends *s)
{
    pthread_cond_destroy(&s->sent);
    pthread_cond_destroy(&s->go);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

late_sends *late_sends_create(void)
{
    late_sends *s = usable_cpus() > 1 ? calloc(1, sizeof *s) : NULL;
    if (!s)
        return NULL;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->go, NULL);
    pthread_cond_init(&s->sent, NULL);
    s->first.next = s->first.previous = &s->first;
    if (worker_thread_start(&s->thread, work, s))
        return s;
    release(s);
    return NULL;
}

void late_sends_destroy(late_sends **sends)
{
    late_sends *s = *sends;
    *sends = NULL;
    if (!s)
        return;
    pthread_mutex_lock(&s->lock);
    s->quit = true;
    pthread_mutex_unlock(&s->lock);
    pthread_cond_signal(&s->go);
    pthread_join(s->thread, NULL);
    release(s);
}

void late_sends_add(late_sends *s, late_send *send)
{
    pthread_mutex_lock(&s->lock);
    send->next = &s->first;
    send->previous = s->first.previous;
    send->previous->next = s->first.previous = send;
    set_queued(send, true);
    pthread_mutex_unlock(&s->lock);
}

void late_sends_go(late_sends *s)
{
    pthread_cond_signal(&s->go);
}

void late_sends_take(late_sends *s, late_send *send)
{
    if (!atomic_load_explicit(&send->queued, memory_order_acquire))
        return;
    pthread_mutex_lock(&s->lock);
    while (s->running == send)
        pthread_cond_wait(&s->sent, &s->lock);
    if (atomic_load_explicit(&send->queued, memory_order_relaxed)) {
        take_out(send);
        set_queued(send, false);
    }
    pthread_mutex_unlock(&s->lock);
}
