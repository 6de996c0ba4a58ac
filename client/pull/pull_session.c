/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/pull_session.h"

#include "delta/delta.h"
#include "error_set.h"
#include "pull/pull.h"
#include <stdlib.h>
#include <unistd.h>

/* A rank closes what is silent for minutes (server.h, idle_ms), and one-sided reads say nothing. */
#define SILENT_NS (UINT64_C(30) * 1000 * 1000 * 1000)

struct fanin_session {
    pid_t pid;
    fanin_client *client; /* NULL: its connections are gone, and the pull with them */
    fanin_pull_options options;
    destination destination;
    pull pull;
    size_t count;                /* tensors */
    confirmation *confirmations; /* that are not answered yet */
    fanin_error failed; /* its status: FANIN_OK, or why nothing can be read any more */
};

/* ----------------------------------------------------------------- life cycle */

/* Leases are given back, and the client may be used otherwise. */
static void close_pull(fanin_session *s)
{
    if (!s->client)
        return;
    lease_confirm_forget(s->client, &s->confirmations);
    pull_release(&s->pull);
    delta_base_release(s->destination.base);
    s->client->session = NULL;
    s->client = NULL;
}

fanin_status pull_session_open(fanin_client *client, const fanin_pull_options *options,
                               const destination *d, size_t count, fanin_session **out,
                               fanin_error *error)
{
    fanin_session *s = calloc(1, sizeof *s);
    if (!s)
        return error_set_memory(error);
    *s = (fanin_session){.pid = client->pid,
                         .client = client,
                         .options = *options,
                         .destination = *d,
                         .count = count,
                         .failed = FANIN_ERROR_INIT};
    s->pull = (pull){.client = client,
                     .options = &s->options,
                     .destination = &s->destination,
                     .session = true};
    (void)delta_base_retain(d->base);
    fanin_status status = pull_open(&s->pull, error);
    if (status == FANIN_OK)
        status = pull_go(&s->pull, PULL_HELD, error);
    pull_ended(&s->pull, TRACE_OPEN, status, error);
    if (status != FANIN_OK) {
        close_pull(s);
        free(s);
        return status;
    }
    s->options.publication = s->pull.publication->name; /* the caller's may go */
    client->session = s;
    *out = s;
    return FANIN_OK;
}

const uint8_t *pull_session_token(const fanin_session *s, size_t peer)
{
    return s->pull.leases[peer].token;
}

bool pull_session_is_linked(const fanin_session *s)
{
    const pull *p = &s->pull;
    bool linked = false;
    for (size_t i = 0; s->client && i < s->client->n_peers; i++)
        linked =
            linked || (p->needed[i] && path_taken(p->publication, i)->path->is_linked);
    return linked;
}

void pull_session_orphan(fanin_client *client)
{
    fanin_session *s = client->session;
    error_place place = {.remedy = "end sessions before the client is disconnected"};
    if (!s)
        return;
    close_pull(s);
    if (s->failed.status == FANIN_OK)
        error_set(&s->failed, FANIN_ERR_STATE, &place,
                  "the session's client was disconnected");
}

static fanin_status check_session(const fanin_session *s, fanin_error *error)
{
    error_place place = {.remedy = "begin a session of its own in the child"};
    if (!s)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "the session is NULL");
    if (s->pid == getpid())
        return FANIN_OK;
    return error_set(error, FANIN_ERR_FORKED, &place,
                     "the session belongs to the parent process %d", (int)s->pid);
}

/* ----------------------------------------------------------------------- reading */

/* Whoever is needed at the end must have been there all the time: a lease goes with its connection.
   */
static fanin_status look_at_ranks(fanin_session *s, fanin_error *error)
{
    fanin_client *client = s->client;
    uint64_t now = clock_ns();
    fanin_status status = client_step(client, s->pull.at, 0, "read", error);
    for (size_t i = 0; i < client->n_peers && status == FANIN_OK; i++) {
        connection *c = client->peers[i].control;
        if (!s->pull.needed[i])
            continue;
        if (!peer_ready(&client->peers[i]))
            return error_copy(error, &c->fault);
        if (now - c->heard_ns < SILENT_NS)
            continue;
        encode_empty(connection_out(c), c->next_request, MSG_PING);
        connection_ask(c, NULL, NULL); /* it is told, and not waited for */
    }
    return status;
}

/* What is read, and how. */
typedef struct session_read {
    const group_run *runs;
    size_t n_runs;
    bool keep, only_verify;
} session_read;

static fanin_status find_part(fanin_session *s, const session_read *r,
                              fanin_error *error)
{
    pull *p = &s->pull;
    uint64_t began = clock_ns();
    client_work work;
    client_work_start(&work, s->client, p->at);
    fanin_status status = plan_cache_part(p->cache, r->runs, r->n_runs, r->keep,
                                          s->count, &work.stop, &p->part, error);
    p->result->info.plan_ns += clock_ns() - began;
    return client_work_end(&work, status, error);
}

