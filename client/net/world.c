/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which ranks are there, and whether they are one world. All that a client knows of a rank is what
 * its connection said when it was made: of a rank that has died since, and of which no end of the
 * stream came (its host is gone, or nobody read yet), it still believes that. So a difference
 * counts only once both sides have shown that they live.
 */
#include "net/client_state.h"

#include "error_set.h"
#include "net/client_rules.h"
#include "net/connection.h"
#include "text.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Worlds that a message tells of. */
#define TOLD_WORLDS 3

/* ------------------------------------------------------------- differences */

static fanin_status world_error(const peer *p, fanin_error *error, const char *remedy,
                                const char *what, const char *detail)
{
    error_place place = connection_place(p->control, "connect");
    place.remedy = remedy;
    return error_set(error, FANIN_ERR_WORLD, &place, "rank %u at %s %s %s",
                     p->control->peer.rank, p->control->text, what, detail);
}

static fanin_status check_server_name(const fanin_client *client, const peer *p,
                                      fanin_error *error)
{
    const msg_hello_ok *hello = &p->control->peer;
    if (!client->server_name)
        return FANIN_OK;
    char expected[160];
    snprintf(expected, sizeof(expected), "%s_%u", client->server_name, hello->rank);
    if (strcmp(expected, hello->server_name) == 0)
        return FANIN_OK;
    return world_error(p, error, "connect to the job that is meant, or change the name",
                       "belongs to another job:", hello->server_name);
}

static bool same_world(const msg_hello_ok *a, const msg_hello_ok *b)
{
    return memcmp(a->world_id, b->world_id, sizeof a->world_id) == 0;
}

/* One world of several: the peers in it. */
typedef struct party {
    const msg_hello_ok *hello;
    size_t first, count;
} party;

static int fewest_first(const void *a, const void *b)
{
    const party *x = a, *y = b;
    if (x->count != y->count)
        return x->count < y->count ? -1 : 1;
    return x->first > y->first ? -1 : 1;
}

/* The worlds that ready peers are of, the smallest first. */
static size_t find_parties(const fanin_client *client, party *parties)
{
    size_t n = 0;
    for (size_t i = 0; i < client->n_peers; i++) {
        const msg_hello_ok *hello = &client->peers[i].control->peer;
        size_t at = 0;
        if (!peer_ready(&client->peers[i]))
            continue;
        while (at < n && !same_world(parties[at].hello, hello))
            at++;
        if (at == n)
            parties[n++] = (party){.hello = hello, .first = i};
        parties[at].count++;
    }
    qsort(parties, n, sizeof *parties, fewest_first);
    return n;
}

/* "rank 2 at host:port (0123456789abcdef)" */
static void describe_party(const fanin_client *client, const party *p, bool *mask,
                           char *out, size_t size)
{
    char who[96];
    for (size_t i = 0; i < client->n_peers; i++)
        mask[i] = peer_ready(&client->peers[i]) &&
                  same_world(p->hello, &client->peers[i].control->peer);
    rank_list_text(client, mask, who, sizeof who);
    text t = text_in(out, size);
    text_add(&t, "%s (", who);
    for (size_t i = 0; i < 8; i++)
        text_add(&t, "%02x", p->hello->world_id[i]);
    text_add(&t, ")");
}

/* Who is of which world. */
static fanin_status mixed_error(const fanin_client *client, fanin_error *error)
{
    party *parties = calloc(client->n_peers, sizeof *parties);
    bool *mask = calloc(client->n_peers, sizeof *mask);
    if (!parties || !mask) {
        free(parties);
        free(mask);
        return error_set_memory(error);
    }
    size_t n = find_parties(client, parties);
    char who[TOLD_WORLDS][120] = {""}, more[48] = "";
    for (size_t i = 0; i < n && i < TOLD_WORLDS; i++)
        describe_party(client, &parties[i], mask, who[i], sizeof who[i]);
    if (n > TOLD_WORLDS)
        snprintf(more, sizeof more, " and %zu more worlds", n - TOLD_WORLDS);
    error_place place =
        connection_place(client->peers[parties[0].first].control, "connect");
    place.remedy =
        "a rank of an earlier launch may still be alive: end it, or wait until "
        "all ranks have restarted";
    fanin_status status = error_set(
        error, FANIN_ERR_WORLD, &place, "%s %s of another world (launch) than %s%s%s%s",
        who[0], parties[0].count == 1 ? "is" : "are", who[1],
        n > 2 ? ", which differs from " : "", who[2], more);
    free(parties);
    free(mask);
    return status;
}

