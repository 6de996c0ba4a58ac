/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/pull.h"

#include "error_set.h"
#include "net/client_rules.h"
#include "stream/stream_link.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One rank's part of a round. */
typedef struct turn {
    size_t *left;
    reader_lease *lease; /* NULL: it is not asked */
    uint64_t begin;      /* the request; 0: it is answered, or is no begin */
    uint64_t step;       /* of an end: what was begun */
    bool keeps;          /* an end after which the lease stays, if it was good */
    const fanin_client *client;
    uint64_t asked_ns;   /* 0: it has answered */
    confirmation *later; /* that it is of; NULL: the round is waited for */
    fanin_error error;
} turn;

struct confirmation {
    confirmation **list, *next;
    turn *turns; /* one a peer */
    size_t left, n;
    confirmed_fn fn;
    void *cookie;
};

static void send_end(connection *c, const msg_end *m, reply_fn fn, void *cookie)
{
    encode_end(connection_out(c), c->next_request, m);
    connection_ask(c, fn, cookie);
}

/* Whatever the rank says to it, nothing depends on that. */
static void send_abandon(connection *c, msg_end *m)
{
    m->abandon = true;
    send_end(c, m, NULL, NULL);
}

void lease_refuse(connection *c, const uint8_t token[16])
{
    msg_end m = {.abandon = true};
    memcpy(m.token, token, sizeof m.token);
    send_abandon(c, &m);
}

void lease_refuse_begun(connection *c, uint64_t request)
{
    send_abandon(c, &(msg_end){.begin = request});
}

void lease_give_back(fanin_client *client, size_t peer, reader_lease *lease)
{
    if (lease->held && peer_ready(&client->peers[peer]))
        lease_refuse(client->peers[peer].control, lease->token);
    lease->held = false;
}

/* The rank has answered, or is not waited for any longer. Reads go on before a confirmation that
   nobody waits for, in the same row, of which spans must not overlap: it is a moment. */
static void turn_ended(turn *t, const connection *c, trace_name name,
                       fanin_status outcome)
{
    uint64_t now = clock_ns();
    if (t->later)
        span_of_rank(t->client, (size_t)(t - t->later->turns), name, now, now, 0,
                     outcome);
    else
        span_of_connection(c, &t->client->place, name, t->asked_ns, outcome);
    t->asked_ns = 0;
}

/* Frees the turns. A lease that nobody waits for any longer is given back before it is there: the
   rank's next update must not wait for it, and this client may never be called again. */
static fanin_status run_round(fanin_client *client, turn *turns, size_t *left,
                              deadline at, trace_name name, fanin_error *error)
{
    fanin_status status = client_run(client, left, at, trace_name_text(name), error);
    for (size_t i = 0; i < client->n_peers; i++) {
        if (!turns[i].lease)
            continue;
        connection *c = client->peers[i].control;
        connection_forget(c, &turns[i]);
        if (turns[i].asked_ns > 0)
            turn_ended(&turns[i], c, name, status);
        if (turns[i].begin && peer_ready(&client->peers[i]))
            lease_refuse_begun(c, turns[i].begin);
        if (status == FANIN_OK && turns[i].error.status != FANIN_OK)
            status = error_copy(error, &turns[i].error);
    }
    free(turns);
    return status;
}

/* ------------------------------------------------------------------- begin */

static void take_begun(turn *t, connection *c, message_type type, body *b)
{
    msg_begin_ok m;
    if (type != MSG_BEGIN_OK || decode_begin_ok(b, &m) != FANIN_OK) {
        connection_reply_error(c, "begin", type, b, &t->error);
        /* The next agreement finds out whether the others suffice without it. */
        if (t->error.status == FANIN_ERR_PAUSED)
            t->error.status = FANIN_ERR_STALE;
        return;
    }
    if (!m.granted) {
        error_place place = connection_place(c, "begin");
        error_set(&t->error, FANIN_ERR_STALE, &place, "rank %u at %s has moved on: %s",
                  c->peer.rank, c->text, m.why);
        return;
    }
    *t->lease = (reader_lease){.held = true,
                               .lease_ms = m.lease_ms,
                               .first_region = m.first_region,
                               .generation = c->generation,
                               .epoch = m.epoch};
    memcpy(t->lease->token, m.token, sizeof t->lease->token);
}

