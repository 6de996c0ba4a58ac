/* SPDX-License-Identifier: Apache-2.0 */
#include "control/waits.h"
#include "control/session.h"
#include "control/requests.h"
#include "error_set.h"

#include <inttypes.h>
#include <string.h>

/* ----------------------------------------------------------------- changes */

static void view_take(const publication *p, publication_view *out)
{
    memset(out, 0, sizeof *out);
    if (!p)
        return;
    memcpy(out->name, p->name, sizeof out->name);
    out->is_away = p->present && publication_is_away(p);
    out->is_stable = p->present && p->state == STATE_STABLE;
    out->step = p->step;
    out->stable_ns = publication_stable_ns(p);
    out->changes = p->changes;
    memcpy(out->reason, p->reason, sizeof out->reason);
    memcpy(out->history, p->history, sizeof out->history);
    if (!p->catalog)
        return;
    out->catalog_version = p->catalog->version;
    memcpy(out->key_digest, p->catalog->key_digest.bytes, sizeof out->key_digest);
    patches_tell(p, &out->patches);
    out->digest_bytes = p->catalog->has_device ? LIMIT_DIGEST_BYTES : 0;
}

bool changes_take(fanin_server *s, changes *out)
{
    bool more = false;
    out->n = 0;
    pthread_mutex_lock(&s->lock);
    s->is_woken = false;
    for (size_t i = 0; i < s->n_publications && !more; i++) {
        publication *p = s->publications[i];
        if (p->told == p->changes)
            continue;
        more = out->n == CHANGES_MOST;
        if (more)
            break;
        view_take(p, &out->views[out->n++]);
        p->told = p->changes;
    }
    pthread_mutex_unlock(&s->lock);
    return more;
}

static const publication_view *changes_find(const changes *c, const char *name)
{
    for (unsigned i = 0; i < c->n; i++)
        if (strcmp(c->views[i].name, name) == 0)
            return &c->views[i];
    return NULL;
}

#define EVENTS_QUEUED                                                                  \
    (64 << 10) /* bytes of output beyond which only the newest event goes */

static const msg_begin_ok no_lease;

/* -------------------------------------------------------------------- wait */

/* Whether the publication is paused, or stable at a step that will do. */
static bool ends_wait(const publication_view *v, const msg_wait *w)
{
    return v->is_away ||
           (v->is_stable && (w->rule == WIRE_RULE_NEWEST || v->step >= w->step));
}

/* Of a wait that ends. */
static void answer_wait(session *s, uint64_t request, const msg_wait *w,
                        const publication_view *v, const msg_begin_ok *lease)
{
    fanin_error error = FANIN_ERROR_INIT;
    uint8_t patches[PATCH_OFFERS_BYTES];
    if (v->is_away) {
        describe_paused(v->name, v->reason, &error);
        reply_error(s, request, &error);
        return;
    }
    msg_wait_ok m = {.step = v->step,
                     .catalog_version = v->catalog_version,
                     .stable_ns = v->stable_ns,
                     .digest_bytes = v->digest_bytes};
    memcpy(m.key_digest, v->key_digest, sizeof m.key_digest);
    if (lease->granted) {
        m.token = (bytes_view){lease->token, sizeof lease->token};
        m.lease_ms = lease->lease_ms;
        m.first_region = lease->first_region;
    }
    if (w->deltas && v->patches.generation != 0)
        m.patches = (bytes_view){patches, patch_offers_encode(&v->patches, patches)};
    encode_wait_ok(&s->out.bytes, request, &m);
}

