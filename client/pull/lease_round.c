/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/lease_round.h"

#include "error_set.h"
#include "net/client_rules.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One rank's part of a round. */
typedef struct turn {
    size_t *left;
    reader_lease *lease; /* NULL: it is not asked */
    fanin_error error;
} turn;

/* Frees the turns. What comes after @p at goes to @p late. */
static fanin_status run(fanin_client *client, turn *turns, size_t *left, deadline at,
                        const char *phase, reply_fn late, fanin_error *error)
{
    fanin_status status = client_run(client, left, at, phase, error);
    for (size_t i = 0; i < client->n_peers; i++) {
        if (!turns[i].lease)
            continue;
        connection_leave_to(client->peers[i].control, &turns[i], late);
        if (status == FANIN_OK && turns[i].error.status != FANIN_OK)
            status = error_copy(error, &turns[i].error);
    }
    free(turns);
    return status;
}

static void send_end(connection *c, const reader_lease *lease, bool abandon,
                     reply_fn fn, void *cookie)
{
    msg_end m = {.abandon = abandon};
    memcpy(m.token, lease->token, sizeof m.token);
    uint64_t request = connection_next_request(c);
    encode_end(connection_out(c), request, &m);
    connection_ask(c, request, fn, cookie);
}

static void on_abandoned(void *cookie, connection *c, message_type type, body *b)
{
    (void)cookie;
    (void)c;
    (void)type;
    (void)b; /* whatever it says, nothing depends on it */
}

/* ------------------------------------------------------------------- begin */

static void on_begun(void *cookie, connection *c, message_type type, body *b)
{
    turn *t = cookie;
    msg_begin_ok m;
    --*t->left;
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
    t->lease->held = true;
    t->lease->lease_ms = m.lease_ms;
    t->lease->first_region = m.first_region;
    memcpy(t->lease->token, m.token, sizeof t->lease->token);
}

/* A lease that nobody waited for any longer: the rank's next update must not wait for it. */
static void on_begun_late(void *cookie, connection *c, message_type type, body *b)
{
    msg_begin_ok m;
    reader_lease unwanted;
    (void)cookie;
    if (type != MSG_BEGIN_OK || decode_begin_ok(b, &m) != FANIN_OK || !m.granted)
        return;
    memcpy(unwanted.token, m.token, sizeof unwanted.token);
    send_end(c, &unwanted, true, on_abandoned, NULL);
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
            continue;
        connection *c = client->peers[i].control;
        turns[i] = (turn){&left, &leases[i], FANIN_ERROR_INIT};
        left++;
        msg_begin m = {.step = announced[i].step,
                       .catalog_version = announced[i].version};
        snprintf(m.publication, sizeof m.publication, "%s", p->name);
        uint64_t request = connection_next_request(c);
        encode_begin(connection_out(c), request, &m);
        connection_ask(c, request, on_begun, &turns[i]);
    }
    return run(client, turns, &left, at, "begin", on_begun_late, error);
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
    }
}

fanin_status lease_round_end(fanin_client *client, reader_lease *leases, deadline at,
                             fanin_error *error)
{
    turn *turns = calloc(client->n_peers, sizeof *turns);
    if (!turns)
        return error_set_memory(error);
    size_t left = 0;
    for (size_t i = 0; i < client->n_peers; i++) {
        if (!leases[i].held)
            continue;
        turns[i] = (turn){&left, &leases[i], FANIN_ERROR_INIT};
        left++;
        send_end(client->peers[i].control, &leases[i], false, on_ended, &turns[i]);
    }
    return run(client, turns, &left, at, "end", NULL, error);
}

void lease_round_abandon(fanin_client *client, reader_lease *leases)
{
    for (size_t i = 0; i < client->n_peers; i++) {
        if (leases[i].held && peer_ready(&client->peers[i]))
            send_end(client->peers[i].control, &leases[i], true, on_abandoned, NULL);
        leases[i].held = false;
    }
}
