/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What readers ask that hand on to each other. In this order: requests that wait for news, what has
 * landed here, and lists of who wants the same of a step. An offer lives in its session; a list
 * lives as long as somebody is in it or waits for it.
 */
#include "control/relays.h"
#include "array.h"
#include "error_set.h"
#include "place.h"
#include "publish/filling.h"
#include "publish/lease.h"
#include "publish/publication.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Of what follows: answers if there are news, or it is over. */
static bool answer_landed(session *s, const parked *q, bool is_over);
static bool answer_holders(session *s, const parked *q, bool is_over);
/* Entered by a request. */
static void list_leave(struct control *c, holder_list *l);
static void offers_withdraw(session *s);

static relay_part *relay_part_of(session *s, uint64_t request)
{
    if (!s->relays)
        s->relays = calloc(1, sizeof *s->relays);
    if (!s->relays)
        reply_fault(s, request, FANIN_ERR_MEMORY, "the server is out of memory");
    return s->relays;
}

static bool answer(session *s, const parked *q, bool is_over)
{
    return q->type == MSG_LANDED ? answer_landed(s, q, is_over)
                                 : answer_holders(s, q, is_over);
}

static void release_list(session *s, const parked *q)
{
    if (q->list)
        list_leave(s->control, q->list);
}

/* ------------------------------------------------------------------- places */

static void park_request(session *s, const parked *q)
{
    fanin_server *server = s->control->server;
    relay_part *r = s->relays;
    parked *place = r->parked;
    while (place->type)
        place++;
    *place = *q;
    r->n_parked++;
    r->n_landed += q->type == MSG_LANDED;
    if (q->type == MSG_LANDED) {
        pthread_mutex_lock(&server->lock);
        server->listeners++;
        pthread_mutex_unlock(&server->lock);
    }
}

static void unpark_request(session *s, parked *place)
{
    fanin_server *server = s->control->server;
    relay_part *r = s->relays;
    bool listens = place->type == MSG_LANDED;
    release_list(s, place);
    place->type = 0;
    r->n_parked--;
    r->stirred = r->stirred && r->n_parked > 0;
    r->n_landed -= listens;
    if (!listens)
        return;
    pthread_mutex_lock(&server->lock);
    server->listeners--;
    pthread_mutex_unlock(&server->lock);
}

void relay_part_free(session *s)
{
    if (!s->relays)
        return;
    for (size_t i = 0; i < SESSION_PARKED; i++)
        if (s->relays->parked[i].type)
            unpark_request(s, &s->relays->parked[i]);
    offers_withdraw(s);
    free(s->relays);
    s->relays = NULL;
}

/* --------------------------------------------------------------------- news */

/* To tell all costs the thread its time: many sessions hear seldom, and at the same moments, so
   that it looks for them at once. Few hear at once, for who passes on gigabytes in milliseconds
   waits for nothing else. Only this thread changes the number of sessions. */
static deadline due_for(const struct control *c, uint64_t sessions, uint64_t most_ms,
                        uint64_t since_ns, uint64_t now_ns)
{
    uint64_t ms = c->server->control_sessions / sessions;
    uint64_t every = (ms < most_ms ? ms : most_ms) * 1000000;
    return every > 0 ? since_ns + ((now_ns - since_ns) / every + 1) * every : 0;
}

deadline news_due(const struct control *c, uint64_t now_ns)
{
    return due_for(c, NEWS_SESSIONS, NEWS_MOST_MS, 0, now_ns);
}

/* News that come soon after others wait until more of them are together. */
static void answer_or_park(session *s, parked *q)
{
    relay_part *r = s->relays;
    uint64_t now = clock_ns();
    bool is_over = q->at <= now;
    bool hears = r->quiet_until <= now && q->quiet_until <= now;
    if (is_over || hears) {
        if (answer(s, q, is_over)) {
            r->quiet_until = news_due(s->control, now);
            release_list(s, q);
            return;
        }
    }
    if (r->n_parked < SESSION_PARKED) {
        park_request(s, q);
        /* For news that are put off, or came before anybody listened. Lists are this thread's. */
        if (!hears || q->type == MSG_LANDED)
            (void)parked_stir(s);
        return;
    }
    release_list(s, q);
    fanin_error error = FANIN_ERROR_INIT;
    error_set(&error, FANIN_ERR_LIMIT, NULL,
              "a session may have %d parked requests for relays", SESSION_PARKED);
    reply_error(s, q->request, &error);
}