static void on_begun(void *cookie, connection *c, message_type type, body *b)
{
    turn *t = cookie;
    --*t->left;
    t->begin = 0;
    take_begun(t, c, type, b);
    turn_ended(t, c, TRACE_BEGIN, t->error.status);
}

fanin_status lease_round_begin(pull *p, fanin_error *error)
{
    fanin_client *client = p->client;
    turn *turns = calloc(client->n_peers, sizeof *turns);
    if (!turns)
        return error_set_memory(error);
    size_t left = 0;
    for (size_t i = 0; i < client->n_peers; i++) {
        if (!p->needed[i])
            lease_give_back(client, i, &p->leases[i]);
        if (!p->needed[i] || p->leases[i].held)
            continue;
        connection *c = client->peers[i].control;
        turns[i] = (turn){.left = &left,
                          .lease = &p->leases[i],
                          .begin = c->next_request,
                          .client = client,
                          .asked_ns = clock_ns(),
                          .error = FANIN_ERROR_INIT};
        left++;
        msg_begin m = {.step = p->announced[i].step,
                       .catalog_version = p->announced[i].version};
        snprintf(m.publication, sizeof m.publication, "%s", p->publication->name);
        encode_begin(connection_out(c), c->next_request, &m);
        connection_ask(c, on_begun, &turns[i]);
    }
    return run_round(client, turns, &left, p->at, TRACE_BEGIN, error);
}

/* --------------------------------------------------------------------- end */

/* All have answered. */
static void tell_confirmed(confirmation *of)
{
    fanin_error why = FANIN_ERROR_INIT;
    confirmation **at = of->list;
    while (*at != of)
        at = &(*at)->next;
    *at = of->next;
    for (size_t i = 0; i < of->n && why.status == FANIN_OK; i++) {
        if (of->turns[i].lease)
            error_copy(&why, &of->turns[i].error);
    }
    free(of->turns);
    of->fn(of->cookie, why.status, &why);
    free(of);
}

static void on_ended(void *cookie, connection *c, message_type type, body *b)
{
    turn *t = cookie;
    msg_end_ok m;
    --*t->left;
    if (type != MSG_END_OK || decode_end_ok(b, &m) != FANIN_OK) {
        connection_reply_error(c, "end", type, b, &t->error);
    } else if (!m.good && CLIENT_RULE(CLIENT_RULE_END_CHECK)) {
        error_place place = connection_place(c, "end");
        place.remedy =
            "allow the pull more time, or keep the weights stable for longer";
        error_set(&t->error, FANIN_ERR_STALE, &place,
                  "rank %u at %s rewrote the weights while they were read "
                  "(it is at step %" PRIu64 " now)",
                  c->peer.rank, c->text, m.step);
    } else if (m.good && m.step < t->step) {
        error_place place = connection_place(c, "end");
        place.remedy = "use the same fanin release on both ends";
        error_set(&t->error, FANIN_ERR_PROTOCOL, &place,
                  "rank %u at %s says that step %" PRIu64
                  " stands, and is at step %" PRIu64,
                  c->peer.rank, c->text, t->step, m.step);
    }
    t->lease->held = t->keeps && t->error.status == FANIN_OK;
    turn_ended(t, c, TRACE_END, t->error.status);
    if (t->later && t->later->left == 0)
        tell_confirmed(t->later);
}

/* A rank sees nothing of one-sided reads unless it is told. */
static msg_end end_message(const pull *p, size_t peer)
{
    const path_reader *path = path_taken(p->publication, peer)->path;
    const uint64_t *bytes = &p->result->served[peer].bytes;
    msg_end m = {0};
    if (path && path->told_at > 0)
        memcpy((char *)&m + path->told_at, bytes, sizeof *bytes);
    memcpy(m.token, p->leases[peer].token, sizeof m.token);
    return m;
}

/* Whether those that have served can still say so: an older rank would take the lease back, and one
   whose lease an earlier answer has ended confirms nothing. */
