/* SPDX-License-Identifier: Apache-2.0 */
#include "publish/lease.h"
#include "wake.h"
#include "digest.h"
#include "error_set.h"
#include "guests/peer.h"
#include "publish/publication.h"
#include "thread.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------ waiting for leases */

#define WINDOW_NS ((uint64_t)SHARE_WINDOW_MS * 1000000)
#define OWN 0                    /* the own user's slot */
#define OTHERS (DRAIN_PEERS + 1) /* the slot of who found none */
#define TELL_NS 100000000 /* an update that was held up for less is not worth a line */
#define TELL_EVERY_MS 10000

/* ------------------------------------------------------------------ shares */

uint64_t share_left(const bucket *b, uint64_t now, uint32_t share_ms, uint32_t lease_ms)
{
    if (share_ms >= SHARE_WINDOW_MS)
        return UINT64_MAX;
    uint64_t full_at = atomic_load_explicit(&b->full_at, memory_order_relaxed);
    uint64_t owed = full_at > now ? full_at - now : 0;
    uint64_t least = (uint64_t)(lease_ms < share_ms / 2 ? lease_ms : share_ms / 2);
    if (owed >= WINDOW_NS)
        return 0;
    uint64_t left = (WINDOW_NS - owed) / SHARE_WINDOW_MS * share_ms;
    /* Crumbs would hold updates up and let nobody finish: whoever is waited for has a whole lease.
       */
    return left < least * 1000000 ? 0 : left;
}

void share_take(bucket *b, uint64_t now, uint32_t share_ms, uint64_t used_ns)
{
    uint64_t most = 2 * (uint64_t)share_ms * 1000000;
    if (share_ms == 0 || share_ms >= SHARE_WINDOW_MS)
        return;
    bucket_take(b, now, (used_ns < most ? used_ns : most) * SHARE_WINDOW_MS / share_ms);
}

static uint32_t share_of(const fanin_server *s, const drain_peer *p)
{
    return p->is_stranger ? s->stranger_share_ms : s->own_share_ms;
}

static uint32_t strangers_share(const fanin_server *s)
{
    uint64_t all = (uint64_t)s->stranger_share_ms * STRANGERS_HALVES / 2;
    return all < SHARE_WINDOW_MS ? (uint32_t)all : SHARE_WINDOW_MS;
}

/* ------------------------------------------------------------------- peers */

/* A free slot, or the peer's. Its name's bits would be the attacker's choice, its address is not.
   */
static drain_peer *slot_of(drain *d, peer_share *from)
{
    if (from->is_own)
        return &d->peers[OWN];
    size_t first = (uintptr_t)from / sizeof *from % DRAIN_PEERS;
    for (size_t i = 0; i < DRAIN_PEERS; i++) {
        drain_peer *p = &d->peers[1 + (first + i) % DRAIN_PEERS];
        if (!p->used || p->from == from)
            return p;
    }
    return &d->peers[OTHERS];
}

/* How long after the beginning it is waited for, whatever its leases say. */
static uint64_t allowance(const fanin_server *s, const drain *d, const drain_peer *p)
{
    uint64_t left =
        p->from ? share_left(&p->from->held_up, d->since, share_of(s, p), s->lease_ms)
                : UINT64_MAX;
    uint64_t all = p->is_stranger ? share_left(&s->strangers_held_up, d->since,
                                               strangers_share(s), s->lease_ms)
                                  : UINT64_MAX;
    return left < all ? left : all;
}

static deadline end_of(const fanin_server *s, const drain *d, drain_peer *p,
                       deadline leases)
{
    uint64_t left = allowance(s, d, p);
    bool cut = left < leases - d->since;
    p->cut = p->cut || cut;
    return cut ? d->since + left : leases;
}

/* It is not waited for any more. */
static void close_slot(const fanin_server *s, drain *d, drain_peer *p)
{
    uint64_t now = clock_ns(), end = now < p->until ? now : p->until;
    uint64_t held = end - d->since;
    if (p->from) {
        share_take(&p->from->held_up, now, share_of(s, p), held);
        p->from->held_up_ns += held;
    }
    if (p->is_stranger && held > d->strangers_ns)
        d->strangers_ns = held;
    if (p->cut && p->leases > 0)
        d->cut = true;
    if (held < d->longest_ns || (d->by[0] && held == d->longest_ns))
        return;
    d->longest_ns = held;
    snprintf(d->by, sizeof d->by, "%s", p->from ? p->from->name : "several");
}

/* ------------------------------------------------------------------ drains */

void drain_begin(publication *p, drain *d, deadline limit)
{
    memset(d, 0, sizeof *d);
    d->since = clock_ns();
    d->limit = limit;
    p->drain = d;
}

