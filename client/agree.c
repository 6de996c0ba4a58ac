/* SPDX-License-Identifier: Apache-2.0 */
#include "agree.h"

#include "error_set.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Ranks commit at about the same time; replicas that lag more than this are done without. */
#define GRACE_MS 50

typedef struct asker {
    struct agreement *agreement;
    size_t peer;
    bool waiting, lost;
    uint64_t least;       /* the step that was asked for, or a later one */
    fanin_status refused; /* the rank's own error, other than a lost connection */
    fanin_error error;
} asker;

typedef struct agreement {
    fanin_client *client;
    publication *publication;
    const fanin_pull_options *options;
    deadline at;
    announcement *announced;
    bool *use;
    asker *askers;
    uint64_t target; /* least step that is asked for now */
    deadline grace;  /* when a sufficient set is enough; UINT64_MAX: not yet running */
    size_t changes;  /* replies so far: an insufficient set is judged once */
    size_t judged;
} agreement;

static void on_announced(void *cookie, connection *c, message_type type, body *b)
{
    asker *a = cookie;
    announcement *n = &a->agreement->announced[a->peer];
    msg_wait_ok m;
    a->waiting = false;
    a->agreement->changes++;
    if (type == MSG_WAIT_OK && decode_wait_ok(b, &m) == FANIN_OK) {
        if (m.step < a->least) {
            error_place place = connection_place(c, "wait");
            place.key = a->agreement->publication->name;
            place.remedy = "use the same fanin release on both ends";
            a->refused = error_set(
                &a->error, FANIN_ERR_PROTOCOL, &place,
                "rank %u at %s announced step %llu when asked for step %llu or later",
                connection_peer(c)->rank, connection_text(c),
                (unsigned long long)m.step, (unsigned long long)a->least);
            return;
        }
        *n = (announcement){.valid = true,
                            .step = m.step,
                            .version = m.catalog_version,
                            .stable_ns = m.stable_ns};
        memcpy(n->keys.bytes, m.key_digest, sizeof(n->keys.bytes));
        return;
    }
    a->lost = type == 0;
    fanin_status status = connection_reply_error(c, "wait", type, b, &a->error);
    a->refused = a->lost ? FANIN_OK : status;
}

static void ask(asker *a)
{
    agreement *g = a->agreement;
    connection *c = g->client->peers[a->peer].control;
    msg_wait m = {.rule = g->options->rule, .step = g->options->step};
    if (g->options->rule != FANIN_STEP_EXACT && g->target > 0) {
        m.rule = FANIN_STEP_AT_LEAST;
        m.step = g->target;
    }
    snprintf(m.publication, sizeof(m.publication), "%s", g->publication->name);
    /* The rank's "not yet, I am at step 7" should come before this side gives up. */
    uint64_t left_ms = deadline_left_ns(g->at) / 1000000;
    m.timeout_ms = left_ms > 3600000 ? 3600000 : (uint32_t)(left_ms - left_ms / 20);
    a->least = m.rule == FANIN_STEP_NEWEST ? 0 : m.step;
    uint64_t request = connection_next_request(c);
    encode_wait(connection_out(c), request, &m);
    a->waiting = true;
    a->error = (fanin_error)FANIN_ERROR_INIT;
    connection_ask(c, request, on_announced, a);
}

/* Asks whoever has nothing, or less than the furthest rank, to announce (again). */
static void ask_those_behind(agreement *g)
{
    for (size_t i = 0; i < g->client->n_peers; i++) {
        asker *a = &g->askers[i];
        if (a->waiting || a->lost || a->refused || !peer_ready(&g->client->peers[i]))
            continue;
        if (g->announced[i].valid && g->announced[i].step >= g->target)
            continue;
        g->announced[i].valid = false;
        ask(a);
    }
}

static void find_target(agreement *g)
{
    for (size_t i = 0; i < g->client->n_peers; i++) {
        if (g->announced[i].valid && g->announced[i].step > g->target)
            g->target = g->announced[i].step;
    }
}

