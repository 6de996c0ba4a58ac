/* SPDX-License-Identifier: Apache-2.0 */
#include "catalog/survey.h"

#include "error_set.h"
#include "net/connection.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Connected; it need not have been compared with the others yet. */
static bool is_up(const survey *s, size_t peer)
{
    return s->client->peers[peer].control->state == CONNECTION_READY;
}

static const char *survey_phase(const survey *s)
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
    bool knows = c->peer.features & FEATURE_STATS;
    return s->type == MSG_STATS && !knows ? MSG_LIST : s->type;
}

/* FANIN_OK if the reply is the one that was asked for. */
static fanin_status take_answer(answer *a, const connection *c, message_type type,
                                body *b)
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
    fanin_status status = type != 0 ? take_answer(a, c, type, b) : FANIN_ERR_CLOSED;
    a->over = true;
    a->answered_ns = clock_ns();
    if (status == FANIN_ERR_MEMORY)
        error_set_memory(&a->error); /* it is not the rank's fault */
    else if (status != FANIN_OK)
        connection_reply_error(c, survey_phase(a->survey), type, b, &a->error);
}

static void encode_question(const survey *s, connection *c)
{
    message_type type = question_of(s, c);
    if (type == MSG_LIST) {
        encode_list(connection_out(c), c->next_request, s->publication);
    } else if (type == MSG_STATS) {
        encode_stats(connection_out(c), c->next_request, s->publication);
    } else if (type == MSG_PING) {
        encode_empty(connection_out(c), c->next_request, MSG_PING);
    } else {
        /* The rank's own "not yet" should come before this side gives up. */
        uint32_t left = (uint32_t)deadline_poll_ms(s->at);
        msg_wait m = {.rule = FANIN_STEP_NEWEST, .timeout_ms = left - left / 20};
        snprintf(m.publication, sizeof m.publication, "%s", s->publication);
        encode_wait(connection_out(c), c->next_request, &m);
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
        encode_question(s, c);
        connection_ask(c, on_reply, a);
    }
}

/* Whether the peer may answer yet. */
static bool is_answer_open(const survey *s, size_t peer)
{
    if (s->answers[peer].asked)
        return !s->answers[peer].over;
    return s->client->peers[peer].control->state != CONNECTION_DOWN;
}

/* A refusal that waiting for this rank or for others would not mend. */
static bool is_answer_final(const answer *a)
{
    int group = -a->error.status / 100;
    return a->over && (group == 1 || group == 4);
}

static bool is_survey_over(const survey *s)
{
    bool open = false;
    for (size_t i = 0; i < s->client->n_peers; i++) {
        if (s->first && (survey_answered(s, i) || is_answer_final(&s->answers[i])))
            return true;
        open = open || is_answer_open(s, i);
    }
    return !open;
}

/* Nothing came. A rank that lets waits wait is not silent, the others are. */
static void give_up_silent(survey *s, answer *a, bool late)
{
    connection *c = s->client->peers[a->peer].control;
    bool ready = is_up(s, a->peer);
    if (late && ready && s->type == MSG_WAIT) {
        error_place place = connection_place(c, "wait");
        error_set(&a->error, FANIN_ERR_TIMEOUT, &place,
                  "rank %u at %s has nothing that is committed", c->peer.rank, c->text);
        return;
    }
    if (late)
        connection_give_up(c);
    error_copy(&a->error, &c->fault);
}

/* Replies that come later find nobody. A rank that gave a useless reply, or none, is not to be
   taken for one that is there. */
static void settle_answer(survey *s, bool late)
{
    for (size_t i = 0; i < s->client->n_peers; i++) {
        answer *a = &s->answers[i];
        connection *c = s->client->peers[i].control;
        connection_forget(c, a);
        if (!a->over)
            give_up_silent(s, a, late);
        else if (a->error.status != FANIN_OK && a->error.status != FANIN_ERR_MEMORY &&
                 s->type != MSG_WAIT)
            connection_fail(c, &a->error);
        a->over = true;
    }
}

/* What ranks made of it is in s->answers; FANIN_OK also if nobody answered. */
static fanin_status run_survey(survey *s, fanin_error *error)
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
    for (ask_ready(s); status == FANIN_OK && !is_survey_over(s); ask_ready(s))
        status = client_step(client, s->at, UINT64_MAX, survey_phase(s), &why);
    settle_answer(s, status == FANIN_ERR_TIMEOUT);
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
static fanin_status judge_answers(const survey *s, fanin_error *error)
{
    /* What a rank said tells more than that another one says nothing. */
    const answer *worst = &s->answers[0];
    bool any = false;
    for (size_t i = 0; i < s->client->n_peers; i++) {
        any = any || survey_answered(s, i);
        if (s->answers[i].error.status == FANIN_ERR_MEMORY)
            return error_set_memory(error);
        if (is_answer_final(&s->answers[i]) && !is_answer_final(worst))
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
        fanin_status status = run_survey(s, error);
        if (status == FANIN_OK)
            status = judge_answers(s, error);
        if (status != FANIN_ERR_WORLD || again)
            return status;
        status = client_ensure_connected(s->client, false, s->at, error);
        if (status != FANIN_OK)
            return status;
        survey_finish(s);
    }
}

