/* SPDX-License-Identifier: Apache-2.0 */
#include "control/waits.h"
#include "control/reply.h"
#include "control/requests.h"
#include "error_set.h"

#include <inttypes.h>
#include <string.h>

#define EVENTS_QUEUED                                                                  \
    (64 << 10) /* bytes of output beyond which only the newest event goes */

/* -------------------------------------------------------------------- wait */

/* Answers if the publication is paused, or stable at a step that will do. Lock held. */
static bool answer_wait(session *s, uint64_t request, const msg_wait *w)
{
    publication *p = find_present(s->control->server, w->publication);
    fanin_error error = FANIN_ERROR_INIT;
    if (p && publication_is_away(p)) {
        describe_paused(p, &error);
        reply_error(s, request, &error);
        return true;
    }
    if (!p || p->state != STATE_STABLE ||
        (w->rule != WIRE_RULE_NEWEST && p->step < w->step))
        return false;
    msg_wait_ok m = {.step = p->step,
                     .catalog_version = p->catalog->version,
                     .stable_ns = publication_stable_ns(p)};
    memcpy(m.key_digest, p->catalog->key_digest.bytes, sizeof m.key_digest);
    msg_begin_ok lease = {0};
    const msg_begin begin = {.step = p->step, .catalog_version = w->begin_version};
    if (w->begin_version != 0) /* who is not granted one begins as ever */
        answer_begin(s, p, request, &begin, &lease, &error);
    if (lease.granted) {
        m.token = (bytes_view){lease.token, sizeof lease.token};
        m.lease_ms = lease.lease_ms;
        m.word = lease.word;
        m.epoch = m.word ? lease.epoch : 0;
        m.first_region = lease.first_region;
    }
    encode_wait_ok(&s->out.bytes, request, &m);
    return true;
}

static bool publishes_anything(const fanin_server *server)
{
    for (size_t i = 0; i < server->n_publications; i++)
        if (server->publications[i]->present && server->publications[i]->has_step)
            return true;
    return false;
}

/* Why a wait cannot be parked, in *error. Lock held. */
static bool may_park(const session *s, const msg_wait *w, fanin_error *error)
{
    const fanin_server *server = s->control->server;
    if (!find_present(server, w->publication) && publishes_anything(server))
        describe_missing(server, w->publication, error);
    else if (server->stopping)
        error_set(error, FANIN_ERR_CLOSED, NULL, SHUTTING_DOWN);
    else if (s->n_waits == SESSION_WAITS)
        error_set(error, FANIN_ERR_LIMIT, NULL, "a session may have %d waits at a time",
                  SESSION_WAITS);
    return error->status == FANIN_OK;
}

static void park(session *s, uint64_t request, const msg_wait *w)
{
    parked_wait *slot = s->waits;
    while (slot->used)
        slot++;
    *slot = (parked_wait){.used = true,
                          .request = request,
                          .wait = *w,
                          .at = deadline_in_ms(w->timeout_ms)};
    slot->wait.begin_version = 0; /* nobody waits under a lease, not for other ranks */
    s->n_waits++;
    s->control->server->listeners++;
}

/* Lock held. */
static void unpark(session *s, parked_wait *w)
{
    w->used = false;
    s->n_waits--;
    s->control->server->listeners--;
}

/* A client whose pull failed elsewhere does not take its wait back, and comes again: with all slots
   taken the oldest wait for the publication makes room. Lock held. */
static void make_room(session *s, const msg_wait *w)
{
    parked_wait *oldest = NULL;
    if (s->n_waits < SESSION_WAITS)
        return;
    for (size_t i = 0; i < SESSION_WAITS; i++) {
        parked_wait *one = &s->waits[i];
        if (strcmp(one->wait.publication, w->publication) == 0 &&
            (!oldest || one->request < oldest->request))
            oldest = one;
    }
    if (!oldest)
        return;
    unpark(s, oldest);
    reply_fault(s, oldest->request, FANIN_ERR_CANCELLED,
                "a later wait of the session took its place");
}

fanin_status handle_wait(session *s, uint64_t request, body *in)
{
    fanin_server *server = s->control->server;
    fanin_error error = FANIN_ERROR_INIT;
    msg_wait m;
    fanin_status status = decode_wait(in, &m);
    if (status != FANIN_OK)
        return status;
    pthread_mutex_lock(&server->lock);
    if (!answer_wait(s, request, &m)) {
        make_room(s, &m);
        if (may_park(s, &m, &error))
            park(s, request, &m);
    }
    pthread_mutex_unlock(&server->lock);
    reply_error(s, request, &error);
    return FANIN_OK;
}

