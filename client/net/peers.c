/* SPDX-License-Identifier: Apache-2.0 */
#include "net/client_state.h"

#include "error_set.h"
#include "net/client_rules.h"
#include "text.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef FANIN_TEST_HOOKS
atomic_uint client_rules_off;
#endif

fanin_status client_check(const fanin_client *client, fanin_error *error)
{
    if (!client)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "the client is NULL");
    if (client->pid != getpid()) {
        error_place place = {.remedy = "create a client of its own in the child"};
        return error_set(error, FANIN_ERR_FORKED, &place,
                         "the client belongs to the parent process %d",
                         (int)client->pid);
    }
    return FANIN_OK;
}

fanin_status client_check_connected(const fanin_client *client, fanin_error *error)
{
    fanin_status status = client_check(client, error);
    if (status != FANIN_OK)
        return status;
    if (client->session) {
        error_place place = {.remedy = "end or abandon the session first"};
        return error_set(error, FANIN_ERR_STATE, &place,
                         "a pull session of the client is open");
    }
    if (!client->connected) {
        error_place place = {.remedy = "call fanin_client_connect() first"};
        return error_set(error, FANIN_ERR_STATE, &place, "the client has no addresses");
    }
    return FANIN_OK;
}

fanin_status client_check_told(const fanin_client *client, bool told,
                               fanin_error *error)
{
    fanin_status status = client_check_connected(client, error);
    return status == FANIN_OK && !told
               ? error_set(error, FANIN_ERR_ARGUMENT, NULL, "there is no callback")
               : status;
}

/* ------------------------------------------------------------------ cancel */

fanin_status client_watch_cancel(fanin_client *client, fanin_error *error)
{
    fanin_status status = loop_source_wake(&client->cancel, error);
    return status == FANIN_OK ? loop_add(&client->loop, &client->cancel, error)
                              : status;
}

/* -------------------------------------------------------------------- loop */

deadline client_tick(fanin_client *client)
{
    deadline next = UINT64_MAX;
    for (size_t i = 0; i < client->n_peers; i++) {
        connection *c = client->peers[i].control;
        bool was_up = c->state != CONNECTION_DOWN;
        next = deadline_sooner(next, connection_tick(c));
        if (was_up && c->state == CONNECTION_DOWN)
            next = 0;
    }
    return next;
}

/* Of the ranks that are waited for the one that has been silent for longest. */
static const connection *find_owing(const fanin_client *client)
{
    const connection *found = NULL;
    for (size_t i = 0; i < client->n_peers; i++) {
        const connection *c = client->peers[i].control;
        if (connection_owes(c) && (!found || c->heard_ns < found->heard_ns))
            found = c;
    }
    return found;
}

static fanin_status out_of_time(const fanin_client *client, const char *phase,
                                fanin_error *error)
{
    error_place place = {.phase = phase};
    const connection *owing = find_owing(client);
    char who[CONNECTION_NAME];
    if (owing)
        place = connection_place(owing, phase);
    place.remedy =
        "allow more time, or look at the ranks with `nixl-fetch ping`; if all answer, "
        "do large packets get through (path MTU)?";
    if (!owing)
        return error_set(error, FANIN_ERR_TIMEOUT, &place,
                         "the deadline passed in phase %s", phase);
    return error_set(error, FANIN_ERR_TIMEOUT, &place,
                     "the deadline passed in phase %s, waiting for %s, last heard of "
                     "%.1f s ago",
                     phase, connection_name(owing, who),
                     (double)(clock_ns() - owing->heard_ns) / 1e9);
}

fanin_status client_step(fanin_client *client, deadline at, deadline wake,
                         const char *phase, fanin_error *error)
{
    error_place place = {.phase = phase};
    if (atomic_exchange(&client->cancelled, false))
        return error_set(error, FANIN_ERR_CANCELLED, &place, "the call was cancelled");
    if (deadline_passed(at))
        return out_of_time(client, phase, error);
    loop_step(&client->loop,
              deadline_sooner(deadline_sooner(at, wake), client_tick(client)));
    return FANIN_OK;
}

bool client_work_over(const client_work *w)
{
    return deadline_passed(w->at) || atomic_load(&w->client->cancelled);
}