bool parked_stir(session *s)
{
    relay_part *r = s->relays;
    bool is_new = r && r->n_parked > 0 && !r->stirred;
    if (is_new)
        r->stirred = true;
    return is_new;
}

static bool tell_news(session *s, uint64_t now)
{
    relay_part *r = s->relays;
    bool later = false;
    if (!r->stirred || r->quiet_until > now)
        return false;
    for (size_t i = 0; i < SESSION_PARKED; i++) {
        parked *q = &r->parked[i];
        bool hears = q->type && q->quiet_until <= now;
        later = later || (q->type && !hears);
        if (!hears || !answer(s, q, false))
            continue;
        unpark_request(s, q);
        r->quiet_until = news_due(s->control, now);
        return true; /* the others have theirs next time */
    }
    r->stirred = later;
    return false;
}

bool parked_look(session *s)
{
    if (!s->relays || s->relays->n_parked == 0)
        return false;
    uint64_t now = clock_ns();
    bool says = tell_news(s, now);
    for (size_t i = 0; i < SESSION_PARKED; i++) {
        parked *q = &s->relays->parked[i];
        if (!q->type || q->at > now)
            continue;
        says = answer(s, q, true) || says;
        unpark_request(s, q);
    }
    return says;
}

deadline parked_due(const session *s)
{
    const relay_part *r = s->relays;
    deadline at = UINT64_MAX, news = UINT64_MAX;
    if (!r || r->n_parked == 0)
        return at;
    unsigned left = r->n_parked;
    for (const parked *q = r->parked; left > 0; q++) {
        if (!q->type)
            continue;
        at = deadline_sooner(at, q->at);
        news = deadline_sooner(news, q->quiet_until);
        left--;
    }
    if (news < r->quiet_until)
        news = r->quiet_until;
    return r->stirred ? deadline_sooner(at, news) : at;
}

void parked_cancel(session *s)
{
    for (size_t i = 0; s->relays && i < SESSION_PARKED; i++) {
        parked *q = &s->relays->parked[i];
        if (!q->type)
            continue;
        reply_fault(s, q->request, FANIN_ERR_CLOSED, SHUTTING_DOWN);
        unpark_request(s, q);
    }
}

bool parked_lives(const session *s)
{
    return s->relays && s->relays->n_parked + s->relays->n_offers > 0;
}

/* ------------------------------------------------------------------ landed */

/* Lock held. Writes into the output, as what it tells may change without the lock. */
static bool tell_landed(session *s, const parked *q, bool is_over, fanin_error *error)
{
    const fanin_server *server = s->control->server;
    const lease *l = lease_find(s->reader, q->token);
    msg_landed_ok m = {.serving = (uint32_t)server->stats.sends_waiting};
    landed_range whole;
    if (!l)
        error_set(error, FANIN_ERR_STALE, NULL,
                  lease_find_void(s->reader, q->token)
                      ? "the lease is gone: the weights are being rewritten"
                      : "this session has no such lease");
    else if (!filling_since(l->of, l->catalog->n_boxes, q->version, &whole, &m))
        error_set(error, FANIN_ERR_ARGUMENT, NULL,
                  "this lease never had such a version");
    else if (m.n_ranges > 0 || is_over)
        encode_landed_ok(&s->out.bytes, q->request, &m);
    else
        return false;
    return true;
}

static bool answer_landed(session *s, const parked *q, bool is_over)
{
    fanin_server *server = s->control->server;
    fanin_error error = FANIN_ERROR_INIT;
    pthread_mutex_lock(&server->lock);
    bool says = tell_landed(s, q, is_over, &error);
    pthread_mutex_unlock(&server->lock);
    reply_error(s, q->request, &error);
    return says;
}

fanin_status handle_landed(session *s, uint64_t request, body *in)
{
    msg_landed m;
    fanin_status status = decode_landed(in, &m);
    if (status != FANIN_OK)
        return status;
    parked q = {.type = MSG_LANDED,
                .request = request,
                .version = m.version,
                .at = deadline_in_ms(m.timeout_ms)};
    memcpy(q.token, m.token, sizeof q.token);
    if (relay_part_of(s, request))
        answer_or_park(s, &q);
    return FANIN_OK;
}

