/* SPDX-License-Identifier: Apache-2.0 */
#include "guests/peer.h"
#include "array.h"
#include "wake.h"
#include "frame.h"

#include <arpa/inet.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define NETWORK_BYTES 8 /* of an IPv6 address: its /64 */

static void make_key(const socket_address *a, bool is_own, uint8_t key[17])
{
    int family;
    const uint8_t *bytes;
    memset(key, 0, 17);
    key[0] = is_own ? AF_UNIX : AF_INET;
    if (is_own)
        return;
    if (!socket_ip_bytes(a, &family, &bytes) || socket_is_loopback(a)) {
        key[1] = 127;
    } else if (family == AF_INET) {
        memcpy(key + 1, bytes, 4);
    } else {
        key[0] = AF_INET6;
        memcpy(key + 1, bytes, NETWORK_BYTES);
    }
}

static void make_name(peer_share *p)
{
    char text[INET6_ADDRSTRLEN] = "";
    if (p->is_own)
        snprintf(p->name, sizeof p->name, "this user");
    else if (p->key[0] == AF_INET && p->key[1] == 127)
        snprintf(p->name, sizeof p->name, "this host");
    else if (inet_ntop(p->key[0], p->key + 1, text, sizeof text))
        snprintf(p->name, sizeof p->name, "%s%s", text,
                 p->key[0] == AF_INET6 ? "/64" : "");
}

static int compare(const void *key, const void *element)
{
    const peer_share *p = *(peer_share *const *)element;
    return memcmp(key, p->key, sizeof p->key);
}

static void forget(fanin_server *s, size_t at)
{
    s->unsaid_forgotten += atomic_load(&s->peers[at]->unsaid);
    free(s->peers[at]);
    s->n_peers--;
    memmove(&s->peers[at], &s->peers[at + 1], (s->n_peers - at) * sizeof *s->peers);
}

/* What is to be remembered of it for longest. */
static uint64_t remembered_until(const peer_share *p)
{
    uint64_t work = atomic_load(&p->work.full_at);
    uint64_t lines = atomic_load(&p->lines[true].full_at);
    return work > lines ? work : lines;
}

/* If there are too many, the one that has no connection, is of no session that is told why it is
   refused, and has least to be remembered makes room. */
static void make_room(fanin_server *s)
{
    size_t found = s->n_peers;
    uint64_t least = UINT64_MAX;
    if (s->n_peers < PEERS_KEPT)
        return;
    for (size_t i = 0; i < s->n_peers; i++)
        if (s->peers[i]->connections == 0 && s->peers[i]->held == 0 &&
            remembered_until(s->peers[i]) < least) {
            least = remembered_until(s->peers[i]);
            found = i;
        }
    if (found < s->n_peers)
        forget(s, found);
}

static peer_share *add(fanin_server *s, const uint8_t key[17])
{
    bool found;
    make_room(s);
    peer_share *p = calloc(1, sizeof *p);
    if (!p || !array_reserve(&s->peers, &s->peers_capacity, s->n_peers + 1,
                             sizeof *s->peers)) {
        free(p);
        return NULL;
    }
    memcpy(p->key, key, sizeof p->key);
    p->is_own = key[0] == AF_UNIX;
    make_name(p);
    size_t at =
        array_search(key, s->peers, s->n_peers, sizeof *s->peers, compare, &found);
    memmove(&s->peers[at + 1], &s->peers[at], (s->n_peers - at) * sizeof *s->peers);
    s->peers[at] = p;
    s->n_peers++;
    return p;
}

peer_share *peer_share_of(fanin_server *s, const socket_address *a, bool is_own)
{
    uint8_t key[17];
    make_key(a, is_own, key);
    peer_share *const *found =
        array_find(key, s->peers, s->n_peers, sizeof *s->peers, compare);
    return found ? *found : add(s, key);
}

void peers_free(fanin_server *s)
{
    while (s->n_peers > 0)
        forget(s, s->n_peers - 1);
    free(s->peers);
    s->peers = NULL;
    s->peers_capacity = 0;
}

/* ---------------------------------------------------------------------- work */

static uint64_t read_ns(clockid_t clock)
{
    struct timespec now = {0};
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

uint64_t thread_cpu_ns(void)
{
    return read_ns(CLOCK_THREAD_CPUTIME_ID);
}

uint64_t thread_cpu_ns_of(pthread_t thread)
{
    clockid_t clock;
    return pthread_getcpuclockid(thread, &clock) == 0 ? read_ns(clock) : 0;
}

/* ----------------------------------------------------------------------- log */

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

/* --------------------------------------------------------------------- turns */

static void add_peer(peer_turns *q, peer_turn *first)
{
    first->next_peer = NULL;
    if (q->last)
        q->last->next_peer = first;
    else
        q->first = first;
    q->last = first;
}

/* @p before: the peer before it, NULL if it is the first. */
static void drop_peer(peer_turns *q, peer_turn *before, peer_turn *first)
{
    if (before)
        before->next_peer = first->next_peer;
    else
        q->first = first->next_peer;
    if (q->last == first)
        q->last = before;
}

static peer_turn *find_peer(const peer_turns *q, const peer_share *from,
                            peer_turn **before)
{
    peer_turn *at = q->first;
    *before = NULL;
    for (; at && at->from != from; at = at->next_peer)
        *before = at;
    return at;
}

void turns_append(peer_turns *q, peer_turn *t, void *of, const peer_share *from)
{
    peer_turn *before, *first = find_peer(q, from, &before);
    *t = (peer_turn){.waits = true, .of = of, .from = from, .last = t};
    q->n++;
    if (!first) {
        add_peer(q, t);
        return;
    }
    first->last->next = t;
    first->last = t;
}

/* The first of a peer goes; who came after it is the first now, in its place. */
static void drop_first(peer_turns *q, peer_turn *before, peer_turn *first)
{
    peer_turn *heir = first->next;
    if (!heir) {
        drop_peer(q, before, first);
        return;
    }
    heir->last = first->last;
    heir->next_peer = first->next_peer;
    if (before)
        before->next_peer = heir;
    else
        q->first = heir;
    if (q->last == first)
        q->last = heir;
}

void turns_leave(peer_turns *q, peer_turn *t)
{
    peer_turn *before, *first = find_peer(q, t->from, &before), *at = first;
    if (first == t) {
        drop_first(q, before, t);
    } else {
        while (at->next != t)
            at = at->next;
        at->next = t->next;
        if (first->last == t)
            first->last = at;
    }
    q->n--;
    *t = (peer_turn){.waits = false};
}

void *turns_next(peer_turns *q, bool (*may_go_on)(void *cookie, void *of), void *cookie)
{
    peer_turn *before = NULL, *at = q->first;
    for (; at && !may_go_on(cookie, at->of); at = at->next_peer)
        before = at;
    if (!at)
        return NULL;
    void *of = at->of;
    peer_turn *heir = at->next;
    drop_first(q, before, at);
    if (heir && q->last != heir) {
        drop_peer(q, before, heir);
        add_peer(q, heir);
    }
    q->n--;
    *at = (peer_turn){.waits = false};
    return of;
}
