/* SPDX-License-Identifier: Apache-2.0 */
/* Requests of an open control session. */
#include "control/session.h"
#include "core/rules.h"
#include "error_set.h"
#include "publish/garbage.h"
#include "shards/registration.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EVENTS_QUEUED                                                                  \
    (64 << 10) /* bytes of output beyond which only the newest event goes */

static const char *const shutting_down = "the server is shutting down";

static void reply_fault(session *s, uint64_t request, fanin_status code,
                        const char *message)
{
    fanin_error error = FANIN_ERROR_INIT;
    error_set(&error, code, NULL, "%s", message);
    session_reply_error(s, request, &error);
}

/* NOT_FOUND that names what there is. Lock held. */
static void not_found(const fanin_server *server, const char *name, fanin_error *error)
{
    char there[320];
    error_place place = {.phase = "catalog", .remedy = "check the name of the run"};
    publication_names(server, there, sizeof there);
    error_set(error, FANIN_ERR_NOT_FOUND, &place,
              "rank %u does not publish %s; it publishes %s", (unsigned)server->rank,
              name, there[0] ? there : "nothing");
}

/* NULL: not there. Lock held. */
static publication *find_present(const fanin_server *server, const char *name)
{
    publication *p = publication_find(server, name);
    return p && p->present ? p : NULL;
}

/* Why readers of a publication get nothing. Lock held. */
static void paused(const publication *p, fanin_error *error)
{
    error_place place = {.phase = "wait",
                         .key = p->name,
                         .remedy = "pull again when the trainer has resumed it"};
    error_set(error, FANIN_ERR_PAUSED, &place, "%s is paused: %s", p->name, p->reason);
}

/* As the session's peer knows it: an older one takes paused for writing. */
static int32_t state_for(const session *s, publication_state state)
{
    if (state == STATE_PAUSED && !(s->features & FEATURE_PAUSED))
        return WIRE_STATE_WRITING;
    return (int32_t)state;
}

/* ------------------------------------------------------------------- list */

/* At least 1: 0 is "not known". */
static uint64_t age_ms(uint64_t since_ns)
{
    return (clock_ns() - since_ns) / 1000000 + 1;
}

static void fill_entry(const session *s, msg_list_entry *e, const publication *p)
{
    memset(e, 0, sizeof *e);
    memcpy(e->publication, p->name, sizeof p->name);
    e->step = p->step;
    e->epoch = p->epoch;
    e->state = state_for(s, p->state);
    e->state_age_ms = age_ms(p->entered_at);
    if (p->has_step)
        e->commit_age_ms = age_ms(p->committed_at);
    if (!p->catalog)
        return;
    e->catalog_version = p->catalog->version;
    e->tensors = p->catalog->n_keys;
    e->bytes = p->catalog->bytes;
    memcpy(e->key_digest, p->catalog->key_digest.bytes, sizeof e->key_digest);
}

static fanin_status handle_list(session *s, uint64_t request, body *in)
{
    fanin_server *server = s->control->server;
    char name[80];
    fanin_status status = decode_list(in, name);
    if (status != FANIN_OK)
        return status;
    pthread_mutex_lock(&server->lock);
    msg_list_entry *entries = calloc(server->n_publications + 1, sizeof *entries);
    uint32_t count = 0;
    for (size_t i = 0; entries && i < server->n_publications; i++) {
        const publication *p = server->publications[i];
        if (p->present && (!name[0] || strcmp(p->name, name) == 0))
            fill_entry(s, &entries[count++], p);
    }
    pthread_mutex_unlock(&server->lock);
    if (entries)
        encode_list_ok(&s->out.bytes, request, entries, count);
    else
        reply_fault(s, request, FANIN_ERR_MEMORY, "the server is out of memory");
    free(entries);
    return FANIN_OK;
}

/* ---------------------------------------------------------------- catalogs */