static fanin_status superseded(const agreement *g, fanin_error *error)
{
    error_place place = {.phase = "wait",
                         .key = g->publication->name,
                         .remedy = "ask for the newest step or for a least step"};
    return error_set(error, FANIN_ERR_SUPERSEDED, &place,
                     "step %llu of %s has passed: the trainer is at step %llu",
                     (unsigned long long)g->options->step, g->publication->name,
                     (unsigned long long)g->target);
}

/* An answer that no waiting can mend. */
static fanin_status check_refusals(const agreement *g, fanin_error *error)
{
    for (size_t i = 0; i < g->client->n_peers; i++) {
        const asker *a = &g->askers[i];
        if (a->refused && a->refused != FANIN_ERR_TIMEOUT &&
            a->refused != FANIN_ERR_PAUSED) {
            error_copy(error, &a->error);
            return a->refused;
        }
    }
    return FANIN_OK;
}

/* The first rank that is paused, NULL: none. */
static const asker *find_paused(const agreement *g)
{
    for (size_t i = 0; i < g->client->n_peers; i++) {
        if (g->askers[i].refused == FANIN_ERR_PAUSED)
            return &g->askers[i];
    }
    return NULL;
}

/* Marks the ranks that announced the target; true: that is every rank of the world. */
static bool mark(agreement *g, size_t *marked_out)
{
    size_t marked = 0;
    for (size_t i = 0; i < g->client->n_peers; i++) {
        g->use[i] = g->announced[i].valid && g->announced[i].step == g->target &&
                    peer_ready(&g->client->peers[i]);
        marked += g->use[i];
    }
    *marked_out = marked;
    return marked == g->client->n_peers;
}

static bool nobody_waits(const agreement *g)
{
    for (size_t i = 0; i < g->client->n_peers; i++) {
        if (g->askers[i].waiting)
            return false;
    }
    return true;
}

/* Whether the marked ranks hold everything; needs their box tables. */
static fanin_status judge(agreement *g, bool *enough, fanin_error *error)
{
    fanin_client *client = g->client;
    *enough = false;
    fanin_status status =
        tables_sync(client, g->publication, g->announced, g->use, g->at, error);
    if (status != FANIN_OK)
        return status;
    plan_source *sources = calloc(client->n_peers, sizeof(*sources));
    bool *use = calloc(client->n_peers, sizeof(*use));
    if (!sources || !use) {
        free(sources);
        free(use);
        return error_set_memory(error);
    }
    size_t n = 0;
    for (size_t i = 0; i < client->n_peers; i++) {
        if (!g->use[i])
            continue;
        use[n] = true;
        sources[n++] = (plan_source){connection_peer(client->peers[i].control)->rank,
                                     g->publication->shards[i].boxes};
    }
    *enough = plan_sufficient(g->publication->keys, sources, n, use);
    free(sources);
    free(use);
    return FANIN_OK;
}

/* A rank is paused, which waiting does not mend: the marked ones suffice, or the pull is over. Those
   that have not answered yet are given the time that replicas are given to catch up. */
static fanin_status decide_without(agreement *g, const asker *paused, size_t marked,
                                   bool *agreed, fanin_error *error)
{
    if (g->grace == UINT64_MAX)
        g->grace = deadline_in_ms(GRACE_MS);
    if (!nobody_waits(g) && !deadline_passed(g->grace))
        return FANIN_OK;
    fanin_status status = marked > 0 ? judge(g, agreed, error) : FANIN_OK;
    if (status != FANIN_OK || *agreed)
        return status;
    error_copy(error, &paused->error);
    return FANIN_ERR_PAUSED;
}

/* FANIN_OK and *agreed: the marked ranks are the ones to read. */
static fanin_status decide(agreement *g, bool *agreed, fanin_error *error)
{
    *agreed = false;
    fanin_status status = check_refusals(g, error);
    if (status != FANIN_OK)
        return status;
    find_target(g);
    if (g->options->rule == FANIN_STEP_EXACT && g->target > g->options->step)
        return superseded(g, error);
    size_t marked;
    *agreed = mark(g, &marked);
    const asker *paused = find_paused(g);
    if (paused)
        return decide_without(g, paused, marked, agreed, error);
    if (*agreed || marked == 0)
        return FANIN_OK;
    if (nobody_waits(g)) {
        /* The others are down: the plan proves or disproves that these suffice. */
        bool behind = false;
        for (size_t i = 0; i < g->client->n_peers; i++)
            behind = behind || (!g->use[i] && peer_ready(&g->client->peers[i]));
        *agreed = !behind;
        return FANIN_OK;
    }
    if (g->grace == UINT64_MAX)
        g->grace = deadline_in_ms(GRACE_MS);
    if (!deadline_passed(g->grace) || g->judged == g->changes)
        return FANIN_OK;
    g->judged = g->changes;
    return judge(g, agreed, error);
}

