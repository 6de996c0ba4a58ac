/* SPDX-License-Identifier: Apache-2.0 */
/* Following the steps that all ranks commit. */
#include "catalog/survey.h"
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
    int32_t state;
    uint64_t state_step, since_ns; /* 0: since when is not known */
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
    /* what to do while nothing happens */
    fanin_quiet_fn quiet;
    uint64_t quiet_ns, quiet_since;
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

static void on_world_change(void *cookie, connection *c, message_type type, body *b)
{
    rank_view *v = cookie;
    msg_event e;
    if (type != MSG_EVENT || decode_event(b, &e) != FANIN_OK) {
        v->error = (fanin_error)FANIN_ERROR_INIT;
        connection_reply_error(c, "watch", type, b, &v->error);
        v->watch->failed = true;
        return;
    }
    if (e.state != v->state || e.step != v->state_step) {
        v->state = e.state;
        v->state_step = e.step;
        v->since_ns = clock_ns();
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
        if (w->ranks[i].error.status != FANIN_OK)
            return error_copy(error, &w->ranks[i].error);
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

static bool report_change(const fanin_client *client, const watch *w, uint64_t step,
                          uint64_t newest, fanin_watch_fn fn, void *cookie)
{
    size_t slot = step % REMEMBERED;
    fanin_watch_event event = {.struct_size = sizeof event,
                               .step = step,
                               .step_newest = newest,
                               .slowest_rank = -1};
    if (w->arrivals[slot].step == step) {
        event.spread_ns = w->arrivals[slot].last_ns - w->arrivals[slot].first_ns;
        event.slowest_rank =
            (int32_t)client->peers[w->arrivals[slot].last_peer].control->peer.rank;
    }
    return fn(cookie, &event);
}

static uint64_t ms_since(uint64_t ns)
{
    return (clock_ns() - ns) / 1000000 + 1;
}

/* What the ranks are doing while no step comes. False: the caller has seen enough. */
static bool report_quiet(const fanin_client *client, const watch *w, void *cookie)
{
    fanin_rank_state *states = calloc(w->n, sizeof *states);
    if (!states)
        return true; /* it is said the next time */
    for (size_t i = 0; i < w->n; i++) {
        const rank_view *v = &w->ranks[i];
        const connection *c = client->peers[i].control;
        states[i] = (fanin_rank_state){
            .struct_size = sizeof states[i],
            .rank = c->peer.rank,
            .address = c->text,
            .state = v->state,
            .step = v->state_step,
            .state_age_ms = v->since_ns ? ms_since(v->since_ns) : 0,
        };
    }
    bool more = w->quiet(cookie, ms_since(w->quiet_since) - 1, states, w->n);
    free(states);
    return more;
}

/* From the last step on. */
static void tell_trace(const fanin_client *client, const watch *w, uint64_t step)
{
    if (!trace_on())
        return;
    trace_span span = trace_span_of(TRACE_WAIT, w->quiet_since, FANIN_OK, NULL);
    span.place = client->place;
    span.step = step;
    trace_add(&span);
}

static fanin_status follow_world(fanin_client *client, watch *w, deadline at,
                                 fanin_watch_fn fn, void *cookie, fanin_error *error)
{
    uint64_t reported = 0;
    deadline speak = w->quiet ? clock_ns() + w->quiet_ns : UINT64_MAX;
    w->quiet_since = clock_ns();
    for (;;) {
        uint64_t newest, step = common_step(w, &newest);
        bool more = true;
        if (step > reported) {
            reported = step;
            tell_trace(client, w, step);
            more = report_change(client, w, step, newest, fn, cookie);
            w->quiet_since = clock_ns();
            speak = w->quiet ? w->quiet_since + w->quiet_ns : UINT64_MAX;
        } else if (w->quiet && deadline_passed(speak)) {
            more = report_quiet(client, w, cookie);
            speak = clock_ns() + w->quiet_ns;
        }
        if (!more)
            return FANIN_OK;
        fanin_status status = first_failure(w, error);
        if (status == FANIN_OK)
            status = client_step(client, at, speak, "watch", error);
        if (status != FANIN_OK)
            return status;
    }
}

/* ---------------------------------------------------------------- beginning */

/* Adds a name, unless it is there or does not fit. */
static void add_name(char *names, size_t size, const char *name)
{
    size_t used = strlen(names), length = strlen(name);
    const char *at = strstr(names, name);
    while (at && at[length] != ',' && at[length] != '\0')
        at = strstr(at + 1, name);
    if (!at && used + length + 3 < size)
        snprintf(names + used, size - used, "%s%s", used ? ", " : "", name);
}

/* The rank's first view: since when it is in its state only a list tells. */
static bool take_entries(rank_view *v, const answer *a, const char *publication,
                         char *names, size_t size)
{
    bool found = false;
    for (uint32_t i = 0; i < a->count; i++) {
        const msg_list_entry *e = &a->entries[i];
        if (e->catalog_version > 0)
            add_name(names, size, e->publication);
        if (strcmp(e->publication, publication) != 0)
            continue;
        found = true;
        v->state = e->state;
        v->state_step = e->step;
        v->since_ns = e->state_age_ms ? clock_ns() - e->state_age_ms * 1000000 : 0;
    }
    return found;
}

static fanin_status take_watched_list(watch *w, const survey *s,
                                      const char *publication, fanin_error *error)
{
    char names[300] = "";
    bool found = false;
    for (size_t i = 0; i < w->n; i++) {
        const answer *a = &s->answers[i];
        if (!survey_answered(s, i))
            return error_copy(error, &a->error);
        found |= take_entries(&w->ranks[i], a, publication, names, sizeof names);
    }
    error_place place = {
        .phase = "watch", .key = publication, .remedy = "check the name of the run"};
    if (found || !names[0])
        return FANIN_OK;
    return error_set(error, FANIN_ERR_NOT_FOUND, &place,
                     "no rank publishes %s; they publish %s", publication, names);
}

/* Every rank has to be there, and one of them has to have the publication, unless nothing is
   published yet. */
static fanin_status look_for_changes(fanin_client *client, watch *w,
                                     const char *publication, deadline at,
                                     fanin_error *error)
{
    deadline patience = deadline_in_ms(client->config.connect_timeout_ms);
    survey s = {
        .client = client, .type = MSG_LIST, .at = deadline_sooner(at, patience)};
    fanin_status status = survey_take(&s, error);
    if (status == FANIN_OK)
        status = take_watched_list(w, &s, publication, error);
    survey_finish(&s);
    return status;
}

static fanin_status start_watch(fanin_client *client, watch *w, const char *publication,
                                fanin_error *error)
{
    msg_watch m;
    if (!publication || strlen(publication) >= sizeof m.publication)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "the publication's name is missing or too long");
    snprintf(m.publication, sizeof m.publication, "%s", publication);
    for (size_t i = 0; i < client->n_peers; i++) {
        connection *c = client->peers[i].control;
        w->ranks[i].watch = w;
        if (!peer_ready(&client->peers[i]))
            return error_copy(error, &c->fault);
        encode_watch(connection_out(c), c->next_request, &m);
        connection_ask(c, on_world_change, &w->ranks[i]);
        connection_keep(c, &w->ranks[i]);
    }
    return FANIN_OK;
}

fanin_status fanin_client_follow(fanin_client *client, const char *publication,
                                 uint32_t timeout_ms, fanin_watch_fn fn,
                                 uint32_t quiet_ms, fanin_quiet_fn quiet, void *cookie,
                                 fanin_error *error)
{
    fanin_status status = client_check_told(client, fn, error);
    if (status != FANIN_OK)
        return status;
    if (!publication || (quiet && quiet_ms == 0))
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "the publication's name is missing, or quiet_ms is 0");
    deadline at = deadline_in_ms(timeout_ms);
    watch w = {
        .n = client->n_peers, .quiet = quiet, .quiet_ns = (uint64_t)quiet_ms * 1000000};
    w.ranks = calloc(w.n, sizeof *w.ranks);
    if (!w.ranks)
        return error_set_memory(error);
    status = look_for_changes(client, &w, publication, at, error);
    if (status == FANIN_OK)
        status = start_watch(client, &w, publication, error);
    if (status == FANIN_OK)
        status = follow_world(client, &w, at, fn, cookie, error);
    /* The protocol has no "stop watching": a connection that watched is given up. */
    fanin_error done = FANIN_ERROR_INIT;
    error_set(&done, FANIN_ERR_CLOSED, NULL, "the watch ended");
    for (size_t i = 0; i < client->n_peers; i++) {
        connection_forget(client->peers[i].control, &w.ranks[i]);
        if (w.ranks[i].watch)
            connection_fail(client->peers[i].control, &done);
    }
    free(w.ranks);
    return status;
}

fanin_status fanin_client_watch(fanin_client *client, const char *publication,
                                uint32_t timeout_ms, fanin_watch_fn fn, void *cookie,
                                fanin_error *error)
{
    return fanin_client_follow(client, publication, timeout_ms, fn, 0, NULL, cookie,
                               error);
}