/* The catalog that a request names, with a reference, or NULL and why. */
static shard_catalog *find_catalog(fanin_server *server, message_type type,
                                   const msg_blob_request *m, fanin_error *error)
{
    shard_catalog *found = NULL;
    pthread_mutex_lock(&server->lock);
    if (type == MSG_KEYS) {
        for (size_t i = 0; i < server->n_publications && !found; i++) {
            shard_catalog *c = server->publications[i]->catalog;
            if (c && memcmp(c->key_digest.bytes, m->digest, DIGEST_SIZE) == 0)
                found = c;
        }
    } else {
        publication *p = find_present(server, m->publication);
        if (!p)
            not_found(server, m->publication, error);
        else if (p->catalog && p->catalog->version == m->catalog_version)
            found = p->catalog;
    }
    if (found)
        shard_catalog_retain(found);
    else if (error->status == FANIN_OK)
        error_set(error, FANIN_ERR_STALE, NULL, "the catalog has changed");
    pthread_mutex_unlock(&server->lock);
    return found;
}

static void reply_page(session *s, uint64_t request, message_type type,
                       const buffer *blob, uint64_t offset)
{
    msg_blob_page page = {.total = blob->size, .offset = offset};
    if (offset > blob->size || (offset == blob->size && offset > 0)) {
        reply_fault(s, request, FANIN_ERR_ARGUMENT,
                    "the page is beyond the table's end");
        return;
    }
    page.data.data = blob->data ? blob->data + offset : (const uint8_t *)"";
    page.data.size =
        blob->size - offset < LIMIT_PAGE ? blob->size - offset : LIMIT_PAGE;
    encode_blob_page(&s->out.bytes, request, type, &page);
}

/* Whether the session may have remote keys of that path. */
static bool has_path(const session *s, int32_t path)
{
    const registrar *r = &s->control->server->registrar;
    if (path == WIRE_PATH_CUDA_IPC)
        return session_may_map(s);
    return s->trusted && r->ucx[path == WIRE_PATH_RDMA ? DOMAIN_RDMA : DOMAIN_HOST];
}

static fanin_status encode_regions(session *s, shard_catalog *catalog,
                                   const msg_blob_request *m, buffer *out,
                                   fanin_error *error)
{
    registrar *r = &s->control->server->registrar;
    if (m->path == WIRE_PATH_STREAM)
        return region_set_encode(&catalog->regions, out, error);
    if (!has_path(s, m->path))
        return error_set(error, FANIN_ERR_UNSUPPORTED, NULL,
                         "this session has not opened the path");
    key_reader to = {s->reader, s->peer, m->publication};
    s->control->ucx_again = s->control->ucx_again || m->path != WIRE_PATH_CUDA_IPC;
    return region_set_encode_keys(r, &catalog->regions, m->path, &to, out, error);
}

static fanin_status handle_blob(session *s, uint64_t request, message_type type,
                                body *in)
{
    fanin_server *server = s->control->server;
    fanin_error error = FANIN_ERROR_INIT;
    msg_blob_request m;
    fanin_status status = decode_blob_request(in, type, &m);
    if (status != FANIN_OK)
        return status;
    /* A buffer grows by doubling; requests before this one may have made it grow already. */
    (void)session_account(s);
    size_t grown = 2 * (s->out.bytes.size + LIMIT_REPLY);
    if (grown > s->out.bytes.capacity &&
        !memory_fits(server, grown - s->out.bytes.capacity)) {
        reply_fault(s, request, FANIN_ERR_LIMIT,
                    "the server's connections have all the memory they may");
        return FANIN_OK;
    }
    shard_catalog *catalog = find_catalog(server, type, &m, &error);
    if (!catalog) {
        session_reply_error(s, request, &error);
        return FANIN_OK;
    }
    buffer regions = {0};
    if (type == MSG_KEYS)
        reply_page(s, request, MSG_KEYS_OK, &catalog->keys_blob, m.offset);
    else if (type == MSG_BOXES)
        reply_page(s, request, MSG_BOXES_OK, &catalog->boxes_blob, m.offset);
    else if (encode_regions(s, catalog, &m, &regions, &error) == FANIN_OK)
        reply_page(s, request, MSG_REGIONS_OK, &regions, m.offset);
    else
        session_reply_error(s, request, &error);
    buffer_free(&regions);
    catalog_retire(server, catalog);
    return FANIN_OK;
}

/* ------------------------------------------------------------------- wait */