/* -------------------------------------------------------------------- lists */

/* Of a roster: what an offer tells of its reader, as it is sent. */
typedef struct holder_number {
    uint64_t since; /**< version of the roster */
    buffer entry;   /**< empty: the number is free */
} holder_number;

/** Who holds the same of a publication, at whatever step. Each offer has a number, by which lists
    tell it: a reader hears once of another one, and not at each step. Lives with its lists. */
typedef struct holder_roster {
    struct holder_roster *next;
    char publication[PUBLICATION_NAME_SIZE];
    uint8_t holding[16];
    holder_list *lists;
    uint64_t version; /**< of the last entry */
    holder_number *numbers;
    size_t n, n_used, room;
} holder_roster;

/** Other versions than LIST_EMPTY are of one count with those of rosters: none comes again. */
struct holder_list {
    holder_list *next;
    holder_roster *of;
    uint64_t step, began_ns, version;
    unsigned users; /**< parked requests, offers, and calls at work */
    uint8_t members[LIMIT_HOLDERS / 8]; /**< a bit a number, lowest first */
};

/* As if nobody shared a list. Arrays have room for twice as much at most. */
size_t relay_part_memory(const session *s)
{
    const relay_part *r = s->relays;
    const size_t list = sizeof(holder_list) + sizeof(holder_roster);
    const size_t number = 2 * (sizeof(holder_number) + sizeof(holder_entry));
    if (!r)
        return 0;
    return sizeof *r + (r->n_parked - r->n_landed) * list +
           r->n_offers * (list + number);
}

static void free_roster(struct control *c, holder_roster *r)
{
    holder_roster **link = &c->rosters;
    while (*link != r)
        link = &(*link)->next;
    *link = r->next;
    free(r->numbers); /* free ones */
    free(r);
}

static holder_roster *find_roster(struct control *c, const char *publication,
                                  const uint8_t holding[16])
{
    holder_roster *r = c->rosters;
    while (r && !(memcmp(r->holding, holding, 16) == 0 &&
                  strcmp(r->publication, publication) == 0))
        r = r->next;
    if (!r && (r = calloc(1, sizeof *r))) {
        memcpy(r->publication, publication, sizeof r->publication);
        memcpy(r->holding, holding, sizeof r->holding);
        r->next = c->rosters;
        c->rosters = r;
    }
    return r;
}

/* Made if it is not there, and to be given back by list_leave(). NULL: no memory. */
static holder_list *list_enter(struct control *c, const char *publication,
                               uint64_t step, const uint8_t holding[16])
{
    holder_roster *r = find_roster(c, publication, holding);
    holder_list *l = r ? r->lists : NULL;
    while (l && l->step != step)
        l = l->next;
    if (r && !l && (l = calloc(1, sizeof *l))) {
        l->of = r;
        l->step = step;
        l->began_ns = clock_ns();
        l->version = LIST_EMPTY;
        l->next = r->lists;
        r->lists = l;
    }
    if (l)
        l->users++;
    else if (r && !r->lists)
        free_roster(c, r);
    return l;
}

static void list_leave(struct control *c, holder_list *l)
{
    if (--l->users > 0)
        return;
    holder_list **link = &l->of->lists;
    while (*link != l)
        link = &(*link)->next;
    *link = l->next;
    if (!l->of->lists)
        free_roster(c, l->of);
    free(l);
}

static void list_set(struct control *c, holder_list *l, size_t number, bool is_member)
{
    uint8_t bit = (uint8_t)(1u << number % 8), *of = &l->members[number / 8];
    *of = (uint8_t)(is_member ? *of | bit : *of & ~bit);
    l->version = ++c->lists_version;
    c->lists_changed = true;
}

/* There is one. False: no memory. */
static bool take_number(struct control *c, holder_roster *r, holder_entry *e)
{
    size_t number = r->n_used < r->n ? 0 : r->n;
    while (number < r->n && r->numbers[number].entry.size > 0)
        number++;
    if (!array_reserve(&r->numbers, &r->room, number + 1, sizeof *r->numbers))
        return false;
    holder_number *to = &r->numbers[number];
    if (number == r->n)
        r->numbers[r->n++] = (holder_number){0};
    e->number = (uint32_t)number;
    encode_holder_entry(&to->entry, e);
    if (to->entry.failed) {
        buffer_free(&to->entry);
        return false;
    }
    to->since = r->version = ++c->lists_version;
    r->n_used++;
    return true;
}

