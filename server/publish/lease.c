/* SPDX-License-Identifier: Apache-2.0 */
#include "publish/lease.h"
#include "digest.h"
#include "error_set.h"
#include "publish/drain.h"
#include "publish/garbage.h"

#include <stdlib.h>
#include <string.h>

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
