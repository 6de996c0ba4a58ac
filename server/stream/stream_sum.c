/* SPDX-License-Identifier: Apache-2.0 */
#include "stream/stream_sum.h"

#include "thread.h"
#include <stdlib.h>

typedef enum work_state { NOTHING, WAITING, RUNNING } work_state;

struct side_sum {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    work_state state;
    bool quit;
    checksum *before; /* the sum as it was */
    /* what is to be added */
    checksum *sum;
    const gather *from;
    size_t skip;
    uint64_t bytes;
};

void gather_sum(const gather *g, size_t skip, uint64_t bytes, checksum *sum)
{
    for (int i = 0; i < g->n && bytes > 0; i++) {
        size_t size = g->iov[i].iov_len;
        size_t from = skip < size ? skip : size;
        size_t more = bytes < size - from ? (size_t)bytes : size - from;
        checksum_add(sum, (const char *)g->iov[i].iov_base + from, more);
        skip -= from;
        bytes -= more;
    }
}

static void *run(void *cookie)
{
    side_sum *s = cookie;
    pthread_mutex_lock(&s->lock);
    while (!s->quit) {
        if (s->state != WAITING) {
            pthread_cond_wait(&s->work, &s->lock);
            continue;
        }
        s->state = RUNNING;
        pthread_mutex_unlock(&s->lock);
        gather_sum(s->from, s->skip, s->bytes, s->sum);
        pthread_mutex_lock(&s->lock);
        s->state = NOTHING;
        pthread_cond_signal(&s->done);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static void free_all(side_sum *s)
{
    pthread_cond_destroy(&s->done);
    pthread_cond_destroy(&s->work);
    pthread_mutex_destroy(&s->lock);
    checksum_free(s->before);
    free(s);
}

side_sum *side_sum_create(void)
{
    side_sum *s = usable_cpus() > 1 ? calloc(1, sizeof *s) : NULL;
    if (!s)
        return NULL;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->work, NULL);
    pthread_cond_init(&s->done, NULL);
    s->before = checksum_create();
    if (!s->before || thread_start(&s->thread, "fanin-sum", run, s, NULL) != FANIN_OK) {
        free_all(s);
        return NULL;
    }
    return s;
}

void side_sum_destroy(side_sum **sums)
{
    side_sum *s = *sums;
    *sums = NULL;
    if (!s)
        return;
    pthread_mutex_lock(&s->lock);
    s->quit = true;
    pthread_cond_signal(&s->work);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    free_all(s);
}

void side_sum_begin(side_sum *s, checksum *sum, const gather *g, size_t skip,
                    uint64_t bytes)
{
    checksum_copy(s->before, sum);
    pthread_mutex_lock(&s->lock);
    s->sum = sum;
    s->from = g;
    s->skip = skip;
    s->bytes = bytes;
    s->state = WAITING;
    pthread_cond_signal(&s->work);
    pthread_mutex_unlock(&s->lock);
}

void side_sum_end(side_sum *s, uint64_t sent)
{
    pthread_mutex_lock(&s->lock);
    bool made = s->state != WAITING;
    if (!made)
        s->state = NOTHING;
    while (s->state == RUNNING)
        pthread_cond_wait(&s->done, &s->lock);
    pthread_mutex_unlock(&s->lock);
    if (made && sent == s->bytes)
        return;
    checksum_copy(s->sum, s->before);
    gather_sum(s->from, s->skip, sent, s->sum);
}