/* It names another one then, who is told as such. */
static void free_number(holder_roster *r, size_t number)
{
    buffer_free(&r->numbers[number].entry);
    if (--r->n_used > 0)
        return;
    free(r->numbers);
    r->numbers = NULL;
    r->n = r->room = 0;
}

/* ------------------------------------------------------------------- offers */

static offer *find_offer(relay_part *r, const char *publication)
{
    unsigned left = r->n_offers;
    for (offer *o = r->offers; left > 0; o++) {
        if (o->list && strcmp(o->m.publication, publication) == 0)
            return o;
        left -= o->list != NULL;
    }
    return NULL;
}

/* By how much a number has grown that began again at 0, if it is less than before. */
static uint64_t grown(uint64_t before, uint64_t now)
{
    return now < before ? now : now - before;
}

/* The first offer of a session tells what was counted before it, too. Units are of a step. */
static void add_offer_stats(fanin_server *server, const msg_offer *before,
                            const msg_offer *now)
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

/* Who offers something else now waits for no news of those who hold that, and is told none. */
static void end_parked(session *s, const char *publication, uint64_t step)
{
    for (size_t i = 0; i < SESSION_PARKED; i++) {
        parked *q = &s->relays->parked[i];
        if (q->type != MSG_HOLDERS || q->list->step != step ||
            strcmp(q->list->of->publication, publication) != 0)
            continue;
        msg_holders_ok nothing_new = {.version = q->version, .roster = q->roster};
        if (q->version > 0)
            encode_holders_ok(&s->out.bytes, q->request, &nothing_new);
        else
            (void)answer_holders(s, q, true);
        unpark_request(s, q);
    }
}

static void withdraw(session *s, offer *o)
{
    free_number(o->list->of, o->number);
    list_set(s->control, o->list, o->number, false);
    list_leave(s->control, o->list);
    o->list = NULL;
    count_offers(s, -1);
}

static void offers_withdraw(session *s)
{
    for (size_t i = 0; i < SESSION_OFFERS; i++)
        if (s->relays->offers[i].list)
            withdraw(s, &s->relays->offers[i]);
}

