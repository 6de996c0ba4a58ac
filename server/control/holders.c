/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of readers that hand on what they have read of a step, for those that want the same. An
   offer lives in its session; a list lives as long as somebody is in it or waits for it. */
#include "array.h"
#include "control/parked.h"
#include "error_set.h"
#include "publish/publication.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct member {
    const session *of;
    holder_entry entry;
} member;

/** Version first + i + 1 is that of changes[i]. */
struct holder_list {
    struct holder_list *next;
    char publication[PUBLICATION_NAME_SIZE];
    uint64_t step;
    uint8_t holding[16];
    unsigned waiting; /**< parked requests, and calls at work */
    member *members;
    holder_entry *changes;
    size_t n_members, n_changes, members_room, changes_room;
    uint64_t first;
};

/* -------------------------------------------------------------------- lists */

/* Made if it is not there, and to be given back by list_leave(). NULL: no memory. A list that was
   gone meanwhile was empty, and goes on from there, or from a greater version. */
static holder_list *list_enter(struct control *c, const char *publication,
                               uint64_t step, const uint8_t holding[16])
{
    holder_list *l = c->lists;
    while (l && !(l->step == step && memcmp(l->holding, holding, 16) == 0 &&
                  strcmp(l->publication, publication) == 0))
        l = l->next;
    if (!l && (l = calloc(1, sizeof *l))) {
        memcpy(l->publication, publication, sizeof l->publication);
        l->step = step;
        memcpy(l->holding, holding, sizeof l->holding);
        l->first = c->lists_floor;
        l->next = c->lists;
        c->lists = l;
    }
    if (l)
        l->waiting++;
    return l;
}

void list_leave(struct control *c, holder_list *l)
{
    if (--l->waiting > 0 || l->n_members > 0)
        return;
    holder_list **link = &c->lists;
    while (*link != l)
        link = &(*link)->next;
    *link = l->next;
    if (c->lists_floor < l->first + l->n_changes)
        c->lists_floor = l->first + l->n_changes;
    free(l->members);
    free(l->changes);
    free(l);
}

/* Who knows less than what is still there gets the whole list. Without memory all do. */
static void note(struct control *c, holder_list *l, const holder_entry *e, bool left)
{
    size_t most = 2 * l->n_members + 64;
    if (l->n_changes > most) {
        size_t old = l->n_changes / 2;
        l->n_changes -= old;
        l->first += old;
        memmove(l->changes, l->changes + old, l->n_changes * sizeof *l->changes);
    }
    if (array_reserve(&l->changes, &l->changes_room, l->n_changes + 1,
                      sizeof *l->changes)) {
        l->changes[l->n_changes] = *e;
        l->changes[l->n_changes++].left = left;
    } else {
        l->first += l->n_changes + 1;
        l->n_changes = 0;
    }
    c->lists_changed = true;
}

static bool is_in(const holder_list *l, const holder_entry *e)
{
    for (size_t i = 0; i < l->n_members; i++)
        if (memcmp(l->members[i].entry.incarnation, e->incarnation, 16) == 0 &&
            strcmp(l->members[i].entry.address, e->address) == 0)
            return true;
    return false;
}

static bool join(session *s, holder_list *l, const holder_entry *e)
{
    if (!array_reserve(&l->members, &l->members_room, l->n_members + 1,
                       sizeof *l->members))
        return false;
    l->members[l->n_members++] = (member){s, *e};
    note(s->control, l, e, false);
    return true;
}

/* A session that has connected anew may be in the list beside the one before. */
static void part(session *s, holder_list *l)
{
    size_t i = 0;
    while (l->members[i].of != s)
        i++;
    const holder_entry gone = l->members[i].entry;
    l->members[i] = l->members[--l->n_members];
    if (!is_in(l, &gone))
        note(s->control, l, &gone, true);
    l->waiting++; /* list_leave() ends it with the last */
    list_leave(s->control, l);
}

/* ------------------------------------------------------------------- offers */

static offer *find_offer(relay_part *r, const char *publication)
{
    for (size_t i = 0; i < SESSION_OFFERS; i++)
        if (r->offers[i].list && strcmp(r->offers[i].m.publication, publication) == 0)
            return &r->offers[i];
    return NULL;
}

/* By how much a number has grown that began again at 0, if it is less than before. */
static uint64_t grown(uint64_t before, uint64_t now)
{
    return now < before ? now : now - before;
}

