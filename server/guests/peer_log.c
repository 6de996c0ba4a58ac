/* SPDX-License-Identifier: Apache-2.0 */
#include "guests/peer_log.h"
#include "core/wake.h"
#include "frame.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define SECOND UINT64_C(1000000000)
#define TELL_MS 1000 /* how often it is told what was left out */
#define TELL_PEERS 8 /* of so many one by one */

/* Lines a second, and how many seconds' worth may come at once. Many clients that come at once are
   told of (information), faults are for a person. */
#define WINDOW (2 * SECOND)
#define OF_PEER (SECOND / 5)
#define OF_ALL (SECOND / 20)
#define MORE_INFORMATION 50

static bool may_say(fanin_server *s, peer_share *from, fanin_log_level level)
{
    bool is_fault = level <= FANIN_LOG_WARNING;
    uint64_t now = clock_ns(), less = is_fault ? 1 : MORE_INFORMATION;
    return bucket_try(&from->lines[is_fault], now, OF_PEER / less, WINDOW) &&
           bucket_try(&s->lines[is_fault], now, OF_ALL / less, WINDOW);
}

void peer_log(fanin_server *s, peer_share *from, fanin_log_level level,
              const char *event, const char *format, ...)
{
    char text[512];
    va_list arguments;
    if (!s->log.fn)
        return;
    if (!from->is_own && !may_say(s, from, level)) {
        atomic_fetch_add(&from->unsaid, 1);
        atomic_fetch_add(&s->unsaid, 1);
        uint64_t none = UINT64_MAX;
        if (atomic_compare_exchange_strong(&s->tell_at, &none, deadline_in_ms(TELL_MS)))
            wake_up(s->wake);
        return;
    }
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    log_write(&s->log, level, event, "%s", text);
}

void peer_log_broken(fanin_server *s, peer_share *from, const char *peer, const tls *t)
{
    const char *why = tls_broken(t);
    if (!why)
        return;
    bool is_end = tls_failed(t) == TLS_MEMORY || tls_failed(t) == TLS_GAVE_UP;
    peer_log(s, from, FANIN_LOG_WARNING, "tls-broken",
             "%s and this rank cannot go on by TLS: %s%s", peer, why,
             is_end ? "" : "; " WAY_REMEDY);
}

deadline peer_log_due(const fanin_server *s)
{
    return atomic_load(&s->tell_at);
}

typedef struct unsaid {
    char name[sizeof((peer_share *)0)->name];
    uint64_t lines;
} unsaid;

/* Of some peers one by one, and of the others together; how many of the first. */
static size_t collect(fanin_server *s, unsaid some[TELL_PEERS], uint64_t *others)
{
    size_t n = 0;
    *others = 0;
    pthread_mutex_lock(&s->lock);
    for (size_t i = 0; i < s->n_peers; i++) {
        uint64_t lines = atomic_exchange(&s->peers[i]->unsaid, 0);
        if (lines > 0 && n < TELL_PEERS) {
            some[n].lines = lines;
            memcpy(some[n++].name, s->peers[i]->name, sizeof some->name);
        } else {
            *others += lines;
        }
    }
    *others += s->unsaid_forgotten;
    s->unsaid_forgotten = 0;
    pthread_mutex_unlock(&s->lock);
    return n;
}

void peer_log_tell(fanin_server *s)
{
    unsaid some[TELL_PEERS];
    uint64_t others;
    atomic_store(&s->tell_at, UINT64_MAX);
    size_t n = collect(s, some, &others);
    for (size_t i = 0; i < n; i++)
        log_write(&s->log, FANIN_LOG_WARNING, "left-out",
                  "... and %" PRIu64 " more of %s", some[i].lines, some[i].name);
    if (others > 0)
        log_write(&s->log, FANIN_LOG_WARNING, "left-out",
                  "... and %" PRIu64 " more of other peers", others);
}