static bool call_is_over(void *cookie)
{
    return client_work_over(cookie);
}

void client_work_start(client_work *w, fanin_client *client, deadline at)
{
    *w = (client_work){
        .stop = {.fn = call_is_over, .cookie = w}, .client = client, .at = at};
}

fanin_status client_work_end(const client_work *w, fanin_status status,
                             fanin_error *error)
{
    if (!w->stop.stopped || !atomic_exchange(&w->client->cancelled, false))
        return status;
    fanin_error broken_off = FANIN_ERROR_INIT;
    error_copy(&broken_off, error); /* says in which phase */
    error_place place = {.phase = broken_off.phase};
    return error_set(error, FANIN_ERR_CANCELLED, &place, "the call was cancelled");
}

fanin_status client_run(fanin_client *client, const size_t *left, deadline at,
                        const char *phase, fanin_error *error)
{
    while (*left > 0) {
        fanin_status status = client_step(client, at, UINT64_MAX, phase, error);
        if (status != FANIN_OK)
            return status;
        client_tick(client);
    }
    return FANIN_OK;
}

bool peer_ready(const peer *p)
{
    return p->control->state == CONNECTION_READY &&
           p->admitted == p->control->generation;
}

size_t client_count_ready(const fanin_client *client)
{
    size_t n = 0;
    for (size_t i = 0; i < client->n_peers; i++)
        n += peer_ready(&client->peers[i]);
    return n;
}

/* -------------------------------------------------------------------- names */

/* Kept free for " and 65536 more". */
#define ROOM_FOR_REST 24