static void append(char *text, size_t size, const char *format, ...)
{
    size_t used = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + used, size - used, format, arguments);
    va_end(arguments);
}

static fanin_status explain_timeout(const agreement *g, fanin_error *error)
{
    char who[400] = "";
    int32_t first = -1;
    size_t index = 0;
    for (size_t i = 0; i < g->client->n_peers; i++) {
        const asker *a = &g->askers[i];
        const connection *c = g->client->peers[i].control;
        if (g->announced[i].valid && g->announced[i].step >= g->target && g->target > 0)
            continue;
        if (first < 0) {
            first = connection_known(c) ? (int32_t)connection_peer(c)->rank : -1;
            index = i;
        }
        const char *what = a->error.message[0] ? a->error.message : NULL;
        if (strlen(who) > 250) {
            append(who, sizeof(who), " ...");
            break;
        }
        if (what)
            append(who, sizeof(who), "; %.180s", what);
        else
            append(who, sizeof(who), "; rank %u at %s did not commit it",
                   connection_peer(c)->rank, connection_text(c));
    }
    error_place place = connection_place(g->client->peers[index].control, "wait");
    place.key = g->publication->name;
    place.remedy = "is the trainer stuck, or further behind than this pull may wait?";
    place.rank_plus_1 = first + 1;
    uint64_t step = g->target > g->options->step ? g->target : g->options->step;
    return error_set(error, FANIN_ERR_TIMEOUT, &place,
                     "%s%llu of %s was not committed on all ranks in time%s",
                     step ? "step " : "a step, at least ",
                     (unsigned long long)(step ? step : 1), g->publication->name, who);
}

static fanin_status wait_for_agreement(agreement *g, fanin_error *error)
{
    for (;;) {
        ask_those_behind(g);
        bool agreed;
        fanin_status status = decide(g, &agreed, error);
        if (status != FANIN_OK || agreed)
            return status;
        ask_those_behind(g); /* the target may have grown */
        if (nobody_waits(g)) {
            for (size_t i = 0; i < g->client->n_peers; i++) {
                if (g->askers[i].refused == FANIN_ERR_TIMEOUT)
                    return explain_timeout(g, error);
            }
            const fanin_error *fault = connection_fault(g->client->peers[0].control);
            for (size_t i = 0; i < g->client->n_peers; i++) {
                if (!peer_ready(&g->client->peers[i]))
                    fault = connection_fault(g->client->peers[i].control);
            }
            error_copy(error, fault);
            return fault->status;
        }
        deadline wake = deadline_passed(g->grace) ? UINT64_MAX : g->grace;
        status = client_step(g->client, g->at, wake, "wait", error);
        if (status == FANIN_ERR_TIMEOUT)
            return explain_timeout(g, error);
        if (status != FANIN_OK)
            return status;
    }
}

fanin_status agree(fanin_client *client, publication *p,
                   const fanin_pull_options *options, deadline at,
                   announcement *announced, bool *use, fanin_error *error)
{
    agreement g = {.client = client,
                   .publication = p,
                   .options = options,
                   .at = at,
                   .announced = announced,
                   .use = use,
                   .grace = UINT64_MAX};
    g.askers = calloc(client->n_peers, sizeof(*g.askers));
    if (!g.askers)
        return error_set_memory(error);
    for (size_t i = 0; i < client->n_peers; i++) {
        g.askers[i] = (asker){.agreement = &g, .peer = i};
        announced[i] = (announcement){0};
        use[i] = false;
    }
    fanin_status status = wait_for_agreement(&g, error);
    for (size_t i = 0; i < client->n_peers; i++)
        connection_forget(client->peers[i].control, &g.askers[i]);
    free(g.askers);
    return status;
}
