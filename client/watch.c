/* SPDX-License-Identifier: Apache-2.0 */
/* Following the steps that all ranks commit. */
#include "client_state.h"
#include "error_set.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Steps for which it is remembered when the first rank committed them. */
#define REMEMBERED 64

typedef struct rank_view {
    struct watch *watch;
    uint64_t step;
    bool seen;
    fanin_status status;
    fanin_error error;
} rank_view;

typedef struct watch {
    rank_view *ranks;
    size_t n;
    struct {
        uint64_t step, first_ns, last_ns;
        size_t last_peer;
    } arrivals[REMEMBERED];
    bool failed;
} watch;

static void note_arrival(watch *w, size_t peer, uint64_t step)
{
    uint64_t now = clock_ns();
    size_t slot = step % REMEMBERED;
    if (w->arrivals[slot].step != step || w->arrivals[slot].first_ns == 0) {
        w->arrivals[slot].step = step;
        w->arrivals[slot].first_ns = now;
    }
    w->arrivals[slot].last_ns = now;
    w->arrivals[slot].last_peer = peer;
}

static void on_event(void *cookie, connection *c, message_type type, body *b)
{
    rank_view *v = cookie;
    msg_event e;
    if (type != MSG_EVENT || decode_event(b, &e) != FANIN_OK) {
        v->error = (fanin_error)FANIN_ERROR_INIT;
        v->status = connection_reply_error(c, "watch", type, b, &v->error);
        v->watch->failed = true;
        return;
    }
    if (e.state != FANIN_PUBLICATION_STABLE || (v->seen && e.step <= v->step))
        return;
    v->seen = true;
    v->step = e.step;
    note_arrival(v->watch, (size_t)(v - v->watch->ranks), e.step);
}

static fanin_status first_failure(const watch *w, fanin_error *error)
{
    for (size_t i = 0; i < w->n; i++) {
        if (w->ranks[i].status != FANIN_OK) {
            error_copy(error, &w->ranks[i].error);
            return w->ranks[i].status;
        }
    }
    return FANIN_OK;
}

/* The step that every rank has reached; 0: none yet. */
static uint64_t common_step(const watch *w, uint64_t *newest)
{
    uint64_t least = UINT64_MAX;
    *newest = 0;
    for (size_t i = 0; i < w->n; i++) {
        if (!w->ranks[i].seen)
            return 0;
        least = w->ranks[i].step < least ? w->ranks[i].step : least;
        *newest = w->ranks[i].step > *newest ? w->ranks[i].step : *newest;
    }
    return least;
}

static bool report(const fanin_client *client, const watch *w, uint64_t step,
                   uint64_t newest, fanin_watch_fn fn, void *cookie)
{
    size_t slot = step % REMEMBERED;
    fanin_watch_event event = {.struct_size = sizeof(event),
                               .step = step,
                               .step_newest = newest,
                               .slowest_rank = -1};
    if (w->arrivals[slot].step == step) {
        event.spread_ns = w->arrivals[slot].last_ns - w->arrivals[slot].first_ns;
        event.slowest_rank =
            (int32_t)connection_peer(client->peers[w->arrivals[slot].last_peer].control)
                ->rank;
    }
    return fn(cookie, &event);
}

static fanin_status follow(fanin_client *client, watch *w, deadline at,
                           fanin_watch_fn fn, void *cookie, fanin_error *error)
{
    uint64_t reported = 0;
    for (;;) {
        uint64_t newest, step = common_step(w, &newest);
        if (step > reported) {
            reported = step;
            if (!report(client, w, step, newest, fn, cookie))
                return FANIN_OK;
        }
        fanin_status status = first_failure(w, error);
        if (status == FANIN_OK)
            status = client_step(client, at, UINT64_MAX, "watch", error);
        if (status != FANIN_OK)
            return status;
    }
}

static fanin_status start(fanin_client *client, watch *w, const char *publication,
                          fanin_error *error)
{
    msg_watch m;
    if (!publication || strlen(publication) >= sizeof(m.publication))
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "the publication's name is missing or too long");
    snprintf(m.publication, sizeof(m.publication), "%s", publication);
    for (size_t i = 0; i < client->n_peers; i++) {
        connection *c = client->peers[i].control;
        w->ranks[i].watch = w;
        if (!peer_ready(&client->peers[i])) {
            error_copy(error, connection_fault(c));
            return connection_fault(c)->status;
        }
        uint64_t request = connection_next_request(c);
        encode_watch(connection_out(c), request, &m);
        connection_ask(c, request, on_event, &w->ranks[i]);
        connection_keep(c, request);
    }
    return FANIN_OK;
}

fanin_status fanin_client_watch(fanin_client *client, const char *publication,
                                uint32_t timeout_ms, fanin_watch_fn fn, void *cookie,
                                fanin_error *error)
{
    deadline at;
    fanin_status status = client_enter(client, timeout_ms, &at, error);
    if (status != FANIN_OK)
        return status;
    watch w = {.n = client->n_peers};
    w.ranks = calloc(w.n, sizeof(*w.ranks));
    if (!w.ranks)
        return error_set_memory(error);
    status = start(client, &w, publication, error);
    if (status == FANIN_OK)
        status = follow(client, &w, at, fn, cookie, error);
    /* The protocol has no "stop watching": a connection that watched is given up. */
    fanin_error done = FANIN_ERROR_INIT;
    error_set(&done, FANIN_ERR_CLOSED, NULL, "the watch ended");
    for (size_t i = 0; i < client->n_peers; i++) {
        connection_forget(client->peers[i].control, &w.ranks[i]);
        connection_fail(client->peers[i].control, &done);
    }
    free(w.ranks);
    return status;
}