/* Who is not granted a lease begins as ever. Lock held. */
static void begin_with(session *s, publication *p, uint64_t request, const msg_wait *w,
                       msg_begin_ok *lease)
{
    fanin_error error = FANIN_ERROR_INIT;
    const msg_begin begin = {.step = p->step, .catalog_version = w->begin_version};
    if (w->begin_version != 0 && !publication_is_away(p))
        answer_begin(s, p, request, &begin, lease, &error);
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

/* The caller takes it off the server's listeners. */
static void unpark(session *s, parked_wait *w)
{
    w->used = false;
    s->n_waits--;
}

/* Takes the lock. */
static void forget_listeners(fanin_server *server, unsigned n)
{
    if (n == 0)
        return;
    pthread_mutex_lock(&server->lock);
    server->listeners -= n;
    pthread_mutex_unlock(&server->lock);
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
    s->control->server->listeners--;
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
    publication_view now;
    msg_begin_ok lease = {0};
    pthread_mutex_lock(&server->lock);
    publication *p = find_present(server, m.publication);
    view_take(p, &now);
    bool ends = ends_wait(&now, &m);
    server->delta_sessions += m.deltas && !s->wants_deltas;
    s->wants_deltas = s->wants_deltas || m.deltas;
    if (m.deltas && p)
        p->expected = p->deltas;
    if (ends) {
        begin_with(s, p, request, &m, &lease);
    } else {
        make_room(s, &m);
        if (may_park(s, &m, &error))
            park(s, request, &m);
    }
    pthread_mutex_unlock(&server->lock);
    if (ends)
        answer_wait(s, request, &m, &now, &lease);
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
        publication_view now;
        unpark(s, w);
        pthread_mutex_lock(&server->lock);
        server->listeners--;
        view_take(find_present(server, w->wait.publication), &now);
        bool ends = ends_wait(&now, &w->wait);
        if (!ends)
            describe_timeout(server, &w->wait, &error);
        pthread_mutex_unlock(&server->lock);
        if (ends)
            answer_wait(s, w->request, &w->wait, &now, &no_lease);
        reply_error(s, w->request, &error);
    }
}

void waits_cancel(session *s)
{
    fanin_server *server = s->control->server;
    unsigned ended = 0;
    for (size_t i = 0; i < SESSION_WAITS; i++) {
        if (!s->waits[i].used)
            continue;
        unpark(s, &s->waits[i]);
        ended++;
        reply_fault(s, s->waits[i].request, FANIN_ERR_CLOSED, SHUTTING_DOWN);
    }
    forget_listeners(server, ended);
}

/* ------------------------------------------------------------------- watch */

static void report(session *s, const watch *w, const state_change *change)
{
    msg_event m = {.step = change->step, .state = state_for(s, change->state)};
    memcpy(m.publication, w->publication, sizeof m.publication);
    encode_event(&s->out.bytes, w->request, &m);
}

/* Everything that happened since the last report, or the newest if that is too much. */
static void catch_up(session *s, watch *w, const publication_view *v)
{
    if (v->changes - w->seen > HISTORY)
        w->seen = v->changes - HISTORY;
    if (outgoing_left(&s->out) > EVENTS_QUEUED)
        w->seen = v->changes - 1;
    while (w->seen < v->changes)
        report(s, w, &v->history[w->seen++ % HISTORY]);
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

static unsigned end_waits(session *s, const changes *c)
{
    unsigned ended = 0;
    for (size_t i = 0; i < SESSION_WAITS && s->n_waits > 0; i++) {
        parked_wait *w = &s->waits[i];
        const publication_view *v =
            w->used ? changes_find(c, w->wait.publication) : NULL;
        if (!v || !ends_wait(v, &w->wait))
            continue;
        answer_wait(s, w->request, &w->wait, v, &no_lease);
        unpark(s, w);
        ended++;
    }
    return ended;
}

bool waits_answer(session *s, const changes *c)
{
    unsigned ended = end_waits(s, c);
    bool says = ended > 0;
    forget_listeners(s->control->server, ended);
    for (unsigned i = 0; i < s->n_watches; i++) {
        watch *w = &s->watches[i];
        const publication_view *v = changes_find(c, w->publication);
        if (!v || v->changes <= w->seen)
            continue;
        catch_up(s, w, v);
        says = true;
    }
    return says;
}

static void look_up(session *s, const char *name, publication_view *out)
{
    fanin_server *server = s->control->server;
    pthread_mutex_lock(&server->lock);
    view_take(publication_find(server, name), out);
    pthread_mutex_unlock(&server->lock);
}

void waits_review(session *s)
{
    changes *c = &s->control->changes;
    c->n = 1;
    for (size_t i = 0; i < SESSION_WAITS && s->n_waits > 0; i++) {
        if (!s->waits[i].used)
            continue;
        look_up(s, s->waits[i].wait.publication, &c->views[0]);
        (void)waits_answer(s, c);
    }
    for (unsigned i = 0; i < s->n_watches; i++) {
        look_up(s, s->watches[i].publication, &c->views[0]);
        (void)waits_answer(s, c);
    }
}