/* Answers if the publication is paused, or stable at a step that will do. Lock held. */
static bool answer_wait(session *s, uint64_t request, const msg_wait *w)
{
    const publication *p = find_present(s->control->server, w->publication);
    if (p && publication_is_away(p)) {
        fanin_error error = FANIN_ERROR_INIT;
        paused(p, &error);
        session_reply_error(s, request, &error);
        return true;
    }
    if (!p || p->state != STATE_STABLE ||
        (w->rule != WIRE_RULE_NEWEST && p->step < w->step))
        return false;
    msg_wait_ok m = {.step = p->step,
                     .catalog_version = p->catalog->version,
                     .stable_ns = publication_stable_ns(p)};
    memcpy(m.key_digest, p->catalog->key_digest.bytes, sizeof m.key_digest);
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
        not_found(server, w->publication, error);
    else if (server->stopping)
        error_set(error, FANIN_ERR_CLOSED, NULL, "%s", shutting_down);
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

static fanin_status handle_wait(session *s, uint64_t request, body *in)
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
    if (error.status != FANIN_OK)
        session_reply_error(s, request, &error);
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
        not_found(server, w->publication, error);
    else if (!p)
        error_set(error, FANIN_ERR_TIMEOUT, &place, "rank %u publishes nothing yet",
                  rank);
    else if (!p->has_step)
        error_set(error, FANIN_ERR_TIMEOUT, &place,
                  "rank %u has not committed %s yet (%s)", rank, p->name,
                  state_name(p->state));
    else
        error_set(error, FANIN_ERR_TIMEOUT, &place, "rank %u is at step %llu (%s)",
                  rank, (unsigned long long)p->step, state_name(p->state));
}

void requests_expire(session *s)
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
        if (error.status != FANIN_OK)
            session_reply_error(s, w->request, &error);
    }
}

void requests_cancel(session *s)
{
    fanin_server *server = s->control->server;
    for (size_t i = 0; i < SESSION_WAITS; i++) {
        if (!s->waits[i].used)
            continue;
        pthread_mutex_lock(&server->lock);
        unpark(s, &s->waits[i]);
        pthread_mutex_unlock(&server->lock);
        reply_fault(s, s->waits[i].request, FANIN_ERR_CLOSED, shutting_down);
    }
}

/* ------------------------------------------------------------------ watch */

/* Change @p index of the publication. Lock held. */
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

static fanin_status handle_watch(session *s, uint64_t request, body *in)
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

void requests_notify(session *s)
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

/* ------------------------------------------------------------- begin, end */

/* Why a begin is refused, NULL: it is not. Lock held. */
static const char *refusal(const fanin_server *server, const publication *p,
                           const msg_begin *m)
{
    if (server->stopping)
        return shutting_down;
    if (p->state == STATE_DRAINING && RULE(RULE_REFUSAL))
        return "busy: an update is about to begin";
    if (p->state != STATE_STABLE && p->state != STATE_DRAINING)
        return p->has_step ? "the weights are being rewritten"
                           : "nothing has been committed yet";
    if (p->step != m->step && RULE(RULE_STEP))
        return "it is at another step";
    if (p->catalog->version != m->catalog_version && RULE(RULE_CATALOG))
        return "its catalog has changed";
    /* Filling the published arena is what commits never do: a second guard. */
    if (p->catalog->plan && p->filling == p->catalog->plan->arenas &&
        p->filling_arena == p->arena && RULE(RULE_ARENA_BEGIN))
        return "the snapshot is being rewritten";
    return NULL;
}

/* Lock held. */
static void answer_begin(session *s, publication *p, const msg_begin *m,
                         msg_begin_ok *reply, fanin_error *error)
{
    fanin_server *server = s->control->server;
    if (publication_is_away(p) && !server->stopping) {
        server->stats.begins_refused++;
        paused(p, error);
        return;
    }
    const char *why = refusal(server, p, m);
    if (why) {
        server->stats.begins_refused++;
        reply->state = state_for(s, p->state);
        reply->step = p->step;
        reply->catalog_version = p->catalog ? p->catalog->version : 0;
        snprintf(reply->why, sizeof reply->why, "%s", why);
        return;
    }
    lease *l = lease_grant(server, s->reader, p);
    if (!l) {
        server->stats.begins_refused++;
        error_set(error, FANIN_ERR_LIMIT, NULL, "a session may have %d leases",
                  SESSION_LEASES);
        return;
    }
    server->stats.begins_granted++;
    reply->granted = true;
    memcpy(reply->token, l->token, sizeof reply->token);
    reply->epoch = l->epoch;
    reply->lease_ms = server->lease_ms;
    reply->first_region = l->first_region;
}