static fanin_status check_confirms(const pull *p, fanin_error *error)
{
    for (size_t i = 0; i < p->client->n_peers; i++) {
        const connection *c = p->client->peers[i].control;
        if (!p->result->served[i].used)
            continue;
        error_place place = connection_place(c, "end");
        if (!p->leases[i].held)
            return error_set(error, FANIN_ERR_STALE, &place,
                             "the lease of rank %u at %s has ended already",
                             c->peer.rank, c->text);
        place.remedy =
            "use the same fanin release on both ends, or pull without relays";
        if (!(c->peer.features & FEATURE_RELAYS))
            return error_set(error, FANIN_ERR_UNSUPPORTED, &place,
                             "rank %u at %s does not confirm what is read before the "
                             "end",
                             c->peer.rank, c->text);
    }
    return FANIN_OK;
}

/* Whether the end, or the confirmation, of the peer's lease is asked for. */
static bool is_due(const pull *p, size_t peer, bool keep)
{
    return p->leases[peer].held && (!keep || p->result->served[peer].used);
}

/* @p keep: only of those that served, whose leases stay. */
static void send_ends(pull *p, bool keep, turn *turns, size_t *left)
{
    for (size_t i = 0; i < p->client->n_peers; i++) {
        connection *c = p->client->peers[i].control;
        if (!is_due(p, i, keep))
            continue;
        msg_end m = end_message(p, i);
        m.keep = keep;
        turns[i].left = left;
        turns[i].lease = &p->leases[i];
        turns[i].step = p->announced[i].step;
        turns[i].keeps = keep;
        turns[i].client = p->client;
        turns[i].asked_ns = clock_ns();
        turns[i].error = (fanin_error)FANIN_ERROR_INIT;
        send_end(c, &m, on_ended, &turns[i]);
    }
}

static size_t count_due(const pull *p, bool keep)
{
    size_t n = 0;
    for (size_t i = 0; i < p->client->n_peers; i++)
        n += is_due(p, i, keep);
    return n;
}

static fanin_status end_round(pull *p, bool keep, fanin_error *error)
{
    turn *turns = calloc(p->client->n_peers, sizeof *turns);
    if (!turns)
        return error_set_memory(error);
    size_t left = count_due(p, keep);
    send_ends(p, keep, turns, &left);
    return run_round(p->client, turns, &left, p->at, TRACE_END, error);
}

fanin_status lease_round_end(pull *p, fanin_error *error)
{
    return end_round(p, false, error);
}

fanin_status lease_round_confirm(pull *p, fanin_error *error)
{
    fanin_status status = check_confirms(p, error);
    return status == FANIN_OK ? end_round(p, true, error) : status;
}

fanin_status lease_confirm_later(pull *p, confirmed_fn fn, void *cookie,
                                 confirmation **list, fanin_error *error)
{
    fanin_status status = check_confirms(p, error);
    if (status != FANIN_OK)
        return status;
    confirmation *c = calloc(1, sizeof *c);
    turn *turns = calloc(p->client->n_peers, sizeof *turns);
    if (!c || !turns) {
        free(c);
        free(turns);
        return error_set_memory(error);
    }
    *c = (confirmation){.list = list,
                        .next = *list,
                        .turns = turns,
                        .left = 1 + count_due(p, true),
                        .n = p->client->n_peers,
                        .fn = fn,
                        .cookie = cookie};
    *list = c;
    for (size_t i = 0; i < c->n; i++)
        turns[i].later = c;
    send_ends(p, true, turns, &c->left);
    if (--c->left == 0) /* nobody was to be asked, or all have been lost */
        tell_confirmed(c);
    return FANIN_OK;
}

void lease_confirm_forget(fanin_client *client, confirmation **list)
{
    while (*list) {
        confirmation *c = *list;
        *list = c->next;
        for (size_t i = 0; i < c->n; i++) {
            if (c->turns[i].lease)
                connection_forget(client->peers[i].control, &c->turns[i]);
        }
        free(c->turns);
        free(c);
    }
}

void lease_round_leave(pull *p)
{
    for (size_t i = 0; i < p->client->n_peers; i++) {
        if (!p->leases[i].held || !peer_ready(&p->client->peers[i]))
            continue;
        msg_end m = end_message(p, i);
        m.quiet = true;
        send_end(p->client->peers[i].control, &m, NULL, NULL);
        p->leases[i].held = false;
    }
}

void lease_round_abandon(fanin_client *client, reader_lease *leases)
{
    for (size_t i = 0; i < client->n_peers; i++)
        lease_give_back(client, i, &leases[i]);
}