/* The first offer of a session tells what was counted before it, too. Units are of a step. */
static void count(fanin_server *server, const msg_offer *before, const msg_offer *now)
{
    const msg_offer none = {0}, *of_step = before->step == now->step ? before : &none;
    fanin_server_stats *s = &server->stats;
    pthread_mutex_lock(&server->lock);
    s->relay_units += grown(of_step->landed, now->landed);
    s->relay_bytes_origin += grown(before->bytes_origin, now->bytes_origin);
    s->relay_bytes_relays += grown(before->bytes_relays, now->bytes_relays);
    s->relay_late += grown(of_step->late, now->late);
    s->relay_taken_over += grown(of_step->taken_over, now->taken_over);
    pthread_mutex_unlock(&server->lock);
}

/* Offers that there are now. */
static void count_offers(session *s, int more)
{
    fanin_server *server = s->control->server;
    s->relays->n_offers += (unsigned)more;
    pthread_mutex_lock(&server->lock);
    server->stats.relays += (uint64_t)(int64_t)more;
    pthread_mutex_unlock(&server->lock);
}

static void withdraw(session *s, offer *o)
{
    part(s, o->list);
    o->list = NULL;
    count_offers(s, -1);
}

void offers_withdraw(session *s)
{
    for (size_t i = 0; i < SESSION_OFFERS; i++)
        if (s->relays->offers[i].list)
            withdraw(s, &s->relays->offers[i]);
}

/* Whether it offers what it has offered already. */
static bool is_same(const msg_offer *a, const msg_offer *b)
{
    return a->step == b->step && memcmp(a->holding, b->holding, 16) == 0 &&
           memcmp(a->incarnation, b->incarnation, 16) == 0 && a->port == b->port &&
           a->local == b->local && strcmp(a->host, b->host) == 0 &&
           strcmp(a->place, b->place) == 0;
}

/* The host is that of the session, so nobody names another's. */
static holder_entry entry_of(const session *s, const msg_offer *m)
{
    holder_entry e = {.local = m->local};
    const char *end = s->is_unix || s->is_local ? NULL : strrchr(s->peer, ':');
    int size = end ? (int)(end - s->peer) : 0;
    snprintf(e.address, sizeof e.address, "%.*s:%u", size, s->peer, (unsigned)m->port);
    memcpy(e.incarnation, m->incarnation, sizeof e.incarnation);
    memcpy(e.host, m->host, sizeof e.host);
    memcpy(e.place, m->place, sizeof e.place);
    return e;
}

static void take(session *s, const msg_offer *m, fanin_error *error)
{
    relay_part *r = s->relays;
    offer *o = r->offers;
    if (r->n_offers == SESSION_OFFERS) {
        error_set(error, FANIN_ERR_LIMIT, NULL,
                  "a session may have offers of %d publications", SESSION_OFFERS);
        return;
    }
    while (o->list)
        o++;
    holder_list *l = list_enter(s->control, m->publication, m->step, m->holding);
    holder_entry e = entry_of(s, m);
    if (l && l->n_members == LIMIT_HOLDERS)
        error_set(error, FANIN_ERR_LIMIT, NULL, "%d relays hold the same already",
                  LIMIT_HOLDERS);
    else if (!l || !join(s, l, &e))
        error_set(error, FANIN_ERR_MEMORY, NULL, "the server is out of memory");
    if (error->status == FANIN_OK) {
        *o = (offer){.m = *m, .list = l};
        count_offers(s, 1);
    }
    if (l)
        list_leave(s->control, l);
}

/* ------------------------------------------------------------------- checks */

static void forbid(const fanin_server *server, fanin_error *error)
{
    bool is_relay = server->flags & FANIN_SERVER_RELAY;
    error_place place = {
        .phase = "relay",
        .remedy = is_relay ? "offer it to the trainer's ranks"
                           : "pull without a relay, or let the trainer allow them "
                             "(relays=True, without FANIN_SERVER_NO_RELAYS)"};
    if (is_relay)
        error_set(error, FANIN_ERR_UNSUPPORTED, &place,
                  "this is a relay, which keeps no list of others");
    else if (server->flags & FANIN_SERVER_NO_RELAYS)
        error_set(error, FANIN_ERR_UNSUPPORTED, &place,
                  "the trainer forbids readers to hand on its weights");
}

/* Lock held. */
static void check_offer(const fanin_server *server, const msg_offer *m,
                        fanin_error *error)
{
    const publication *p = find_present(server, m->publication);
    if (!p)
        describe_missing(server, m->publication, error);
    else if (!p->has_step || m->step > p->step)
        error_set(error, FANIN_ERR_STALE, NULL,
                  "step %" PRIu64 " of %s has not been committed here", m->step,
                  m->publication);
    else if (m->port == 0)
        error_set(error, FANIN_ERR_ARGUMENT, NULL, "an offer has a port");
}

