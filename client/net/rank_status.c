/* SPDX-License-Identifier: Apache-2.0 */
#include "net/rank_status.h"

#include "error_set.h"
#include "net/client_state.h"
#include "text.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