/* -------------------------------------------------------- lists and pings */

/* Looking at trainers: ranks, publications, pings. */

/* -------------------------------------------------------------------- ranks */

/* What is known of the rank behind a peer; texts as long as its connection. */
static fanin_rank_info rank_describe(const peer *p)
{
    const msg_hello_ok *hello = &p->control->peer;
    bool known = p->control->known, ready = peer_ready(p);
    const fanin_error *fault = &p->control->fault;
    fanin_rank_info info = {
        .struct_size = sizeof info,
        .rank = known ? (int32_t)hello->rank : -1,
        .world_size = known ? hello->world_size : 0,
        .address = p->control->text,
        .server_name = hello->server_name,
        .software = hello->software,
        .ucx_version = hello->ucx_version,
        .status = ready ? FANIN_OK : fault->status,
        .message = ready ? "" : fault->message,
        .silent =
            !ready && (p->control->silent || p->control->state != CONNECTION_DOWN),
    };
    memcpy(info.world_id, hello->world_id, sizeof info.world_id);
    memcpy(info.incarnation, hello->incarnation, sizeof info.incarnation);
    return info;
}

fanin_status fanin_client_ranks(fanin_client *client, fanin_rank_fn fn, void *cookie,
                                fanin_error *error)
{
    fanin_status status = client_check_told(client, fn, error);
    for (size_t i = 0; status == FANIN_OK && i < client->n_peers; i++) {
        fanin_rank_info info = rank_describe(&client->peers[i]);
        if (!fn(cookie, &info))
            break;
    }
    return status;
}

/* ---------------------------------------------------- one request, all ranks */

static bool report_list(const peer *p, const answer *a, fanin_publication_fn fn,
                        void *cookie)
{
    for (uint32_t i = 0; i < a->count; i++) {
        const msg_list_entry *e = &a->entries[i];
        fanin_publication_info info = {
            .struct_size = sizeof info,
            .name = e->publication,
            .rank = p->control->peer.rank,
            .state = e->state,
            .step = e->step,
            .epoch = e->epoch,
            .catalog_version = e->catalog_version,
            .tensors = e->tensors,
            .bytes = e->bytes,
            .state_age_ms = e->state_age_ms,
            .commit_age_ms = e->commit_age_ms,
            .taken_back = e->taken_back,
            .patches = e->patches,
            .patch_bytes = e->patch_bytes,
        };
        memcpy(info.key_digest, e->key_digest, sizeof info.key_digest);
        if (!fn(cookie, &info))
            return false;
    }
    return true;
}

fanin_status fanin_client_list(fanin_client *client, uint32_t timeout_ms,
                               fanin_publication_fn fn, void *cookie,
                               fanin_error *error)
{
    fanin_status status = client_check_told(client, fn, error);
    if (status != FANIN_OK)
        return status;
    survey s = {.client = client, .type = MSG_LIST, .at = deadline_in_ms(timeout_ms)};
    status = survey_take(&s, error);
    bool more = status == FANIN_OK;
    for (size_t i = 0; i < client->n_peers && more; i++) {
        if (survey_answered(&s, i))
            more = report_list(&client->peers[i], &s.answers[i], fn, cookie);
    }
    survey_finish(&s);
    return status;
}

fanin_status fanin_client_ping(fanin_client *client, uint32_t timeout_ms,
                               fanin_ping_fn fn, void *cookie, fanin_error *error)
{
    fanin_status status = client_check_told(client, fn, error);
    if (status != FANIN_OK)
        return status;
    survey s = {.client = client, .type = MSG_PING, .at = deadline_in_ms(timeout_ms)};
    status = survey_take(&s, error);
    /* Ranks that do not belong together, or do not answer, are told all the same. */
    bool more = status != FANIN_ERR_CANCELLED && status != FANIN_ERR_MEMORY;
    for (size_t i = 0; i < client->n_peers && more; i++) {
        const answer *a = &s.answers[i];
        fanin_rank_info info = rank_describe(&client->peers[i]);
        more = fn(cookie, &info,
                  survey_answered(&s, i) ? a->answered_ns - a->asked_ns : 0);
    }
    survey_finish(&s);
    return status;
}

/* ---------------------------------------------------- statistics of ranks */

/* What ranks are at: their answers as the caller sees them. */

/* The caller gets pointers, so that structs may grow. */
typedef struct told {
    fanin_rank_stats stats;
    fanin_publication_stats entries[LIMIT_STATS];
    fanin_lease_holder holders[LIMIT_STATS];
    const fanin_publication_stats *entry_at[LIMIT_STATS];
    const fanin_lease_holder *holder_at[LIMIT_STATS];
    fanin_told_relay relays[LIMIT_STATS];
    const fanin_told_relay *relay_at[LIMIT_STATS];
} told;

