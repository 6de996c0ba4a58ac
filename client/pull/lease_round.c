/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/lease_round.h"

#include "error_set.h"
#include "net/client_rules.h"
#include "net/spans.h"
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
    const fanin_client *client;
    uint64_t asked_ns; /* 0: it has answered */
    fanin_error error;
} turn;

static void send_end(connection *c, const msg_end *m, reply_fn fn, void *cookie)
{
    uint64_t request = connection_next_request(c);
    encode_end(connection_out(c), request, m);
    connection_ask(c, request, fn, cookie);
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

/* The rank has answered, or is not waited for any longer. */
static void asked_until_now(turn *t, const connection *c, trace_name name,
                            fanin_status outcome)
{
    span_of_connection(c, &t->client->place, name, t->asked_ns, outcome);
    t->asked_ns = 0;
}

/* Frees the turns. A lease that nobody waits for any longer is given back before it is there: the
   rank's next update must not wait for it, and this client may never be called again. */
static fanin_status run(fanin_client *client, turn *turns, size_t *left, deadline at,
                        trace_name name, fanin_error *error)
{
    fanin_status status = client_run(client, left, at, trace_name_text(name), error);
    for (size_t i = 0; i < client->n_peers; i++) {
        if (!turns[i].lease)
            continue;
        connection *c = client->peers[i].control;
        connection_forget(c, &turns[i]);
        if (turns[i].asked_ns > 0)
            asked_until_now(&turns[i], c, name, status);
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
                  connection_peer(c)->rank, connection_text(c), m.why);
        return;
    }
    *t->lease = (reader_lease){.held = true,
                               .lease_ms = m.lease_ms,
                               .first_region = m.first_region,
                               .generation = connection_generation(c)};
    memcpy(t->lease->token, m.token, sizeof t->lease->token);
}

static void on_begun(void *cookie, connection *c, message_type type, body *b)
{
    turn *t = cookie;
    --*t->left;
    t->begin = 0;
    take_begun(t, c, type, b);
    asked_until_now(t, c, TRACE_BEGIN, t->error.status);
}

fanin_status lease_round_begin(fanin_client *client, const publication *p,
                               const announcement *announced, const bool *use,
                               reader_lease *leases, deadline at, fanin_error *error)
{
    turn *turns = calloc(client->n_peers, sizeof *turns);
    if (!turns)
        return error_set_memory(error);
    size_t left = 0;
    for (size_t i = 0; i < client->n_peers; i++) {
        if (!use[i])
            lease_give_back(client, i, &leases[i]);
        if (!use[i] || leases[i].held)
            continue;
        connection *c = client->peers[i].control;
        uint64_t request = connection_next_request(c);
        turns[i] = (turn){.left = &left,
                          .lease = &leases[i],
                          .begin = request,
                          .client = client,
                          .asked_ns = clock_ns(),
                          .error = FANIN_ERROR_INIT};
        left++;
        msg_begin m = {.step = announced[i].step,
                       .catalog_version = announced[i].version};
        snprintf(m.publication, sizeof m.publication, "%s", p->name);
        encode_begin(connection_out(c), request, &m);
        connection_ask(c, request, on_begun, &turns[i]);
    }
    return run(client, turns, &left, at, TRACE_BEGIN, error);
}

/* --------------------------------------------------------------------- end */

static void on_ended(void *cookie, connection *c, message_type type, body *b)
{
    turn *t = cookie;
    msg_end_ok m;
    --*t->left;
    t->lease->held = false;
    if (type != MSG_END_OK || decode_end_ok(b, &m) != FANIN_OK) {
        connection_reply_error(c, "end", type, b, &t->error);
    } else if (!m.good && CLIENT_RULE(CLIENT_RULE_END_CHECK)) {
        error_place place = connection_place(c, "end");
        place.remedy =
            "allow the pull more time, or keep the weights stable for longer";
        error_set(&t->error, FANIN_ERR_STALE, &place,
                  "rank %u at %s rewrote the weights while they were read "
                  "(it is at step %" PRIu64 " now)",
                  connection_peer(c)->rank, connection_text(c), m.step);
    } else if (m.good && m.step < t->step) {
        error_place place = connection_place(c, "end");
        place.remedy = "use the same fanin release on both ends";
        error_set(&t->error, FANIN_ERR_PROTOCOL, &place,
                  "rank %u at %s says that step %" PRIu64
                  " stands, and is at step %" PRIu64,
                  connection_peer(c)->rank, connection_text(c), t->step, m.step);
    }
    asked_until_now(t, c, TRACE_END, t->error.status);
}

/* A rank sees nothing of one-sided reads unless it is told. */
static msg_end end_of(const publication *p, size_t peer, const reader_lease *lease,
                      const served *served)
{
    const path_reader *path = path_taken(p, peer)->path;
    msg_end m = {0};
    if (path && path->told_at > 0)
        memcpy((char *)&m + path->told_at, &served->bytes, sizeof served->bytes);
    memcpy(m.token, lease->token, sizeof m.token);
    return m;
}

fanin_status lease_round_end(fanin_client *client, const publication *p,
                             const announcement *announced, reader_lease *leases,
                             const served *served, deadline at, fanin_error *error)
{
    turn *turns = calloc(client->n_peers, sizeof *turns);
    if (!turns)
        return error_set_memory(error);
    size_t left = 0;
    for (size_t i = 0; i < client->n_peers; i++) {
        connection *c = client->peers[i].control;
        if (!leases[i].held)
            continue;
        msg_end m = end_of(p, i, &leases[i], &served[i]);
        turns[i] = (turn){.left = &left,
                          .lease = &leases[i],
                          .step = announced[i].step,
                          .client = client,
                          .asked_ns = clock_ns(),
                          .error = FANIN_ERROR_INIT};
        left++;
        send_end(c, &m, on_ended, &turns[i]);
    }
    return run(client, turns, &left, at, TRACE_END, error);
}

void lease_round_abandon(fanin_client *client, reader_lease *leases)
{
    for (size_t i = 0; i < client->n_peers; i++)
        lease_give_back(client, i, &leases[i]);
}