fanin_status handle_offer(session *s, uint64_t request, body *in)
{
    fanin_server *server = s->control->server;
    fanin_error error = FANIN_ERROR_INIT;
    msg_offer m;
    fanin_status status = decode_offer(in, &m);
    if (status != FANIN_OK)
        return status;
    forbid(server, &error);
    if (error.status == FANIN_OK && !m.gone) {
        pthread_mutex_lock(&server->lock);
        check_offer(server, &m, &error);
        pthread_mutex_unlock(&server->lock);
    }
    if (error.status != FANIN_OK) {
        reply_error(s, request, &error);
        return FANIN_OK;
    }
    relay_part *r = relay_part_of(s, request);
    if (!r)
        return FANIN_OK;
    offer *before = find_offer(r, m.publication);
    if (before && !m.gone)
        count(server, &before->m, &m);
    bool same = before && !m.gone && is_same(&before->m, &m);
    if (same)
        before->m = m;
    else if (before)
        withdraw(s, before);
    if (!same && !m.gone)
        take(s, &m, &error);
    reply_error(s, request, &error);
    if (error.status == FANIN_OK)
        encode_empty(&s->out.bytes, request, MSG_OFFER_OK);
    return FANIN_OK;
}

/* ------------------------------------------------------------------ holders */

static void tell_all(session *s, uint64_t request, const holder_list *l,
                     msg_holders_ok *m)
{
    m->entries = calloc(l->n_members + 1, sizeof *m->entries);
    if (!m->entries) {
        reply_fault(s, request, FANIN_ERR_MEMORY, "the server is out of memory");
        return;
    }
    m->all = true;
    for (size_t i = 0; i < l->n_members; i++)
        m->entries[i] = l->members[i].entry;
    m->n_entries = (uint32_t)l->n_members;
    encode_holders_ok(&s->out.bytes, request, m);
    holders_free(m);
}

bool answer_holders(session *s, const parked *q, bool is_over)
{
    const holder_list *l = q->list;
    uint64_t known = q->version, now = l->first + l->n_changes;
    msg_holders_ok m = {.version = now};
    if (known == now && !is_over)
        return false;
    if (known < l->first || known > now || now - known > LIMIT_HOLDERS) {
        tell_all(s, q->request, l, &m);
        return true;
    }
    m.entries = l->changes + (known - l->first);
    m.n_entries = (uint32_t)(now - known);
    encode_holders_ok(&s->out.bytes, q->request, &m);
    return true;
}

fanin_status handle_holders(session *s, uint64_t request, body *in)
{
    fanin_error error = FANIN_ERROR_INIT;
    msg_holders m;
    fanin_status status = decode_holders(in, &m);
    if (status != FANIN_OK)
        return status;
    forbid(s->control->server, &error);
    reply_error(s, request, &error);
    if (error.status != FANIN_OK || !relay_part_of(s, request))
        return FANIN_OK;
    parked q = {.type = MSG_HOLDERS,
                .request = request,
                .version = m.version,
                .at = deadline_in_ms(m.timeout_ms),
                .list = list_enter(s->control, m.publication, m.step, m.holding)};
    if (q.list)
        park_or_answer(s, &q);
    else
        reply_fault(s, request, FANIN_ERR_MEMORY, "the server is out of memory");
    return FANIN_OK;
}

/* ------------------------------------------------------------------- stats */

uint32_t offers_tell(const struct control *c, const char *publication, uint32_t entry,
                     stats_relay rows[LIMIT_STATS], uint32_t n)
{
    for (const session *s = c->sessions; s; s = s->next) {
        const offer *o = s->relays ? find_offer(s->relays, publication) : NULL;
        if (!o || n == LIMIT_STATS)
            continue;
        const msg_offer *m = &o->m;
        const holder_entry e = entry_of(s, m);
        stats_relay *r = &rows[n++];
        *r = (stats_relay){.publication = entry,
                           .step = m->step,
                           .units = m->units,
                           .landed = m->landed,
                           .bytes_origin = m->bytes_origin,
                           .bytes_relays = m->bytes_relays,
                           .bytes_handed_on = m->bytes_handed_on,
                           .late = m->late,
                           .taken_over = m->taken_over};
        memcpy(r->address, e.address, sizeof r->address);
        memcpy(r->place, e.place, sizeof r->place);
    }
    return n;
}
