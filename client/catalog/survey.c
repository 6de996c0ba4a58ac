/* SPDX-License-Identifier: Apache-2.0 */
#include "catalog/survey.h"

#include "error_set.h"
#include "net/connect.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Connected; it need not have been compared with the others yet. */
static bool is_up(const survey *s, size_t peer)
{
    return connection_get_state(s->client->peers[peer].control) == CONNECTION_READY;
}

static const char *phase_of(const survey *s)
{
    switch (s->type) {
    case MSG_LIST:
        return "catalog";
    case MSG_PING:
        return "ping";
    case MSG_STATS:
        return "stats";
    default:
        return "wait";
    }
}

/* What this rank is asked. */
static message_type question_of(const survey *s, const connection *c)
{
    bool knows = connection_peer(c)->features & FEATURE_STATS;
    return s->type == MSG_STATS && !knows ? MSG_LIST : s->type;
}

/* FANIN_OK if the reply is the one that was asked for. */
static fanin_status take(answer *a, const connection *c, message_type type, body *b)
{
    static const message_type replies[] = {[MSG_LIST] = MSG_LIST_OK,
                                           [MSG_PING] = MSG_PONG,
                                           [MSG_WAIT] = MSG_WAIT_OK,
                                           [MSG_STATS] = MSG_STATS_OK};
    msg_wait_ok m;
    if (type != replies[question_of(a->survey, c)])
        return FANIN_ERR_PROTOCOL;
    if (type == MSG_STATS_OK)
        return decode_stats_ok(b, &a->stats);
    if (type == MSG_LIST_OK)
        return decode_list_ok(b, &a->entries, &a->count);
    if (type == MSG_PONG)
        return FANIN_OK;
    fanin_status status = decode_wait_ok(b, &m);
    if (status != FANIN_OK)
        return status;
    a->announced = (announcement){.valid = true,
                                  .step = m.step,
                                  .version = m.catalog_version,
                                  .stable_ns = m.stable_ns};
    memcpy(a->announced.keys.bytes, m.key_digest, sizeof m.key_digest);
    return FANIN_OK;
}

static void on_reply(void *cookie, connection *c, message_type type, body *b)
{
    answer *a = cookie;
    fanin_status status = type != 0 ? take(a, c, type, b) : FANIN_ERR_CLOSED;
    a->over = true;
    a->answered_ns = clock_ns();
    if (status == FANIN_ERR_MEMORY)
        error_set_memory(&a->error); /* it is not the rank's fault */
    else if (status != FANIN_OK)
        connection_reply_error(c, phase_of(a->survey), type, b, &a->error);
}

static void encode_question(const survey *s, connection *c, uint64_t request)
{
    message_type type = question_of(s, c);
    if (type == MSG_LIST) {
        encode_list(connection_out(c), request, s->publication);
    } else if (type == MSG_STATS) {
        encode_stats(connection_out(c), request, s->publication);
    } else if (type == MSG_PING) {
        encode_empty(connection_out(c), request, MSG_PING);
    } else {
        /* The rank's own "not yet" should come before this side gives up. */
        uint32_t left = (uint32_t)deadline_poll_ms(s->at);
        msg_wait m = {.rule = FANIN_STEP_NEWEST, .timeout_ms = left - left / 20};
        snprintf(m.publication, sizeof m.publication, "%s", s->publication);
        encode_wait(connection_out(c), request, &m);
    }
}

/* Asks whoever has become READY. */
static void ask_ready(survey *s)
{
    for (size_t i = 0; i < s->client->n_peers; i++) {
        answer *a = &s->answers[i];
        connection *c = s->client->peers[i].control;
        if (a->asked || !is_up(s, i))
            continue;
        a->asked = true;
        a->asked_ns = clock_ns();
        uint64_t request = connection_next_request(c);
        encode_question(s, c, request);
        connection_ask(c, request, on_reply, a);
    }
}

/* Whether the peer may answer yet. */
static bool is_open(const survey *s, size_t peer)
{
    if (s->answers[peer].asked)
        return !s->answers[peer].over;
    return connection_get_state(s->client->peers[peer].control) != CONNECTION_DOWN;
}

