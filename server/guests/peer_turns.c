/* SPDX-License-Identifier: Apache-2.0 */
#include "guests/peer_turns.h"

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