static fanin_status handle_begin(session *s, uint64_t request, body *in)
{
    fanin_server *server = s->control->server;
    fanin_error error = FANIN_ERROR_INIT;
    msg_begin m;
    fanin_status status = decode_begin(in, &m);
    if (status != FANIN_OK)
        return status;
    msg_begin_ok reply = {0};
    pthread_mutex_lock(&server->lock);
    publication *p = find_present(server, m.publication);
    if (p)
        answer_begin(s, p, &m, &reply, &error);
    else
        not_found(server, m.publication, &error);
    pthread_mutex_unlock(&server->lock);
    if (error.status != FANIN_OK)
        session_reply_error(s, request, &error);
    else
        encode_begin_ok(&s->out.bytes, request, &reply);
    return FANIN_OK;
}

static fanin_status handle_end(session *s, uint64_t request, body *in)
{
    fanin_server *server = s->control->server;
    msg_end m;
    fanin_status status = decode_end(in, &m);
    if (status != FANIN_OK)
        return status;
    msg_end_ok reply = {0};
    pthread_mutex_lock(&server->lock);
    /* A lease that is there has a standing epoch: the turn of the epoch removes it. */
    lease *l = lease_find(s->reader, m.token);
    const publication *p = l ? l->of : lease_find_void(s->reader, m.token);
    reply.good = l || !RULE(RULE_END_CHECK);
    reply.step = p ? p->step : 0;
    if (l)
        lease_drop(server, l);
    if (p && !m.abandon) {
        server->stats.pulls_good += reply.good;
        server->stats.pulls_stale += !reply.good;
    }
    pthread_mutex_unlock(&server->lock);
    encode_end_ok(&s->out.bytes, request, &reply);
    return FANIN_OK;
}

static fanin_status handle_ping(session *s, uint64_t request, body *in)
{
    fanin_status status = decode_empty(in);
    if (status == FANIN_OK)
        encode_empty(&s->out.bytes, request, MSG_PONG);
    return status;
}

/* ---------------------------------------------------------------- dispatch */

static fanin_status dispatch(session *s, const frame *f, body *in)
{
    switch (f->type) {
    case MSG_OPEN_PATH:
        return request_open_path(s, f->request, in);
    case MSG_LIST:
        return handle_list(s, f->request, in);
    case MSG_KEYS:
    case MSG_BOXES:
    case MSG_REGIONS:
        return handle_blob(s, f->request, f->type, in);
    case MSG_WAIT:
        return handle_wait(s, f->request, in);
    case MSG_BEGIN:
        return handle_begin(s, f->request, in);
    case MSG_END:
        return handle_end(s, f->request, in);
    case MSG_WATCH:
        return handle_watch(s, f->request, in);
    case MSG_PING:
        return handle_ping(s, f->request, in);
    case MSG_HELLO:
        in->why = "hello came twice";
        return FANIN_ERR_PROTOCOL;
    case MSG_READ:
    case MSG_DIGEST:
        in->why = "reads belong on a data connection";
        return FANIN_ERR_PROTOCOL;
    default:
        in->why = "this server does not know the request";
        return message_kind(f->type) == KIND_REPLY ? FANIN_ERR_PROTOCOL
                                                   : FANIN_ERR_UNSUPPORTED;
    }
}

void request_handle(session *s, const frame *f, body *in)
{
    fanin_status status = dispatch(s, f, in);
    if (status == FANIN_ERR_UNSUPPORTED)
        reply_fault(s, f->request, status, in->why);
    else if (status != FANIN_OK)
        session_fail(s, f->request, status, in->why);
}
