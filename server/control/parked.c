/* SPDX-License-Identifier: Apache-2.0 */
#include "control/dispatch.h"
#include "control/parked.h"
#include "error_set.h"

#include <stdlib.h>

relay_part *relay_part_of(session *s, uint64_t request)
{
    if (!s->relays)
        s->relays = calloc(1, sizeof *s->relays);
    if (!s->relays)
        reply_fault(s, request, FANIN_ERR_MEMORY, "the server is out of memory");
    return s->relays;
}

size_t relay_part_memory(const session *s)
{
    const size_t in_lists = 4 * sizeof(holder_entry); /* as a member, and of changes */
    return s->relays ? sizeof *s->relays + s->relays->n_offers * in_lists : 0;
}

static bool answer(session *s, const parked *q, bool is_over)
{
    return q->type == MSG_LANDED ? answer_landed(s, q, is_over)
                                 : answer_holders(s, q, is_over);
}

static void give_back(session *s, const parked *q)
{
    if (q->list)
        list_leave(s->control, q->list);
}

/* ------------------------------------------------------------------- places */

static void take_place(session *s, const parked *q)
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
    parked_stir(s); /* for news that are put off, or came before anybody listened */
}

static void leave_place(session *s, parked *place)
{
    fanin_server *server = s->control->server;
    relay_part *r = s->relays;
    bool listens = place->type == MSG_LANDED;
    give_back(s, place);
    place->type = 0;
    r->n_parked--;
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
            leave_place(s, &s->relays->parked[i]);
    offers_withdraw(s);
    free(s->relays);
    s->relays = NULL;
}

/* --------------------------------------------------------------------- news */

/* Of all sessions at the same moments, so that the thread looks for them at once. */
static deadline next_news(void)
{
    const uint64_t every = (uint64_t)NEWS_EVERY_MS * 1000000;
    return (clock_ns() / every + 1) * every;
}

/* News that come soon after others wait until more of them are together. */
void park_or_answer(session *s, const parked *q)
{
    relay_part *r = s->relays;
    bool is_over = deadline_passed(q->at);
    if (is_over || deadline_passed(r->quiet_until)) {
        if (answer(s, q, is_over)) {
            r->quiet_until = next_news();
            give_back(s, q);
            return;
        }
    }
    if (r->n_parked < SESSION_PARKED) {
        take_place(s, q);
        return;
    }
    give_back(s, q);
    fanin_error error = FANIN_ERROR_INIT;
    error_set(&error, FANIN_ERR_LIMIT, NULL,
              "a session may have %d parked requests for relays", SESSION_PARKED);
    reply_error(s, q->request, &error);
}

void parked_stir(session *s)
{
    if (s->relays)
        s->relays->stirred = s->relays->n_parked > 0;
}

void lists_look(struct control *c)
{
    if (!c->lists_changed)
        return;
    c->lists_changed = false;
    for (session *s = c->sessions; s; s = s->next) {
        parked_stir(s);
        session_note_due(s);
    }
}

static bool tell_news(session *s)
{
    relay_part *r = s->relays;
    if (!r->stirred || !deadline_passed(r->quiet_until))
        return false;
    for (size_t i = 0; i < SESSION_PARKED; i++) {
        parked *q = &r->parked[i];
        if (!q->type || !answer(s, q, false))
            continue;
        leave_place(s, q);
        r->quiet_until = next_news();
        return true; /* the others have theirs next time */
    }
    r->stirred = false;
    return false;
}

bool parked_look(session *s)
{
    if (!s->relays || s->relays->n_parked == 0)
        return false;
    bool says = tell_news(s);
    for (size_t i = 0; i < SESSION_PARKED; i++) {
        parked *q = &s->relays->parked[i];
        if (!q->type || !deadline_passed(q->at))
            continue;
        says = answer(s, q, true) || says;
        leave_place(s, q);
    }
    return says;
}

deadline parked_due(const session *s)
{
    const relay_part *r = s->relays;
    deadline at = UINT64_MAX;
    if (!r || r->n_parked == 0)
        return at;
    for (size_t i = 0; i < SESSION_PARKED; i++)
        if (r->parked[i].type)
            at = deadline_sooner(at, r->parked[i].at);
    return r->stirred ? deadline_sooner(at, r->quiet_until) : at;
}

void parked_cancel(session *s)
{
    for (size_t i = 0; s->relays && i < SESSION_PARKED; i++) {
        parked *q = &s->relays->parked[i];
        if (!q->type)
            continue;
        reply_fault(s, q->request, FANIN_ERR_CLOSED, SHUTTING_DOWN);
        leave_place(s, q);
    }
}

bool parked_lives(const session *s)
{
    return s->relays && s->relays->n_parked + s->relays->n_offers > 0;
}