/* Compares one rank with the first and with all before it. */
static fanin_status check_against(const fanin_client *client, size_t first, size_t i,
                                  fanin_error *error)
{
    const peer *p = &client->peers[i];
    const msg_hello_ok *a = &client->peers[first].control->peer;
    const msg_hello_ok *b = &p->control->peer;
    char text[160];
    if (CLIENT_RULE(CLIENT_RULE_WORLD) && !same_world(a, b))
        return mixed_error(client, error);
    if (b->world_size != a->world_size || b->rank >= b->world_size) {
        snprintf(text, sizeof(text), "%u, rank %u says %u", b->world_size, a->rank,
                 a->world_size);
        return world_error(p, error, "restart the trainer ranks together",
                           "says the world size is", text);
    }
    if (b->world_size != client->n_peers && !client->config.partial) {
        snprintf(text, sizeof(text), "%u, but %zu addresses were given", b->world_size,
                 client->n_peers);
        return world_error(p, error,
                           "give the address of every rank of one launch, each once",
                           "says the world size is", text);
    }
    for (size_t j = 0; j < i; j++) {
        const peer *other = &client->peers[j];
        if (!peer_ready(other) || other->control->peer.rank != b->rank)
            continue;
        return world_error(p, error, "give the address of every rank, each once",
                           "is a rank that answers twice, also at",
                           other->control->text);
    }
    return FANIN_OK;
}

static fanin_status identify_peer(fanin_client *client, fanin_error *error)
{
    static const uint8_t any[FANIN_WORLD_ID_SIZE];
    size_t first = client->n_peers;
    for (size_t i = 0; i < client->n_peers; i++) {
        const peer *p = &client->peers[i];
        if (!peer_ready(p))
            continue;
        if (first == client->n_peers)
            first = i;
        fanin_status status = check_server_name(client, p, error);
        if (status == FANIN_OK)
            status = check_against(client, first, i, error);
        if (status == FANIN_OK && memcmp(client->config.world_id, any, sizeof any) &&
            memcmp(client->config.world_id, p->control->peer.world_id, sizeof any))
            status = world_error(p, error, "connect to the launch that is meant",
                                 "announces another world id", "than was demanded");
        if (status != FANIN_OK)
            return status;
    }
    if (first < client->n_peers)
        return FANIN_OK;
    connection *c = client->peers[0].control;
    if (c->state != CONNECTION_DOWN) {
        error_place place = connection_place(c, "connect");
        place.remedy = STOPPED_REMEDY;
        return error_set(error, FANIN_ERR_TIMEOUT, &place,
                         "%s did not answer before the deadline", c->text);
    }
    return error_copy(error, &c->fault);
}

/* -------------------------------------------------------------- connecting */

static bool is_connecting(const peer *p)
{
    connection_state state = p->control->state;
    return state == CONNECTION_CONNECTING || state == CONNECTION_HELLO;
}

bool client_expects_more(const fanin_client *client)
{
    bool any = false;
    for (size_t i = 0; i < client->n_peers; i++)
        any = any || (!peer_ready(&client->peers[i]) &&
                      client->peers[i].control->state != CONNECTION_DOWN);
    return any;
}

/* Ranks that are worth waiting for; without *enough the slow ones are, too. */
static size_t count_awaited(const fanin_client *client, bool patient, bool *enough)
{
    size_t slow = 0, others = 0;
    *enough = false;
    for (size_t i = 0; i < client->n_peers; i++) {
        const peer *p = &client->peers[i];
        *enough = *enough || p->control->state == CONNECTION_READY;
        if (is_connecting(p) && (p->slow || p->control->silent))
            slow++;
        else
            others += is_connecting(p);
    }
    return others + (patient || !*enough ? slow : 0);
}

/* Those that are there take part from now on. */
static void admit_peer(fanin_client *client)
{
    for (size_t i = 0; i < client->n_peers; i++) {
        peer *p = &client->peers[i];
        if (p->generation == 0 || CLIENT_RULE(CLIENT_RULE_INCARNATION))
            p->generation = p->control->generation;
        if (p->control->state == CONNECTION_READY)
            p->admitted = p->control->generation;
    }
}

/* Whom to wait for: one rank, those that are not slow (once one is there), or all. */
typedef enum eagerness { ONE, QUICK, ALL } eagerness;

/* Until those that are waited for are there. */
static fanin_status await_peers(fanin_client *client, eagerness whom, deadline at,
                                fanin_error *error)
{
    deadline half = clock_ns() + deadline_left_ns(at) / 2;
    bool enough;
    while (count_awaited(client, whom == ALL, &enough) > 0) {
        bool in_hurry = enough && whom != ALL;
        if (in_hurry && (whom == ONE || deadline_passed(half)))
            break;
        fanin_error why = FANIN_ERROR_INIT;
        fanin_status status =
            client_step(client, at, in_hurry ? half : UINT64_MAX, "connect", &why);
        if (status == FANIN_ERR_CANCELLED)
            return error_copy(error, &why);
        if (status == FANIN_ERR_TIMEOUT)
            break; /* what did not answer yet counts as missing */
        client_tick(client);
    }
    return FANIN_OK;
}