void drain_add(fanin_server *s, drain *d, lease *l)
{
    peer_share *from = l->holder->from;
    drain_peer *p = slot_of(d, from);
    deadline at = d->ignores_expiry ? d->limit : deadline_sooner(d->limit, l->expires);
    if (at < d->since)
        at = d->since;
    if (!p->used) {
        p->used = true;
        p->from = p == &d->peers[OTHERS] ? NULL : from;
    }
    /* Where there is a secret, whoever has a session has proven that it knows it. */
    p->is_stranger =
        !from->is_own && !s->tls && !(s->flags & FANIN_SERVER_TRUSTED_NETWORK);
    p->leases++;
    at = end_of(s, d, p, at);
    p->until = at > p->until ? at : p->until;
    l->drained = (uint8_t)(1 + (p - d->peers));
    d->seen++;
}

/* One that was added, or not, has gone; whoever drains is woken if it was the peer's last. */
static void drain_lost(fanin_server *s, drain *d, const lease *l)
{
    if (l->drained == 0)
        return;
    drain_peer *p = &d->peers[l->drained - 1];
    if (--p->leases > 0)
        return;
    close_slot(s, d, p);
    pthread_cond_broadcast(&s->freed);
}

bool drain_wait(fanin_server *s, drain *d)
{
    deadline last = 0;
    for (size_t i = 0; i < sizeof d->peers / sizeof *d->peers; i++)
        if (d->peers[i].leases > 0 && d->peers[i].until > last)
            last = d->peers[i].until;
    if (last == 0 || deadline_passed(last))
        return false;
    (void)condition_wait(&s->freed, &s->lock, last);
    return true;
}

static void note_drain(fanin_server *s, const publication *p, const drain *d)
{
    held_up_note *n = &s->held_up;
    if (d->longest_ns > s->stats.held_up_ns_max) {
        s->stats.held_up_ns_max = d->longest_ns;
        memcpy(s->stats.held_up_by, d->by, sizeof s->stats.held_up_by);
    }
    s->stats.drains_cut += d->cut;
    if (d->longest_ns < TELL_NS && !d->cut)
        return;
    n->times++;
    n->cut = n->cut || d->cut;
    if (d->longest_ns >= n->ns) {
        n->ns = d->longest_ns;
        memcpy(n->by, d->by, sizeof n->by);
        memcpy(n->publication, p->name, sizeof n->publication);
    }
    if (!deadline_passed(n->next))
        return;
    atomic_store(&n->due, true);
    wake_up(s->wake);
}

bool drain_end(fanin_server *s, publication *p, drain *d)
{
    unsigned left = 0;
    for (size_t i = 0; i < sizeof d->peers / sizeof *d->peers; i++) {
        left += d->peers[i].leases;
        if (d->peers[i].leases > 0)
            close_slot(s, d, &d->peers[i]);
    }
    share_take(&s->strangers_held_up, clock_ns(), strangers_share(s), d->strangers_ns);
    if (d->seen > 0)
        note_drain(s, p, d);
    p->drain = NULL;
    return left == 0;
}

bool drain_finish(fanin_server *s, publication *p, drain *d, uint64_t spared,
                  const commit *of)
{
    for (lease *l = p->oldest; l; l = l->newer)
        if (spared == 0 || l->epoch != spared)
            drain_add(s, d, l);
    while ((!of || p->pending == of) && drain_wait(s, d))
        ;
    return drain_end(s, p, d);
}

/* ----------------------------------------------------------------- logging */

void drain_tell(fanin_server *s)
{
    held_up_note *n = &s->held_up;
    if (!atomic_exchange(&n->due, false))
        return;
    pthread_mutex_lock(&s->lock);
    unsigned times = n->times;
    uint64_t ms = n->ns / 1000000;
    bool cut = n->cut;
    char by[sizeof n->by], name[sizeof n->publication];
    memcpy(by, n->by, sizeof by);
    memcpy(name, n->publication, sizeof name);
    n->times = 0;
    n->ns = 0;
    n->cut = false;
    n->next = deadline_in_ms(TELL_EVERY_MS);
    pthread_mutex_unlock(&s->lock);
    if (times > 0)
        log_write(&s->log, cut ? FANIN_LOG_WARNING : FANIN_LOG_INFO, "held-up",
                  "readers held up %u update(s), longest one of %s: %" PRIu64
                  " ms, by leases of %s%s",
                  times, name, ms, by,
                  cut ? "; a peer that has had its share of the minute is not waited "
                        "for (stranger_share_ms, own_share_ms)"
                      : "");
}

/* --------------------------------------------------------- readers, leases */

reader *reader_make(fanin_server *s, peer_share *from)
{
    reader *r = calloc(1, sizeof *r);
    if (!r || !random_bytes(r->id, sizeof r->id)) {
        free(r);
        return NULL;
    }
    r->references = 1;
    r->from = from;
    r->next = s->readers;
    s->readers = r;
    return r;
}

