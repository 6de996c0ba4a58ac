/* SPDX-License-Identifier: Apache-2.0 */
#include "clock.h"
#include "error_set.h"
#include "log.h"
#include "thread.h"
#include "text.h"
#include "versioned.h"

#include <fanin/log.h>

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define LINES_MAX 65536u

struct fanin_log_ring {
    pid_t pid;
    fanin_log_level level;
    /* Held for the copy of one line, never while anybody waits for messages. */
    pthread_mutex_t lock;
    pthread_cond_t arrived;
    bool closed;
    uint32_t capacity, first, used;
    uint32_t lost; /* behind the last of them */
    fanin_log_line lines[];
};

fanin_status fanin_log_ring_create(uint32_t lines, fanin_log_level level,
                                   fanin_log_ring **out, fanin_error *error)
{
    if (!out || lines == 0 || lines > LINES_MAX || level < FANIN_LOG_ERROR ||
        level > FANIN_LOG_DEBUG) {
        const error_place place = {.remedy =
                                       "give 1 to 65536 lines, a level of fanin/log.h "
                                       "and a place for the ring"};
        return error_set(error, FANIN_ERR_ARGUMENT, &place,
                         "a log ring of %u lines for level %d cannot be made",
                         (unsigned)lines, (int)level);
    }
    fanin_log_ring *ring = calloc(1, sizeof *ring + lines * sizeof ring->lines[0]);
    if (!ring)
        return error_set_memory(error);
    ring->pid = getpid();
    ring->level = level;
    ring->capacity = lines;
    condition_init(&ring->arrived);
    pthread_mutex_init(&ring->lock, NULL);
    *out = ring;
    return FANIN_OK;
}

fanin_log_level log_ring_level(const fanin_log_ring *ring)
{
    return ring->level;
}

void fanin_log_ring_write(void *cookie, fanin_log_level level, const char *event,
                          const char *message)
{
    fanin_log_ring *ring = cookie;
    /* In a forked child nobody reads, and the lock may belong to a thread of the parent. */
    if (!ring || level > ring->level || ring->pid != getpid())
        return;
    const uint64_t now = clock_unix_ns();
    pthread_mutex_lock(&ring->lock);
    bool full = ring->used == ring->capacity;
    if (!ring->closed && full)
        ring->lost += ring->lost < UINT32_MAX;
    if (!ring->closed && !full) {
        fanin_log_line *line =
            &ring->lines[(ring->first + ring->used) % ring->capacity];
        line->level = level;
        line->lost = ring->lost;
        line->time_ns = now;
        utf8_copy(line->event, sizeof line->event, event);
        utf8_copy(line->message, sizeof line->message, message);
        ring->lost = 0;
        ring->used++;
        pthread_cond_signal(&ring->arrived);
    }
    pthread_mutex_unlock(&ring->lock);
}

/* What found no room is told as a message of its own, where it is missing: also if none comes after
   it. */
static bool take_lost(fanin_log_ring *ring, fanin_log_line *out)
{
    fanin_log_line *next = ring->used > 0 ? &ring->lines[ring->first] : NULL;
    uint32_t *lost = next ? &next->lost : &ring->lost;
    if (*lost == 0)
        return false;
    fanin_log_line told = {.level = FANIN_LOG_WARNING,
                           .lost = *lost,
                           .time_ns = next ? next->time_ns : clock_unix_ns(),
                           .event = "log-lost"};
    snprintf(told.message, sizeof told.message,
             "%u log lines were lost: they came faster than they were handled", *lost);
    *lost = 0;
    versioned_write(out, &told, sizeof *out);
    return true;
}

static void take_first(fanin_log_ring *ring, fanin_log_line *out)
{
    versioned_write(out, &ring->lines[ring->first], sizeof *out);
    ring->first = (ring->first + 1) % ring->capacity;
    ring->used--;
}

/* Waits until there is a message, the ring is closed, or the time is over. */
static void wait_locked(fanin_log_ring *ring, uint32_t timeout_ms)
{
    if (timeout_ms == 0)
        return;
    deadline until = deadline_in_ms(timeout_ms);
    while (ring->used == 0 && ring->lost == 0 && !ring->closed)
        if (!condition_wait(&ring->arrived, &ring->lock, until))
            return;
}

fanin_status fanin_log_ring_read(fanin_log_ring *ring, uint32_t timeout_ms,
                                 fanin_log_line *line)
{
    if (!ring || !line || line->struct_size <= sizeof line->struct_size)
        return FANIN_ERR_ARGUMENT;
    if (ring->pid != getpid())
        return FANIN_ERR_FORKED;
    fanin_status status = FANIN_OK;
    pthread_mutex_lock(&ring->lock);
    wait_locked(ring, timeout_ms);
    if (!take_lost(ring, line)) {
        if (ring->used > 0)
            take_first(ring, line);
        else
            status = ring->closed ? FANIN_ERR_CLOSED : FANIN_ERR_TIMEOUT;
    }
    pthread_mutex_unlock(&ring->lock);
    return status;
}

void fanin_log_ring_close(fanin_log_ring *ring)
{
    if (!ring || ring->pid != getpid())
        return;
    pthread_mutex_lock(&ring->lock);
    ring->closed = true;
    pthread_cond_broadcast(&ring->arrived);
    pthread_mutex_unlock(&ring->lock);
}

void fanin_log_ring_destroy(fanin_log_ring **ring)
{
    if (!ring || !*ring)
        return;
    /* A forked child frees its copy and leaves alone what threads of the parent used. */
    if ((*ring)->pid == getpid()) {
        pthread_mutex_destroy(&(*ring)->lock);
        pthread_cond_destroy(&(*ring)->arrived);
    }
    free(*ring);
    *ring = NULL;
}
