/* SPDX-License-Identifier: Apache-2.0 */
#include "log_catcher.h"
#include "testing.h"

#include <pthread.h>
#include <time.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t caught = PTHREAD_COND_INITIALIZER;
static char wanted[64], last[1024];
static unsigned hits;

void log_catch(void *cookie, fanin_log_level level, const char *event,
               const char *message)
{
    (void)cookie, (void)level;
    pthread_mutex_lock(&lock);
    if (strcmp(event, wanted) == 0) {
        hits++;
        snprintf(last, sizeof last, "%s", message);
        pthread_cond_broadcast(&caught);
    }
    pthread_mutex_unlock(&lock);
}

void log_listen(const char *event)
{
    pthread_mutex_lock(&lock);
    snprintf(wanted, sizeof wanted, "%s", event);
    hits = 0;
    last[0] = '\0';
    pthread_mutex_unlock(&lock);
}

/* Waits for that many and copies the last one; how many there are. */
static unsigned wait_for(unsigned times, char text[sizeof last])
{
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += 30;
    pthread_mutex_lock(&lock);
    while (hits < times && pthread_cond_timedwait(&caught, &lock, &end) == 0)
        continue;
    unsigned heard = hits;
    memcpy(text, last, sizeof last);
    pthread_mutex_unlock(&lock);
    return heard;
}

void log_expect(unsigned times, const char *words)
{
    char text[sizeof last];
    unsigned heard = wait_for(times, text);
    if (heard != times)
        fail_msg("%u lines instead of %u, the last one: %s", heard, times, text);
    assert_says(text, words);
}

void log_await(const char *words)
{
    char text[sizeof last];
    assert_true(wait_for(1, text) > 0);
    assert_says(text, words);
}