static void start_peers(fanin_client *client)
{
    for (size_t i = 0; i < client->n_peers; i++) {
        peer *p = &client->peers[i];
        p->half_made = is_connecting(p);
        connection_start(p->control);
    }
}

/* What an earlier call began leads to who listened then. Where that was closed another may listen
   now; who merely did not answer has had its time. */
static bool start_again(fanin_client *client)
{
    bool any = false;
    for (size_t i = 0; i < client->n_peers; i++) {
        peer *p = &client->peers[i];
        if (p->half_made && p->control->state == CONNECTION_DOWN &&
            !deadline_passed(p->control->connect_by)) {
            p->half_made = false;
            connection_start(p->control);
            any = true;
        }
    }
    return any;
}

static fanin_status connect_peers(fanin_client *client, eagerness whom, deadline at,
                                  fanin_error *error)
{
    const uint64_t began = clock_ns();
    start_peers(client);
    fanin_status status;
    do
        status = await_peers(client, whom, at, error);
    while (status == FANIN_OK && start_again(client));
    if (status != FANIN_OK)
        return status;
    for (size_t i = 0; i < client->n_peers && whom != ONE; i++) {
        client->peers[i].slow = is_connecting(&client->peers[i]);
        if (client->peers[i].slow)
            span_of_rank(client, i, TRACE_CONNECT, began, clock_ns(), 0,
                         FANIN_ERR_TIMEOUT);
    }
    admit_peer(client);
    return FANIN_OK;
}

/* ------------------------------------------------------------------- asking */

/* One rank is asked whether it lives. */
typedef struct question {
    size_t *left;
    bool asked, answered;
} question;

static void on_life_sign(void *cookie, connection *c, message_type type, body *b)
{
    question *q = cookie;
    (void)c;
    (void)b;
    q->answered = type != 0; /* whatever it says, somebody said it */
    --*q->left;
}

/* Gives up the connections whose ranks do not answer; *lost: how many went. Half of the time is
   left for connecting again. */
static fanin_status find_dead(fanin_client *client, deadline at, size_t *lost,
                              fanin_error *error)
{
    question *questions = calloc(client->n_peers, sizeof *questions);
    if (!questions)
        return error_set_memory(error);
    uint64_t half = clock_ns() + deadline_left_ns(at) / 2;
    deadline by = deadline_sooner(half, deadline_in_ms(client->config.lost_ms));
    size_t left = 0;
    for (size_t i = 0; i < client->n_peers; i++) {
        connection *c = client->peers[i].control;
        if (!peer_ready(&client->peers[i]))
            continue;
        questions[i] = (question){.left = &left, .asked = true};
        left++;
        encode_empty(connection_out(c), c->next_request, MSG_PING);
        connection_ask(c, on_life_sign, &questions[i]);
    }
    fanin_status status = client_run(client, &left, by, "connect", error);
    if (status == FANIN_ERR_TIMEOUT)
        status = FANIN_OK;
    for (size_t i = 0; i < client->n_peers; i++) {
        connection *c = client->peers[i].control;
        if (!questions[i].asked)
            continue;
        connection_forget(c, &questions[i]);
        if (questions[i].answered)
            continue;
        *lost += 1;
        if (status == FANIN_OK)
            connection_give_up(c);
    }
    free(questions);
    return status;
}

/* ------------------------------------------------------------------- whole */

fanin_status client_ensure_connected(fanin_client *client, bool patient, deadline at,
                                     fanin_error *error)
{
    loop_step(&client->loop, 0); /* who has gone since the last call */
    for (bool asked = false;; asked = true) {
        size_t lost = 0;
        fanin_status status = connect_peers(client, patient ? ALL : QUICK, at, error);
        if (status != FANIN_OK)
            return status;
        if (client->connected && !CLIENT_RULE(CLIENT_RULE_WORLD_AGAIN))
            return FANIN_OK;
        status = identify_peer(client, error);
        if (status != FANIN_ERR_WORLD || asked || !CLIENT_RULE(CLIENT_RULE_WORLD_ASK))
            return status;
        fanin_error why = FANIN_ERROR_INIT;
        fanin_status ended = find_dead(client, at, &lost, &why);
        if (ended != FANIN_OK)
            return error_copy(error, &why);
        if (lost == 0)
            return status;
    }
}

fanin_status client_compare(fanin_client *client, fanin_error *error)
{
    admit_peer(client);
    return identify_peer(client, error);
}

fanin_status client_connect_first(fanin_client *client, deadline at, fanin_error *error)
{
    fanin_status status = connect_peers(client, ONE, at, error);
    return status == FANIN_OK ? identify_peer(client, error) : status;
}