/* ------------------------------------------------------------ early leases */

/* A source of the cached plan: READY, its tables those that the plan was made from, its path known.
   */
static bool at_hand(pull *p, size_t peer)
{
    const shard_table *tables = &p->publication->shards[peer];
    return peer_ready(&p->client->peers[peer]) && tables->version != 0 &&
           tables->generation == p->client->peers[peer].generation;
}

early_begin *early_lease_ask(pull *p)
{
    plan_cache *cache = p->cache;
    const path_plan *plan = &cache->whole.plan;
    size_t n = p->client->n_peers;
    memset(p->use, 0, n * sizeof *p->use);
    memset(p->versions, 0, n * sizeof *p->versions);
    p->early = (early_begin){.versions = p->versions, .leases = p->leases};
    if (!p->destination->quick || !cache->valid || !cache->proven)
        return NULL;
    for (size_t i = 0; i < plan->n_sources; i++) {
        size_t peer = plan->peer_of[i];
        p->use[peer] = true;
        if (!at_hand(p, peer))
            return NULL;
        if (plan->plan->ranks[i].n_pieces == 0)
            continue;
        if (!path_state_of(p->client, p->publication, peer)->path)
            return NULL;
        p->versions[peer] = p->publication->shards[peer].version;
    }
    return plan_cache_fits(cache, p->client, p->publication, p->use, p->destination)
               ? &p->early
               : NULL;
}

/* Whether its data connections, if it needs any, have not been lost meanwhile. */
static bool is_connected(const pull *p, size_t source)
{
    const path_plan *plan = &p->cache->whole.plan;
    size_t peer = plan->peer_of[source];
    return plan->plan->ranks[source].n_pieces == 0 ||
           !(p->options->verify || path_taken(p->publication, peer)->path->is_linked) ||
           stream_at_hand(p->client, peer);
}

/* Whether the plan is that of the ranks which are used, at what they announced, and no connection
   is to be waited for. */
static bool still_fits(const pull *p)
{
    const path_plan *plan = &p->cache->whole.plan;
    size_t used = 0;
    for (size_t i = 0; i < p->client->n_peers; i++)
        used += p->use[i];
    for (size_t i = 0; i < plan->n_sources; i++) {
        size_t peer = plan->peer_of[i];
        if (!p->use[peer] || !is_connected(p, i) ||
            p->announced[peer].version != p->publication->shards[peer].version)
            return false;
    }
    return used == plan->n_sources;
}

void early_lease_keep(pull *p)
{
    if (p->early.since_ns == 0 || still_fits(p))
        return;
    lease_round_abandon(p->client, p->leases);
    p->early.since_ns = 0;
}

/* Whether there are any. Those that are too old are given back. */
static bool early_lease_holds(pull *p)
{
    uint64_t since = p->early.since_ns;
    if (since == 0 || clock_ns() - since < EARLY_MS * UINT64_C(1000000))
        return since != 0;
    lease_round_abandon(p->client, p->leases);
    return false;
}

/* ------------------------------------------------------------- begin, end */

/* Nothing slow happens under a lease but reads; only parts are not known before they are read. */
fanin_status pull_begin(pull *p, fanin_error *error)
{
    uint64_t asked_ns = early_lease_holds(p) ? p->early.since_ns : clock_ns();
    fanin_status status = lease_round_begin(p, error);
    if (status != FANIN_OK)
        return status;
    path_end_ahead(&p->goal);
    p->leased_ns = asked_ns;
    p->cache->proven = p->cache->proven || !p->delta;
    p->lease_ms = 0;
    for (size_t i = 0; i < p->client->n_peers; i++)
        if (p->leases[i].held && p->leases[i].lease_ms > p->lease_ms)
            p->lease_ms = p->leases[i].lease_ms;
    p->state = p->session ? PULL_HELD : PULL_READ;
    if (p->delta)
        pull_patches_begun(p);
    return FANIN_OK;
}

fanin_status pull_end(pull *p, fanin_error *error)
{
    fanin_status status = lease_round_end(p, error);
    if (status == FANIN_OK)
        p->state = p->delta ? PULL_APPLY : PULL_PUBLISH;
    return status;
}