/* Whether it offers what it has offered already, perhaps of another step. */
static bool is_same_holder(const msg_offer *a, const msg_offer *b)
{
    return memcmp(a->holding, b->holding, 16) == 0 &&
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

static void take_offer(session *s, const msg_offer *m, fanin_error *error)
{
    struct control *c = s->control;
    relay_part *r = s->relays;
    offer *o = r->offers;
    if (r->n_offers == SESSION_OFFERS) {
        error_set(error, FANIN_ERR_LIMIT, NULL,
                  "a session may have offers of %d publications", SESSION_OFFERS);
        return;
    }
    while (o->list)
        o++;
    holder_list *l = list_enter(c, m->publication, m->step, m->holding);
    holder_entry e = entry_of(s, m);
    if (l && l->of->n_used == LIMIT_HOLDERS)
        error_set(error, FANIN_ERR_LIMIT, NULL, "%d relays hold the same already",
                  LIMIT_HOLDERS);
    else if (!l || !take_number(c, l->of, &e))
        error_set(error, FANIN_ERR_MEMORY, NULL, "the server is out of memory");
    if (error->status == FANIN_OK) {
        *o = (offer){.m = *m, .list = l, .number = e.number};
        list_set(c, l, e.number, true);
        count_offers(s, 1);
    } else if (l) {
        list_leave(c, l);
    }
}

/* To another step, with the number. Without memory it ends, as the reader may not hold the step
   before any more. */
static void move_offer(session *s, offer *o, const msg_offer *m, fanin_error *error)
{
    struct control *c = s->control;
    holder_list *l = list_enter(c, m->publication, m->step, m->holding);
    if (!l) {
        error_set(error, FANIN_ERR_MEMORY, NULL, "the server is out of memory");
        withdraw(s, o);
        return;
    }
    list_set(c, o->list, o->number, false);
    list_leave(c, o->list);
    o->list = l;
    o->m = *m;
    list_set(c, l, o->number, true);
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

/* It is wrong, whoever holds it. */
static void refuse_taken_back(const char *publication, uint64_t step,
                              fanin_error *error)
{
    error_set(error, FANIN_ERR_STALE, NULL, "step %" PRIu64 " of %s was taken back",
              step, publication);
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
    else if (publication_has_taken_back(p, m->step))
        refuse_taken_back(m->publication, m->step, error);
    else if (m->port == 0)
        error_set(error, FANIN_ERR_ARGUMENT, NULL, "an offer has a port");
    else if (!place_valid(m->place))
        error_set(error, FANIN_ERR_ARGUMENT, NULL, "an offer's place is " PLACE_FORM);
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
        add_offer_stats(server, &before->m, &m);
    bool same = before && !m.gone && is_same_holder(&before->m, &m);
    bool moves = same && before->m.step != m.step, ends = before && (!same || moves);
    uint64_t step = ends ? before->m.step : 0;
    if (moves)
        move_offer(s, before, &m, &error);
    else if (same)
        before->m = m;
    else if (before)
        withdraw(s, before);
    if (!same && !m.gone)
        take_offer(s, &m, &error);
    reply_error(s, request, &error);
    if (error.status == FANIN_OK)
        encode_empty(&s->out.bytes, request, MSG_OFFER_OK);
    if (ends)
        end_parked(s, m.publication, step);
    return FANIN_OK;
}

/* ------------------------------------------------------------------ holders */

/* False: no memory. */
static bool add_entries(const holder_roster *r, uint64_t known, msg_holders_ok *m,
                        bytes_view **encoded)
{
    if (known >= r->version)
        return true;
    bytes_view *to = *encoded = calloc(r->n + 1, sizeof *to);
    for (size_t i = 0; to && i < r->n; i++) {
        const holder_number *at = &r->numbers[i];
        if (at->entry.size > 0 && at->since > known)
            to[m->n_entries++] = (bytes_view){at->entry.data, at->entry.size};
    }
    m->encoded = to;
    return to != NULL;
}

/* Who knows nothing hears soon, though of all that come at the same time: lists begin when the
   first does. Where hundreds come within a second, all would be told of each. */
static deadline quiet_of(const struct control *c, const parked *q)
{
    uint64_t began = q->list->began_ns, now = clock_ns();
    return q->version == 0 ? due_for(c, NEWS_SESSIONS, NEWS_MOST_MS, began, now)
                           : due_for(c, MORE_SESSIONS, MORE_MOST_MS, began, now);
}

static bool answer_holders(session *s, const parked *q, bool is_over)
{
    const holder_list *l = q->list;
    const holder_roster *r = l->of;
    msg_holders_ok m = {.version = l->version, .roster = q->roster};
    bytes_view *encoded = NULL;
    if (q->version == l->version && !is_over)
        return false;
    if (q->version != l->version) {
        m.roster = r->version;
        m.members = (bytes_view){l->members, r->n > 0 ? (r->n + 7) / 8 : 1};
        if (!add_entries(r, q->roster, &m, &encoded)) {
            reply_fault(s, q->request, FANIN_ERR_MEMORY, "the server is out of memory");
            return true;
        }
        session_take_spare(s);
    }
    encode_holders_ok(&s->out.bytes, q->request, &m);
    free(encoded);
    return true;
}

fanin_status handle_holders(session *s, uint64_t request, body *in)
{
    fanin_error error = FANIN_ERROR_INIT;
    msg_holders m;
    fanin_status status = decode_holders(in, &m);
    if (status != FANIN_OK)
        return status;
    fanin_server *server = s->control->server;
    forbid(server, &error);
    pthread_mutex_lock(&server->lock);
    const publication *p = find_present(server, m.publication);
    if (p && publication_has_taken_back(p, m.step))
        refuse_taken_back(m.publication, m.step, &error);
    pthread_mutex_unlock(&server->lock);
    reply_error(s, request, &error);
    if (error.status != FANIN_OK || !relay_part_of(s, request))
        return FANIN_OK;
    parked q = {.type = MSG_HOLDERS,
                .request = request,
                .version = m.version,
                .roster = m.roster,
                .at = deadline_in_ms(m.timeout_ms),
                .list = list_enter(s->control, m.publication, m.step, m.holding)};
    if (!q.list) {
        reply_fault(s, request, FANIN_ERR_MEMORY, "the server is out of memory");
        return FANIN_OK;
    }
    q.quiet_until = quiet_of(s->control, &q);
    answer_or_park(s, &q);
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