static int compare_rank_numbers(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* Appends @p item after a comma; false: there is no room for it. */
static bool append_rank(text *t, bool first, const char *item)
{
    return text_add_whole(t, ROOM_FOR_REST, "%s%s", first ? "" : ", ", item);
}

/* @p ranks sorted; the number of them that found room. */
static size_t write_ranks(const uint32_t *ranks, size_t n, text *t)
{
    size_t written = 0;
    while (written < n) {
        size_t end = written + 1;
        char item[32];
        while (end < n && ranks[end] <= ranks[end - 1] + 1)
            end++;
        if (ranks[end - 1] > ranks[written])
            snprintf(item, sizeof item, "%u-%u", ranks[written], ranks[end - 1]);
        else
            snprintf(item, sizeof item, "%u", ranks[written]);
        if (!append_rank(t, written == 0, item))
            break;
        written = end;
    }
    return written;
}

static size_t write_addresses(const fanin_client *client, const bool *mask,
                              bool nothing_before, text *t)
{
    size_t written = 0;
    for (size_t i = 0; i < client->n_peers; i++) {
        const connection *c = client->peers[i].control;
        if (!mask[i] || c->known)
            continue;
        if (!append_rank(t, nothing_before && written == 0, c->text))
            break;
        written++;
    }
    return written;
}

void rank_list_text(const fanin_client *client, const bool *mask, char *out,
                    size_t size)
{
    size_t n = 0, all = 0;
    const connection *last = NULL;
    uint32_t *ranks = calloc(client->n_peers + 1, sizeof *ranks);
    for (size_t i = 0; i < client->n_peers; i++) {
        const connection *c = client->peers[i].control;
        if (!mask[i])
            continue;
        all++;
        last = c;
        if (ranks && c->known)
            ranks[n++] = c->peer.rank;
    }
    text t = text_in(out, size);
    if (all == 1 || !ranks) {
        char who[CONNECTION_NAME];
        text_add(&t, "%s", last ? connection_name(last, who) : "");
        free(ranks);
        return;
    }
    if (n > 0) {
        qsort(ranks, n, sizeof *ranks, compare_rank_numbers);
        text_add(&t, "rank%s ", n == 1 ? "" : "s");
    }
    size_t written = write_ranks(ranks, n, &t);
    if (written == n)
        written += write_addresses(client, mask, n == 0, &t);
    free(ranks);
    if (written < all)
        text_add(&t, " and %zu more", all - written);
}

/* -------------------------------------------------------------------- trace */

void span_of_call(const fanin_client *client, trace_name name, uint64_t began,
                  fanin_status outcome, const char *about)
{
    if (!trace_on())
        return;
    trace_span span = trace_span_of(name, began, outcome, about);
    span.place = client->place;
    trace_add(&span);
}

static trace_span of_connection(const connection *c, const trace_place *place,
                                trace_name name, uint64_t began, fanin_status outcome)
{
    trace_span span = trace_span_of(name, began, outcome, c->text);
    span.rank = c->known ? (int32_t)c->peer.rank : trace_unknown_rank(c->text);
    span.place = *place;
    return span;
}

void span_of_rank(const fanin_client *client, size_t peer, trace_name name,
                  uint64_t began, uint64_t ended, uint64_t bytes, fanin_status outcome)
{
    if (!trace_on())
        return;
    trace_span span = of_connection(client->peers[peer].control, &client->place, name,
                                    began, outcome);
    span.ended_ns = ended;
    span.bytes = bytes;
    trace_add(&span);
}

void span_of_connection(const connection *c, const trace_place *place, trace_name name,
                        uint64_t began, fanin_status outcome)
{
    if (!trace_on())
        return;
    trace_span span = of_connection(c, place, name, began, outcome);
    trace_add(&span);
}

/* --------------------------------------------------------------- what ranks have */

/* Groups of ranks that a sentence names; the first is the culprit's. */
#define TOLD_GROUPS 3

/* ------------------------------------------------------------------ asking */

typedef struct question {
    size_t *left;
    rank_status *of;
} question;

static void on_listed(void *cookie, connection *c, message_type type, body *b)
{
    question *q = cookie;
    msg_list_entry *entries = NULL;
    uint32_t count = 0;
    (void)c;
    --*q->left;
    if (type != MSG_LIST_OK || decode_list_ok(b, &entries, &count) != FANIN_OK)
        return;
    *q->of = (rank_status){.answered = true};
    if (count > 0) {
        q->of->present = true;
        q->of->state = entries[0].state;
        q->of->age_ms = entries[0].state_age_ms;
        q->of->step = entries[0].step;
        q->of->version = entries[0].catalog_version;
        memcpy(q->of->keys, entries[0].key_digest, sizeof q->of->keys);
    }
    free(entries);
}

fanin_status rank_status_ask(fanin_client *client, const char *publication, deadline at,
                             rank_status *out, fanin_error *error)
{
    size_t left = 0;
    question *questions = calloc(client->n_peers, sizeof *questions);
    if (!questions)
        return error_set_memory(error);
    for (size_t i = 0; i < client->n_peers; i++) {
        connection *c = client->peers[i].control;
        out[i] = (rank_status){0};
        if (!peer_ready(&client->peers[i]))
            continue;
        questions[i] = (question){.left = &left, .of = &out[i]};
        left++;
        encode_list(connection_out(c), c->next_request, publication);
        connection_ask(c, on_listed, &questions[i]);
    }
    fanin_error why = FANIN_ERROR_INIT;
    fanin_status status = client_run(client, &left, at, "wait", &why);
    for (size_t i = 0; i < client->n_peers; i++)
        connection_forget(client->peers[i].control, &questions[i]);
    free(questions);
    if (status == FANIN_OK || status == FANIN_ERR_TIMEOUT)
        return FANIN_OK;
    return error_copy(error, &why);
}

/* ----------------------------------------------------------------- telling */

/* How much a rank is to blame; the smaller, the more. */
typedef struct blame {
    enum { GONE, SILENT, BEHIND } what;
    uint64_t step;
    int32_t state;
    uint64_t age_ms;
    size_t peer;
} blame;

static int compare_statuses(const void *a, const void *b)
{
    const blame *x = a, *y = b;
    if (x->what != y->what)
        return x->what < y->what ? -1 : 1;
    if (x->step != y->step)
        return x->step < y->step ? -1 : 1;
    if (x->state != y->state)
        return x->state < y->state ? -1 : 1;
    return (x->peer > y->peer) - (x->peer < y->peer);
}

/* Whether one sentence does for both; of those that are gone each has its own. */
static bool alike(const blame *x, const blame *y)
{
    return x->what == y->what && x->what != GONE && x->step == y->step &&
           x->state == y->state;
}

/* Whether it can be read at that step or a later one. */
static bool reaches(const rank_status *of, uint64_t step)
{
    return of->answered && of->present && of->state == FANIN_PUBLICATION_STABLE &&
           of->step >= step && of->step > 0;
}

static size_t find_blame(const fanin_client *client, const rank_status *all,
                         uint64_t step, blame *out)
{
    size_t n = 0;
    bool answered = false, gone = false;
    for (size_t i = 0; i < client->n_peers; i++) {
        answered = answered || all[i].answered;
        gone = gone || !peer_ready(&client->peers[i]);
    }
    for (size_t i = 0; i < client->n_peers; i++) {
        const rank_status *s = &all[i];
        bool ready = peer_ready(&client->peers[i]);
        if (ready && gone && !answered)
            continue; /* there was no time to answer: who is gone used it up */
        if (ready && reaches(s, step))
            continue;
        out[n++] = (blame){.what = !ready         ? GONE
                                   : !s->answered ? SILENT
                                                  : BEHIND,
                           .step = ready && s->answered ? s->step : 0,
                           .state = ready && s->answered && s->present ? s->state : -1,
                           .age_ms = s->age_ms,
                           .peer = i};
    }
    qsort(out, n, sizeof *out, compare_statuses);
    return n;
}

static const char *status_word(int32_t state)
{
    static const char *const names[] = {"unpublished", "stable", "draining", "writing",
                                        "paused"};
    return state >= 0 && state < (int32_t)(sizeof names / sizeof *names) ? names[state]
                                                                         : "unknown";
}

static double heard_seconds_ago(const fanin_client *client, size_t peer)
{
    uint64_t heard = client->peers[peer].control->heard_ns;
    return (double)(clock_ns() - heard) / 1e9;
}

static void tell_group(const fanin_client *client, const blame *first,
                       const char *ranks, bool many, char *text, size_t size)
{
    const char *is = many ? "are" : "is", *has = many ? "have" : "has";
    if (first->what == GONE)
        snprintf(text, size, "%.180s",
                 client->peers[first->peer].control->fault.message);
    else if (first->what == SILENT)
        snprintf(text, size, "%s %s not answered, last heard of %.1f s ago", ranks, has,
                 heard_seconds_ago(client, first->peer));
    else if (first->state < 0)
        snprintf(text, size, "%s %s not publish it", ranks, many ? "do" : "does");
    else if (first->step == 0)
        snprintf(text, size, "%s %s not committed it yet (%s)", ranks, has,
                 status_word(first->state));
    else if (first->state == FANIN_PUBLICATION_STABLE || first->age_ms == 0)
        snprintf(text, size, "%s %s at step %" PRIu64 " (%s)", ranks, is, first->step,
                 status_word(first->state));
    else
        snprintf(text, size, "%s %s at step %" PRIu64 " (%s for %.1f s)", ranks, is,
                 first->step, status_word(first->state), (double)first->age_ms / 1e3);
}

static void tell_status(const fanin_client *client, const blame *blames, size_t n,
                        bool *mask, char *out, size_t size)
{
    size_t told = 0;
    text t = text_in(out, size);
    for (size_t group = 0; told < n && group < TOLD_GROUPS; group++) {
        char ranks[100], sentence[192];
        size_t first = told;
        memset(mask, 0, client->n_peers * sizeof *mask);
        while (told < n && (told == first || alike(&blames[first], &blames[told])))
            mask[blames[told++].peer] = true;
        rank_list_text(client, mask, ranks, sizeof ranks);
        tell_group(client, &blames[first], ranks, told - first > 1, sentence,
                   sizeof sentence);
        text_add(&t, "%s%s", group ? "; " : "", sentence);
    }
    if (told < n)
        text_add(&t, "; and %zu more ranks", n - told);
}

size_t rank_status_text(const fanin_client *client, const rank_status *all,
                        uint64_t step, char *text, size_t size)
{
    blame *blames = calloc(client->n_peers, sizeof *blames);
    bool *mask = calloc(client->n_peers, sizeof *mask);
    size_t first = client->n_peers;
    text[0] = '\0';
    if (blames && mask) {
        size_t n = find_blame(client, all, step, blames);
        first = n > 0 ? blames[0].peer : first;
        tell_status(client, blames, n, mask, text, size);
    }
    free(blames);
    free(mask);
    return first;
}