static void copy_counters(fanin_rank_stats *out, const msg_stats_ok *m)
{
#define COPY(key, name, ...) out->name = m->name;
    COUNTERS(COPY, COUNTER_NOT_SHOWN, COPY)
#undef COPY
    for (size_t i = 0; i < FANIN_DRAIN_BUCKETS; i++)
        out->drain_waits[i] = m->drain_waits[i];
}

static void keep_relays(told *t, const msg_stats_ok *m)
{
    for (uint32_t i = 0; i < m->n_told_relays; i++) {
        const stats_relay *r = &m->told_relays[i];
        t->relays[i] =
            (fanin_told_relay){.struct_size = sizeof t->relays[i],
                               .publication = m->entries[r->publication].publication,
                               .address = r->address,
                               .place = r->place,
                               .step = r->step,
                               .units = r->units,
                               .landed = r->landed,
                               .bytes_origin = r->bytes_origin,
                               .bytes_relays = r->bytes_relays,
                               .bytes_handed_on = r->bytes_handed_on,
                               .late = r->late,
                               .taken_over = r->taken_over};
    }
    t->stats.n_told_relays = m->n_told_relays;
}

static void take_rank_stats(told *t, const msg_stats_ok *m)
{
    t->stats.counted = true;
    copy_counters(&t->stats, m);
    for (uint32_t i = 0; i < m->n_entries; i++) {
        const stats_entry *e = &m->entries[i];
        t->entries[i] = (fanin_publication_stats){.struct_size = sizeof t->entries[i],
                                                  .name = e->publication,
                                                  .state = e->state,
                                                  .step = e->step,
                                                  .state_age_ms = e->state_age_ms,
                                                  .commit_age_ms = e->commit_age_ms,
                                                  .update_age_ms = e->update_age_ms,
                                                  .leases = e->leases,
                                                  .lease_age_ms = e->lease_age_ms,
                                                  .pending = e->pending,
                                                  .reason = e->reason,
                                                  .bytes = e->bytes,
                                                  .bytes_left = e->bytes_left};
    }
    for (uint32_t i = 0; i < m->n_holders; i++) {
        const stats_holder *h = &m->holders[i];
        t->holders[i] =
            (fanin_lease_holder){.struct_size = sizeof t->holders[i],
                                 .publication = m->entries[h->publication].publication,
                                 .who = h->who,
                                 .leases = h->leases,
                                 .age_ms = h->age_ms,
                                 .held_up_ns = h->held_up_ns};
    }
    t->stats.n_entries = m->n_entries;
    t->stats.n_holders = m->n_holders;
    keep_relays(t, m);
}

static void take_listed(told *t, const answer *a)
{
    t->stats.publications = a->count;
    for (uint32_t i = 0; i < a->count && i < LIMIT_STATS; i++) {
        const msg_list_entry *e = &a->entries[i];
        t->entries[t->stats.n_entries++] =
            (fanin_publication_stats){.struct_size = sizeof *t->entries,
                                      .name = e->publication,
                                      .state = e->state,
                                      .step = e->step,
                                      .state_age_ms = e->state_age_ms,
                                      .commit_age_ms = e->commit_age_ms,
                                      .reason = ""};
    }
}

static const fanin_rank_stats *make_stats(told *t, const answer *a)
{
    t->stats = (fanin_rank_stats){.struct_size = sizeof t->stats,
                                  .rtt_ns = a->answered_ns - a->asked_ns,
                                  .entries = t->entry_at,
                                  .holders = t->holder_at,
                                  .told_relays = t->relay_at};
    if (a->entries)
        take_listed(t, a);
    else
        take_rank_stats(t, &a->stats);
    for (size_t i = 0; i < LIMIT_STATS; i++) {
        t->entry_at[i] = &t->entries[i];
        t->holder_at[i] = &t->holders[i];
        t->relay_at[i] = &t->relays[i];
    }
    return &t->stats;
}

fanin_status fanin_client_stats(fanin_client *client, const char *publication,
                                uint32_t timeout_ms, fanin_stats_fn fn, void *cookie,
                                fanin_error *error)
{
    fanin_status status = client_check_told(client, fn, error);
    if (status != FANIN_OK)
        return status;
    told *t = calloc(1, sizeof *t);
    if (!t)
        return error_set_memory(error);
    survey s = {.client = client,
                .type = MSG_STATS,
                .publication = publication,
                .at = deadline_in_ms(timeout_ms)};
    status = survey_take(&s, error);
    /* Ranks that do not belong together, or do not answer, are told all the same. */
    bool more =
        s.answers && status != FANIN_ERR_CANCELLED && status != FANIN_ERR_MEMORY;
    for (size_t i = 0; i < client->n_peers && more; i++) {
        fanin_rank_info info = rank_describe(&client->peers[i]);
        more = fn(cookie, &info,
                  survey_answered(&s, i) ? make_stats(t, &s.answers[i]) : NULL);
    }
    survey_finish(&s);
    free(t);
    return status;
}