/* A refusal that waiting for this rank or for others would not mend. */
static bool is_final(const answer *a)
{
    int group = -a->error.status / 100;
    return a->over && (group == 1 || group == 4);
}

static bool is_over(const survey *s)
{
    bool open = false;
    for (size_t i = 0; i < s->client->n_peers; i++) {
        if (s->first && (survey_answered(s, i) || is_final(&s->answers[i])))
            return true;
        open = open || is_open(s, i);
    }
    return !open;
}

/* Nothing came. A rank that lets waits wait is not silent, the others are. */
static void give_up(survey *s, answer *a, bool late)
{
    connection *c = s->client->peers[a->peer].control;
    bool ready = is_up(s, a->peer);
    if (late && ready && s->type == MSG_WAIT) {
        error_place place = connection_place(c, "wait");
        error_set(&a->error, FANIN_ERR_TIMEOUT, &place,
                  "rank %u at %s has nothing that is committed",
                  connection_peer(c)->rank, connection_text(c));
        return;
    }
    if (late)
        connection_give_up(c);
    error_copy(&a->error, connection_fault(c));
}

/* Replies that come later find nobody. A rank that gave a useless reply, or none, is not to be
   taken for one that is there. */
static void settle(survey *s, bool late)
{
    for (size_t i = 0; i < s->client->n_peers; i++) {
        answer *a = &s->answers[i];
        connection *c = s->client->peers[i].control;
        connection_forget(c, a);
        if (!a->over)
            give_up(s, a, late);
        else if (a->error.status != FANIN_OK && a->error.status != FANIN_ERR_MEMORY &&
                 s->type != MSG_WAIT)
            connection_fail(c, &a->error);
        a->over = true;
    }
}

/* What ranks made of it is in s->answers; FANIN_OK also if nobody answered. */
static fanin_status run(survey *s, fanin_error *error)
{
    fanin_client *client = s->client;
    fanin_status status = FANIN_OK;
    fanin_error why = FANIN_ERROR_INIT;
    loop_step(&client->loop, 0); /* who has gone since the last call */
    s->answers = calloc(client->n_peers, sizeof *s->answers);
    if (!s->answers)
        return error_set_memory(error);
    for (size_t i = 0; i < client->n_peers; i++) {
        s->answers[i] = (answer){.survey = s, .peer = i, .error = FANIN_ERROR_INIT};
        connection_start(client->peers[i].control);
    }
    for (ask_ready(s); status == FANIN_OK && !is_over(s); ask_ready(s))
        status = client_step(client, s->at, UINT64_MAX, phase_of(s), &why);
    settle(s, status == FANIN_ERR_TIMEOUT);
    if (status == FANIN_ERR_TIMEOUT)
        return FANIN_OK; /* who owes an answer has been given up */
    return status != FANIN_OK ? error_copy(error, &why) : status;
}

bool survey_answered(const survey *s, size_t peer)
{
    const answer *a = &s->answers[peer];
    return a->asked && a->over && a->error.status == FANIN_OK;
}

/* If nobody answered: why the first did not. */
static fanin_status judge(const survey *s, fanin_error *error)
{
    /* What a rank said tells more than that another one says nothing. */
    const answer *worst = &s->answers[0];
    bool any = false;
    for (size_t i = 0; i < s->client->n_peers; i++) {
        any = any || survey_answered(s, i);
        if (s->answers[i].error.status == FANIN_ERR_MEMORY)
            return error_set_memory(error);
        if (is_final(&s->answers[i]) && !is_final(worst))
            worst = &s->answers[i];
    }
    if (any)
        return client_compare(s->client, error);
    return error_copy(error, &worst->error);
}

void survey_finish(survey *s)
{
    for (size_t i = 0; s->answers && i < s->client->n_peers; i++) {
        free(s->answers[i].entries);
        stats_free(&s->answers[i].stats);
    }
    free(s->answers);
    s->answers = NULL;
}

fanin_status survey_take(survey *s, fanin_error *error)
{
    for (bool again = false;; again = true) {
        fanin_status status = run(s, error);
        if (status == FANIN_OK)
            status = judge(s, error);
        if (status != FANIN_ERR_WORLD || again)
            return status;
        status = client_ensure_connected(s->client, false, s->at, error);
        if (status != FANIN_OK)
            return status;
        survey_finish(s);
    }
}