reader *reader_find(const fanin_server *s, const uint8_t id[16])
{
    for (reader *r = s->readers; r; r = r->next)
        if (!r->closed && memcmp(r->id, id, sizeof r->id) == 0)
            return r;
    return NULL;
}

void reader_close(fanin_server *s, reader *r)
{
    r->closed = true;
    for (size_t i = 0; i < SESSION_LEASES; i++) {
        if (!r->leases[i].of)
            continue;
        s->stats.pulls_abandoned++;
        lease_drop(s, &r->leases[i]);
    }
}

void reader_release(fanin_server *s, reader *r)
{
    if (--r->references > 0)
        return;
    reader **link = &s->readers;
    while (*link != r)
        link = &(*link)->next;
    *link = r->next;
    free(r);
}

lease *lease_grant(fanin_server *s, reader *r, publication *p, uint64_t begin)
{
    lease *l = NULL;
    for (size_t i = 0; i < SESSION_LEASES && !l; i++)
        if (!r->leases[i].of)
            l = &r->leases[i];
    if (!l || !random_bytes(l->token, sizeof l->token))
        return NULL;
    l->of = p;
    l->epoch = p->epoch;
    l->begin = begin;
    l->catalog = shard_catalog_retain(p->catalog);
    l->first_region = p->arena * p->catalog->arena_regions;
    l->expires = deadline_in_ms(s->lease_ms);
    l->holder = r;
    l->newer = NULL;
    l->older = p->newest;
    if (p->newest)
        p->newest->newer = l;
    else
        p->oldest = l;
    p->newest = l;
    p->n_leases++;
    s->n_leases++;
    if (p->drain && p->state == STATE_DRAINING)
        drain_add(s, p->drain, l);
    return l;
}

lease *lease_find(reader *r, const uint8_t token[16])
{
    for (size_t i = 0; i < SESSION_LEASES; i++)
        if (r->leases[i].of && memcmp(r->leases[i].token, token, 16) == 0)
            return &r->leases[i];
    return NULL;
}

lease *lease_find_begun(reader *r, uint64_t begin)
{
    for (size_t i = 0; i < SESSION_LEASES; i++)
        if (r->leases[i].of && r->leases[i].begin == begin)
            return &r->leases[i];
    return NULL;
}

void lease_drop(fanin_server *s, lease *l)
{
    publication *p = l->of;
    if (l->older)
        l->older->newer = l->newer;
    else
        p->oldest = l->newer;
    if (l->newer)
        l->newer->older = l->older;
    else
        p->newest = l->older;
    p->n_leases--;
    s->n_leases--;
    if (p->drain)
        drain_lost(s, p->drain, l);
    catalog_discard(s, l->catalog);
    memset(l, 0, sizeof *l);
    if (s->stopping && s->n_leases == 0)
        pthread_cond_broadcast(&s->freed);
}

/* Takes a lease away: its end will not be good. */
static void lease_void(fanin_server *s, lease *l)
{
    reader *r = l->holder;
    void_lease *v = &r->gone[r->n_void++ % SESSION_LEASES];
    memcpy(v->token, l->token, sizeof v->token);
    v->of = l->of;
    lease_drop(s, l);
}

void lease_fail(fanin_server *s, reader *r, const uint8_t token[16],
                const fanin_error *why)
{
    lease *l = lease_find(r, token);
    memcpy(r->failed.token, token, sizeof r->failed.token);
    r->failed.why = (fanin_error)FANIN_ERROR_INIT;
    error_copy(&r->failed.why, why);
    if (l)
        lease_void(s, l);
}

const fanin_error *lease_failed(const reader *r, const uint8_t token[16])
{
    bool same = memcmp(r->failed.token, token, sizeof r->failed.token) == 0;
    return same && r->failed.why.status != FANIN_OK ? &r->failed.why : NULL;
}

void lease_void_epoch(fanin_server *s, publication *p, uint64_t epoch)
{
    for (lease *l = p->oldest, *newer; l; l = newer) {
        newer = l->newer;
        if (l->epoch == epoch)
            lease_void(s, l);
    }
}

void lease_void_outdated(fanin_server *s, publication *p)
{
    for (lease *l = p->oldest, *newer; l; l = newer) {
        newer = l->newer;
        if (!publication_stands(p, l->epoch))
            lease_void(s, l);
    }
}

publication *lease_find_void(reader *r, const uint8_t token[16])
{
    for (size_t i = 0; i < SESSION_LEASES; i++)
        if (r->gone[i].of && memcmp(r->gone[i].token, token, 16) == 0)
            return r->gone[i].of;
    return NULL;
}