/* The session goes on, or has failed. */
static fanin_status read_session_part(fanin_session *s, const session_read *r)
{
    fanin_error why = FANIN_ERROR_INIT;
    fanin_status status = look_at_ranks(s, &why);
    if (status == FANIN_OK)
        status = find_part(s, r, &why);
    if (status != FANIN_OK)
        return pull_overtaken(&s->pull, &why, &s->failed);
    s->pull.only_verify = r->only_verify;
    s->pull.state = PULL_DETAIL;
    return pull_go(&s->pull, PULL_HELD, &s->failed);
}

static fanin_status check_runs(const fanin_session *s, const session_read *r,
                               fanin_error *error)
{
    size_t end = 0;
    for (size_t i = 0; i < r->n_runs; i++) {
        size_t first = r->runs[i].first, count = r->runs[i].count;
        if (first > s->count || count > s->count - first)
            return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                             "there are no %zu tensors from number %zu on: the session "
                             "has %zu",
                             count, first, s->count);
        if (first < end)
            return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                             "tensor number %zu is named twice, or out of order",
                             first);
        end = first + count;
    }
    return FANIN_OK;
}

static fanin_status read_session(fanin_session *session, const session_read *r,
                                 fanin_error *error)
{
    fanin_status status = check_session(session, error);
    if (status != FANIN_OK)
        return status;
    if (session->failed.status != FANIN_OK)
        return error_copy(error, &session->failed);
    status = check_runs(session, r, error);
    if (status != FANIN_OK || read_session_part(session, r) == FANIN_OK)
        return status;
    lease_round_abandon(session->client, session->pull.leases);
    return error_copy(error, &session->failed);
}

fanin_status fanin_session_read(fanin_session *session, size_t first, size_t count,
                                fanin_error *error)
{
    const group_run run = {first, count};
    return read_session(session, &(session_read){&run, 1, .keep = true}, error);
}

fanin_status pull_session_read(fanin_session *s, const group_run *runs, size_t n_runs,
                               fanin_error *error)
{
    return read_session(s, &(session_read){.runs = runs, .n_runs = n_runs}, error);
}

fanin_status pull_session_verify(fanin_session *s, const group_run *runs, size_t n_runs,
                                 fanin_error *error)
{
    return read_session(s, &(session_read){runs, n_runs, .only_verify = true}, error);
}

static fanin_status confirm_session(fanin_session *s)
{
    pull *p = &s->pull;
    fanin_error why = FANIN_ERROR_INIT;
    fanin_status status = look_at_ranks(s, &why);
    if (status == FANIN_OK)
        status = lease_round_confirm(p, &why);
    return status == FANIN_OK ? FANIN_OK : pull_overtaken(p, &why, &s->failed);
}

fanin_status fanin_session_confirm(fanin_session *session, fanin_error *error)
{
    fanin_status status = check_session(session, error);
    if (status != FANIN_OK)
        return status;
    if (session->failed.status == FANIN_OK && confirm_session(session) == FANIN_OK)
        return FANIN_OK;
    if (session->client)
        lease_round_abandon(session->client, session->pull.leases);
    return error_copy(error, &session->failed);
}

fanin_status pull_session_confirm_later(fanin_session *s, confirmed_fn fn, void *cookie,
                                        fanin_error *error)
{
    pull *p = &s->pull;
    if (s->failed.status != FANIN_OK)
        return error_copy(error, &s->failed);
    fanin_status status = look_at_ranks(s, error);
    return status == FANIN_OK
               ? lease_confirm_later(p, fn, cookie, &s->confirmations, error)
               : status;
}

uint64_t fanin_session_step(const fanin_session *session)
{
    return session ? session->pull.identity.step : 0;
}

/* ------------------------------------------------------------------------ ending */

void fanin_session_abandon(fanin_session **session)
{
    if (!session || !*session)
        return;
    fanin_session *s = *session;
    *session = NULL;
    if (s->pid != getpid())
        return;
    close_pull(s);
    free(s);
}

void pull_session_leave(fanin_session **session, fanin_result **result_out)
{
    fanin_session *s = *session;
    pull *p = &s->pull;
    if (s->client && s->failed.status == FANIN_OK) {
        lease_round_leave(p);
        p->result->info.bytes = p->bytes;
        p->result->info.tensors = p->tensors;
        if (result_out &&
            result_finish(p->result, s->client, p->publication, NULL) == FANIN_OK) {
            *result_out = p->result;
            p->result = NULL;
        }
    }
    fanin_session_abandon(session);
}

fanin_status fanin_session_end(fanin_session **session, fanin_result **result_out,
                               fanin_error *error)
{
    fanin_session *s = session ? *session : NULL;
    fanin_status status = check_session(s, error);
    if (status == FANIN_ERR_FORKED)
        *session = NULL;
    if (status != FANIN_OK)
        return status;
    pull *p = &s->pull;
    p->state = PULL_END;
    if (s->failed.status != FANIN_OK)
        status = error_copy(error, &s->failed);
    else
        status = pull_go(p, PULL_DONE, error);
    if (s->client) /* and not of one that is gone */
        pull_log_whole(p, status, error);
    trace_settle(status);
    if (status == FANIN_OK && result_out) {
        *result_out = p->result;
        p->result = NULL;
    }
    fanin_session_abandon(session);
    return status;
}