/* Lock held. */
static void describe_timeout(const fanin_server *server, const msg_wait *w,
                             fanin_error *error)
{
    const publication *p = find_present(server, w->publication);
    unsigned rank = server->rank;
    error_place place = {.phase = "wait", .rank_plus_1 = (int32_t)rank + 1};
    if (!p && server->n_publications > 0)
        describe_missing(server, w->publication, error);
    else if (!p)
        error_set(error, FANIN_ERR_TIMEOUT, &place, "rank %u publishes nothing yet",
                  rank);
    else if (!p->has_step)
        error_set(error, FANIN_ERR_TIMEOUT, &place,
                  "rank %u has not committed %s yet (%s)", rank, p->name,
                  state_name(p->state));
    else
        error_set(error, FANIN_ERR_TIMEOUT, &place,
                  "rank %u is at step %" PRIu64 " (%s)", rank, p->step,
                  state_name(p->state));
}

deadline waits_due(const session *s)
{
    deadline at = UINT64_MAX;
    for (unsigned i = 0; s->n_waits > 0 && i < SESSION_WAITS; i++)
        if (s->waits[i].used)
            at = deadline_sooner(at, s->waits[i].at);
    return at;
}

void waits_expire(session *s)
{
    fanin_server *server = s->control->server;
    for (size_t i = 0; i < SESSION_WAITS && s->n_waits > 0; i++) {
        parked_wait *w = &s->waits[i];
        fanin_error error = FANIN_ERROR_INIT;
        if (!w->used || !deadline_passed(w->at))
            continue;
        pthread_mutex_lock(&server->lock);
        unpark(s, w);
        if (!answer_wait(s, w->request, &w->wait))
            describe_timeout(server, &w->wait, &error);
        pthread_mutex_unlock(&server->lock);
        reply_error(s, w->request, &error);
    }
}

void waits_cancel(session *s)
{
    fanin_server *server = s->control->server;
    for (size_t i = 0; i < SESSION_WAITS; i++) {
        if (!s->waits[i].used)
            continue;
        pthread_mutex_lock(&server->lock);
        unpark(s, &s->waits[i]);
        pthread_mutex_unlock(&server->lock);
        reply_fault(s, s->waits[i].request, FANIN_ERR_CLOSED, SHUTTING_DOWN);
    }
}

/* ------------------------------------------------------------------- watch */

/* Lock held. */
static void report(session *s, const watch *w, const state_change *change)
{
    msg_event m = {.step = change->step, .state = state_for(s, change->state)};
    memcpy(m.publication, w->publication, sizeof m.publication);
    encode_event(&s->out.bytes, w->request, &m);
}

/* Everything that happened since the last report, or the newest if that is too much.
   Lock held. */
static void catch_up(session *s, watch *w)
{
    const publication *p = publication_find(s->control->server, w->publication);
    if (!p || p->changes == w->seen)
        return;
    if (p->changes - w->seen > HISTORY)
        w->seen = p->changes - HISTORY;
    if (outgoing_left(&s->out) > EVENTS_QUEUED)
        w->seen = p->changes - 1;
    while (w->seen < p->changes)
        report(s, w, &p->history[w->seen++ % HISTORY]);
}

fanin_status handle_watch(session *s, uint64_t request, body *in)
{
    fanin_server *server = s->control->server;
    msg_watch m;
    fanin_status status = decode_watch(in, &m);
    if (status != FANIN_OK)
        return status;
    if (s->n_watches == SESSION_WATCHES) {
        reply_fault(s, request, FANIN_ERR_LIMIT, "a session may watch 16 publications");
        return FANIN_OK;
    }
    watch *w = &s->watches[s->n_watches];
    *w = (watch){.used = true, .request = request};
    memcpy(w->publication, m.publication, sizeof w->publication);
    pthread_mutex_lock(&server->lock);
    s->n_watches++;
    server->listeners++;
    const publication *p = publication_find(server, m.publication);
    state_change now = {0};
    if (p) {
        now = (state_change){p->step, p->state};
        w->seen = p->changes;
    }
    report(s, w, &now);
    pthread_mutex_unlock(&server->lock);
    return FANIN_OK;
}

void waits_answer(session *s)
{
    fanin_server *server = s->control->server;
    pthread_mutex_lock(&server->lock);
    for (size_t i = 0; i < SESSION_WAITS && s->n_waits > 0; i++)
        if (s->waits[i].used && answer_wait(s, s->waits[i].request, &s->waits[i].wait))
            unpark(s, &s->waits[i]);
    for (unsigned i = 0; i < s->n_watches; i++)
        catch_up(s, &s->watches[i]);
    pthread_mutex_unlock(&server->lock);
}
