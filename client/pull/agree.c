/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/pull.h"

#include "error_set.h"
#include "net/client_state.h"
#include "plan/plan.h"
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Ranks commit at about the same time; replicas that lag more than this are done without. */
#define GRACE_MS 50
/* Without one that a delta's base has, all is read anew: that takes longer. */
#define DELTA_GRACE_MS 1000
/* How long ranks may take to say where they are, and after how long they are asked again if that
   did not tell whether they can do without one that is gone. */
#define ANSWER_MS 500
#define AGAIN_MS 1000
/* Kept of the pull's time, if it is that long, for finding out who is behind. */
#define LOOK_MS 250
/* A rank's word that its time is up may be so much before that. */
#define EARLY_WORD_MS 100
/* What a rank is given at once: a wait that nobody waits for any more is to end some time. */
#define GIVEN_MOST_MS 3600000

typedef struct asker {
    struct agreement *agreement;
    size_t peer;
    bool waiting, lost;
    uint64_t least; /* the step that was asked for, or a later one */
    uint64_t request, asked_ns;
    uint32_t given_ms;    /* the time that it was given to answer */
    uint64_t kept_ms;     /* of the pull's, for when that is over */
    bool is_hasty;        /* it did not take half of what it was given last */
    uint64_t begins;      /* the catalog of which a lease was asked for; 0: none was */
    fanin_status refused; /* the rank's own error, other than a lost connection */
    fanin_error error;
} asker;

typedef struct agreement {
    fanin_client *client;
    publication *publication;
    const fanin_pull_options *options;
    const agree_need *need; /* NULL: nobody says what is needed */
    early_begin *early;     /* NULL: leases are not asked for, or not any more */
    deadline give_back;     /* when leases end that came early; UINT64_MAX: none did */
    deadline at;
    announcement *announced;
    bool *use;
    asker *askers;
    rank_status *statuses; /* asked when ranks are lost, or time is short */
    bool time_is_up;       /* a rank has said so */
    uint64_t target;       /* the furthest step that a rank announces which is there */
    deadline grace; /* when a sufficient set is enough; UINT64_MAX: not yet running */
    size_t changes; /* replies so far: an insufficient set is judged once */
    size_t judged;
    size_t gone;   /* ranks that are not there */
    deadline look; /* when to judge whether the others can do without them */
} agreement;

/* ------------------------------------------------------------ early leases */

/* False: it was not asked for, or not of this catalog. */
static bool take_lease(asker *a, connection *c, const msg_wait_ok *m)
{
    agreement *g = a->agreement;
    if (m->token.size == 0)
        return true;
    if (a->begins == 0 || m->catalog_version != a->begins)
        return false;
    if (!g->early) { /* too late: the others' have been given back */
        lease_refuse(c, m->token.data);
        return true;
    }
    reader_lease *lease = &g->early->leases[a->peer];
    *lease = (reader_lease){.held = true,
                            .lease_ms = m->lease_ms,
                            .first_region = m->first_region,
                            .generation = c->generation};
    memcpy(lease->token, m->token.data, sizeof lease->token);
    if (g->give_back == UINT64_MAX) {
        g->early->since_ns = clock_ns();
        g->give_back = deadline_in_ms(EARLY_MS);
    }
    return true;
}

/* The copy of a lease that came with them is the one that they lead to. */
static void take_patches(asker *a, const msg_wait_ok *m, announcement *n)
{
    const agreement *g = a->agreement;
    if (!g->need || !g->need->deltas || !patch_offers_decode(m->patches, &n->patches))
        return;
    if (g->early && m->token.size > 0)
        g->early->leases[a->peer].epoch = n->patches.generation;
}

/* What it had asked has an end. */
static void wait_ended(const asker *a, const connection *c, fanin_status outcome)
{
    span_of_connection(c, &a->agreement->client->place, TRACE_WAIT, a->asked_ns,
                       outcome);
}

/* A lease that the answer may still bring is given back before it is there. */
static void stop_asking(agreement *g, size_t peer)
{
    asker *a = &g->askers[peer];
    connection *c = g->client->peers[peer].control;
    connection_forget(c, a);
    if (a->waiting)
        wait_ended(a, c, FANIN_ERR_TIMEOUT);
    if (a->waiting && a->begins && peer_ready(&g->client->peers[peer]))
        lease_refuse_begun(c, a->request);
    a->waiting = false;
}

/* None is asked for again in this agreement. */
static void give_leases_back(agreement *g)
{
    if (!g->early || !deadline_passed(g->give_back))
        return;
    lease_round_abandon(g->client, g->early->leases);
    g->early->since_ns = 0;
    g->early = NULL;
    g->give_back = UINT64_MAX;
}

/* Only ranks that are used are begun. */
static void keep_used(agreement *g, bool agreed)
{
    for (size_t i = 0; g->early && i < g->client->n_peers; i++) {
        if (!agreed || !g->use[i])
            lease_give_back(g->client, i, &g->early->leases[i]);
    }
}

/* ------------------------------------------------------------------ asking */

/* A rank whose time is up is asked again as long as the pull has time: a rank is not given more
   than an hour at once, and the clock of a host that stood still meanwhile is behind the rank's.
   Who does not wait at all would be asked for ever. */
static fanin_status take_timeout(asker *a, connection *c)
{
    uint64_t waited_ms = (clock_ns() - a->asked_ns) / 1000000;
    uint64_t left_ms = deadline_left_ns(a->agreement->at) / 1000000;
    bool was_hasty = a->is_hasty;
    a->is_hasty = waited_ms < a->given_ms / 2;
    if (left_ms <= a->kept_ms + EARLY_WORD_MS)
        return FANIN_ERR_TIMEOUT;
    if (!was_hasty || !a->is_hasty)
        return FANIN_OK;
    error_place place = connection_place(c, "wait");
    place.key = a->agreement->publication->name;
    place.remedy = "use the same fanin release on both ends";
    return error_set(&a->error, FANIN_ERR_PROTOCOL, &place,
                     "rank %u at %s says that its time is up after %" PRIu64
                     " ms of the %" PRIu32 " ms that it was given, twice",
                     c->peer.rank, c->text, waited_ms, a->given_ms);
}

static void take_announcement(asker *a, connection *c, message_type type, body *b)
{
    announcement *n = &a->agreement->announced[a->peer];
    msg_wait_ok m;
    a->waiting = false;
    a->agreement->changes++;
    if (type == MSG_WAIT_OK && decode_wait_ok(b, &m) == FANIN_OK) {
        if (m.step < a->least) {
            error_place place = connection_place(c, "wait");
            place.key = a->agreement->publication->name;
            place.remedy = "use the same fanin release on both ends";
            a->refused = error_set(&a->error, FANIN_ERR_PROTOCOL, &place,
                                   "rank %u at %s announced step %" PRIu64
                                   " when asked for step %" PRIu64 " or later",
                                   c->peer.rank, c->text, m.step, a->least);
            return;
        }
        if (!take_lease(a, c, &m)) {
            error_place place = connection_place(c, "wait");
            a->refused = error_set(&a->error, FANIN_ERR_PROTOCOL, &place,
                                   "rank %u at %s granted a lease that it was not "
                                   "asked for",
                                   c->peer.rank, c->text);
            return;
        }
        *n = (announcement){.valid = true,
                            .step = m.step,
                            .version = m.catalog_version,
                            .stable_ns = m.stable_ns,
                            .digest_bytes = m.digest_bytes};
        memcpy(n->keys.bytes, m.key_digest, sizeof n->keys.bytes);
        take_patches(a, &m, n);
        return;
    }
    a->lost = type == 0;
    fanin_status status = connection_reply_error(c, "wait", type, b, &a->error);
    if (status == FANIN_ERR_TIMEOUT && !a->lost)
        status = take_timeout(a, c);
    a->refused = a->lost ? FANIN_OK : status;
}

static void on_announced(void *cookie, connection *c, message_type type, body *b)
{
    asker *a = cookie;
    take_announcement(a, c, type, b);
    wait_ended(a, c, a->lost ? FANIN_ERR_CLOSED : a->error.status);
}

/* The least step that does now. */
static uint64_t wanted(const agreement *g)
{
    uint64_t asked = g->options->rule == FANIN_STEP_NEWEST ? 0 : g->options->step;
    bool exact = g->options->rule == FANIN_STEP_EXACT;
    return exact || asked > g->target ? asked : g->target;
}

/* A rank's "not yet" should come before this side gives up, with time to look around. */
static void give_time(asker *a)
{
    uint64_t left = deadline_left_ns(a->agreement->at) / 1000000;
    a->kept_ms = left / 20;
    if (a->kept_ms < LOOK_MS)
        a->kept_ms = left / 4 < LOOK_MS ? left / 4 : LOOK_MS;
    left -= a->kept_ms;
    a->given_ms = left < GIVEN_MOST_MS ? (uint32_t)left : GIVEN_MOST_MS;
}

static void ask_rank(asker *a)
{
    agreement *g = a->agreement;
    connection *c = g->client->peers[a->peer].control;
    msg_wait m = {.rule = g->options->rule,
                  .step = wanted(g),
                  .deltas = g->need && g->need->deltas};
    if (g->options->rule != FANIN_STEP_EXACT && g->target > 0)
        m.rule = FANIN_STEP_AT_LEAST;
    snprintf(m.publication, sizeof m.publication, "%s", g->publication->name);
    give_time(a);
    m.timeout_ms = a->given_ms;
    a->least = m.step;
    a->begins = m.begin_version = g->early ? g->early->versions[a->peer] : 0;
    a->request = c->next_request;
    encode_wait(connection_out(c), c->next_request, &m);
    a->waiting = true;
    a->error = (fanin_error)FANIN_ERROR_INIT;
    a->asked_ns = clock_ns();
    connection_ask(c, on_announced, a);
}

/* Asks whoever has nothing, or less than the furthest rank, to announce (again), and whoever was
   asked for the step of a rank that is gone by now. */
static void ask_those_behind(agreement *g)
{
    for (size_t i = 0; i < g->client->n_peers; i++) {
        asker *a = &g->askers[i];
        if (a->lost || a->refused || !peer_ready(&g->client->peers[i]) ||
            (a->waiting && a->least <= wanted(g)))
            continue;
        if (g->announced[i].valid && g->announced[i].step >= g->target)
            continue;
        if (a->waiting)
            stop_asking(g, i);
        if (g->early)
            lease_give_back(g->client, i, &g->early->leases[i]);
        g->announced[i].valid = false;
        ask_rank(a);
    }
}

/* What a rank has announced ends with it. */
static void find_target(agreement *g)
{
    g->target = 0;
    for (size_t i = 0; i < g->client->n_peers; i++) {
        announcement *n = &g->announced[i];
        n->valid = n->valid && peer_ready(&g->client->peers[i]);
        if (!n->valid && g->early)
            g->early->leases[i].held = false;
        if (n->valid && n->step > g->target)
            g->target = n->step;
    }
}

/* It names one of those that say so: of replicas others may still have the step. */
static fanin_status superseded(const agreement *g, fanin_error *error)
{
    error_place place = {.phase = "wait",
                         .key = g->publication->name,
                         .remedy = "ask for the newest step or for a least step"};
    size_t i = 0;
    while (i < g->client->n_peers &&
           !(g->announced[i].valid && g->announced[i].step == g->target))
        i++;
    if (i < g->client->n_peers && peer_ready(&g->client->peers[i]))
        place.rank_plus_1 = (int32_t)g->client->peers[i].control->peer.rank + 1;
    return error_set(error, FANIN_ERR_SUPERSEDED, &place,
                     "step %" PRIu64
                     " of %s has passed: the trainer is at step %" PRIu64,
                     g->options->step, g->publication->name, g->target);
}

/* An answer that no waiting can mend. */
static fanin_status check_refusals(const agreement *g, fanin_error *error)
{
    for (size_t i = 0; i < g->client->n_peers; i++) {
        const asker *a = &g->askers[i];
        if (a->refused && a->refused != FANIN_ERR_TIMEOUT &&
            a->refused != FANIN_ERR_PAUSED)
            return error_copy(error, &a->error);
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

/* Marks the ranks that announced the target; how many they are. */
static size_t mark_target(agreement *g)
{
    size_t marked = 0;
    for (size_t i = 0; i < g->client->n_peers; i++) {
        g->use[i] = g->announced[i].valid && g->announced[i].step == g->target &&
                    peer_ready(&g->client->peers[i]);
        marked += g->use[i];
    }
    return marked;
}

static bool nobody_waits(const agreement *g)
{
    for (size_t i = 0; i < g->client->n_peers; i++) {
        if (g->askers[i].waiting)
            return false;
    }
    return true;
}

fanin_status agree_sufficient(fanin_client *client, const publication *p,
                              const bool *use, deadline at, bool *enough,
                              fanin_error *error)
{
    plan_source *sources = calloc(client->n_peers, sizeof *sources);
    if (!sources)
        return error_set_memory(error);
    for (size_t i = 0; i < client->n_peers; i++) {
        if (use[i])
            sources[i] =
                (plan_source){client->peers[i].control->peer.rank, p->shards[i].boxes};
    }
    client_work work;
    client_work_start(&work, client, at);
    plan_rules rules = {.keys = &p->wanted, .stop = &work.stop};
    *enough = plan_sufficient(p->keys, sources, client->n_peers, use, &rules);
    free(sources);
    return FANIN_OK;
}

static bool is_gone(const fanin_client *client, const bool *use, size_t peer)
{
    return !use[peer] && !peer_ready(&client->peers[peer]);
}

bool agree_suffice(fanin_client *client, const publication *p, const bool *use,
                   deadline at)
{
    bool enough = false;
    return agree_sufficient(client, p, use, at, &enough, NULL) == FANIN_OK && enough;
}

size_t agree_culprit(fanin_client *client, const publication *p, const bool *use,
                     deadline at)
{
    size_t n = client->n_peers, first = n, unknown = n, needed = n;
    bool *held =
        calloc(n, sizeof *held); /* of those in use, and of those that are gone */
    for (size_t i = n; i-- > 0;) {
        if (held)
            held[i] = use[i] || (is_gone(client, use, i) && tables_at_hand(p, i));
        if (!is_gone(client, use, i))
            continue;
        first = i;
        unknown = tables_at_hand(p, i) ? unknown : i;
    }
    if (!held || first == n || !p->keys || !agree_suffice(client, p, held, at)) {
        free(held);
        return unknown < n ? unknown : first;
    }
    /* Whoever can be done without is, one after the other: who is left is needed. */
    for (size_t i = 0; i < n; i++) {
        if (!is_gone(client, use, i) || !held[i])
            continue;
        held[i] = false;
        held[i] = !agree_suffice(client, p, held, at);
        needed = held[i] && needed == n ? i : needed;
    }
    free(held);
    return needed < n ? needed : first;
}

/* Whether the marked ranks hold everything; needs their box tables. */
static fanin_status judge(agreement *g, bool *enough, fanin_error *error)
{
    *enough = false;
    fanin_status status =
        tables_sync(g->client, g->publication, g->announced, g->use, g->at, error);
    if (status != FANIN_OK)
        return status;
    return agree_sufficient(g->client, g->publication, g->use, g->at, enough, error);
}

/* A rank is paused, which waiting does not mend: the marked ones suffice, or the pull is over.
   Those that have not answered yet are given the time that replicas are given to catch up. */
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
    return error_copy(error, &paused->error);
}

/* The tables that the ranks which are there have now; false: some have none yet. */
static bool take_catalogs(const agreement *g, announcement *now, bool *use)
{
    for (size_t i = 0; i < g->client->n_peers; i++) {
        const rank_status *s = &g->statuses[i];
        use[i] = peer_ready(&g->client->peers[i]);
        if (use[i] && s->version == 0)
            return false;
        now[i] =
            (announcement){.valid = use[i], .step = s->step, .version = s->version};
        memcpy(now[i].keys.bytes, s->keys, sizeof s->keys);
    }
    return true;
}

/* Ranks are gone and the others wait for a step: an error if they would wait in vain, because
   nobody else holds what the ranks held. By the catalogs of now; *known false: not all have one. */
static fanin_status do_without(agreement *g, bool *known, fanin_error *error)
{
    fanin_client *client = g->client;
    fanin_error why = FANIN_ERROR_INIT;
    announcement *now = calloc(client->n_peers, sizeof *now);
    bool *use = calloc(client->n_peers, sizeof *use);
    bool vain = false;
    fanin_status status =
        now && use ? rank_status_ask(client, g->publication->name,
                                     deadline_sooner(g->at, deadline_in_ms(ANSWER_MS)),
                                     g->statuses, &why)
                   : error_set_memory(&why);
    *known = status == FANIN_OK && take_catalogs(g, now, use);
    if (*known)
        status = tables_sync(client, g->publication, now, use, g->at, &why);
    /* Without a rank that is left, and without one that ever told, nothing is known. */
    *known = *known && status == FANIN_OK && g->publication->keys;
    if (*known)
        status = g->need->without(g->need->cookie, use, &vain, &why);
    free(now);
    free(use);
    if (!vain && status != FANIN_ERR_CANCELLED && status != FANIN_ERR_MEMORY)
        return FANIN_OK;
    error_copy(error, &why);
    return status;
}

static fanin_status look_for_gone(agreement *g, fanin_error *error)
{
    size_t gone = g->client->n_peers - client_count_ready(g->client);
    if (!g->need || gone == 0)
        return FANIN_OK;
    if (gone != g->gone)
        g->look = deadline_in_ms(GRACE_MS);
    g->gone = gone;
    if (!deadline_passed(g->look))
        return FANIN_OK;
    bool known;
    fanin_status status = do_without(g, &known, error);
    g->look = known ? UINT64_MAX : deadline_in_ms(AGAIN_MS);
    return status;
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
    size_t marked = mark_target(g);
    *agreed = marked == g->client->n_peers;
    const asker *paused = find_paused(g);
    if (paused)
        return decide_without(g, paused, marked, agreed, error);
    if (*agreed)
        return FANIN_OK;
    if (!nobody_waits(g))
        status = look_for_gone(g, error);
    if (status != FANIN_OK || marked == 0)
        return status;
    if (nobody_waits(g)) {
        /* The others are down: the plan proves or disproves that these suffice. */
        bool behind = false;
        for (size_t i = 0; i < g->client->n_peers; i++)
            behind = behind || (!g->use[i] && peer_ready(&g->client->peers[i]));
        *agreed = !behind;
        return FANIN_OK;
    }
    if (g->grace == UINT64_MAX)
        g->grace =
            deadline_in_ms(g->need && g->need->deltas ? DELTA_GRACE_MS : GRACE_MS);
    if (!deadline_passed(g->grace) || g->judged == g->changes)
        return FANIN_OK;
    g->judged = g->changes;
    return judge(g, agreed, error);
}

/* A rank's time is up, so the pull's is nearly: there is just enough to ask where all are. */
static fanin_status look_around(agreement *g, fanin_error *error)
{
    bool up = false;
    for (size_t i = 0; i < g->client->n_peers; i++)
        up = up || g->askers[i].refused == FANIN_ERR_TIMEOUT;
    if (!up || g->time_is_up)
        return FANIN_OK;
    g->time_is_up = true;
    return rank_status_ask(g->client, g->publication->name,
                           clock_ns() + deadline_left_ns(g->at) / 4 * 3, g->statuses,
                           error);
}

static fanin_status explain_timeout(const agreement *g, fanin_error *error)
{
    const fanin_client *client = g->client;
    char who[400];
    uint64_t step = wanted(g) ? wanted(g) : 1;
    bool committed = true;
    for (size_t i = 0; i < client->n_peers; i++) {
        if (g->announced[i].valid &&
            (!g->statuses[i].answered || g->announced[i].step > g->statuses[i].step))
            g->statuses[i] = (rank_status){.answered = true,
                                           .present = true,
                                           .state = FANIN_PUBLICATION_STABLE,
                                           .step = g->announced[i].step};
        committed = committed && g->statuses[i].present && g->statuses[i].step >= step;
    }
    size_t culprit = rank_status_text(client, g->statuses, step, who, sizeof who);
    error_place place = {.phase = "wait"};
    if (culprit < client->n_peers)
        place = connection_place(client->peers[culprit].control, "wait");
    place.key = g->publication->name;
    place.remedy = "is the trainer stuck, or further behind than this pull may wait?";
    return error_set(
        error, FANIN_ERR_TIMEOUT, &place, "%s%" PRIu64 " of %.80s %s in time%s%s",
        wanted(g) ? "step " : "a step, at least ", step, g->publication->name,
        committed ? "could not be read" : "was not committed on all ranks",
        who[0] ? ": " : "", who);
}

/* Nobody is asked any more, and nothing was agreed upon. */
static fanin_status explain_silence(const agreement *g, fanin_error *error)
{
    const fanin_client *client = g->client;
    const fanin_error *fault = &client->peers[0].control->fault;
    if (g->time_is_up)
        return explain_timeout(g, error);
    for (size_t i = client->n_peers; i-- > 0;) {
        if (!peer_ready(&client->peers[i]))
            fault = &client->peers[i].control->fault;
    }
    return error_copy(error, fault);
}

static fanin_status wait_for_agreement(agreement *g, fanin_error *error)
{
    for (;;) {
        give_leases_back(g);
        ask_those_behind(g);
        bool agreed;
        size_t changes = g->changes;
        fanin_status status = decide(g, &agreed, error);
        if (status != FANIN_OK || agreed)
            return status;
        ask_those_behind(g); /* the target may have changed */
        status = look_around(g, error);
        if (status == FANIN_OK && g->changes != changes)
            continue; /* ranks have answered while tables or statuses were asked for */
        if (status == FANIN_OK && nobody_waits(g))
            return explain_silence(g, error);
        deadline wake = deadline_passed(g->grace) ? UINT64_MAX : g->grace;
        wake = deadline_sooner(deadline_sooner(wake, g->look), g->give_back);
        if (status == FANIN_OK)
            status = client_step(g->client, g->at, wake, "wait", error);
        if (status == FANIN_ERR_TIMEOUT)
            return explain_timeout(g, error);
        if (status != FANIN_OK)
            return status;
    }
}

fanin_status agree(fanin_client *client, publication *p,
                   const fanin_pull_options *options, const agree_need *need,
                   early_begin *early, deadline at, announcement *announced, bool *use,
                   fanin_error *error)
{
    agreement g = {.client = client,
                   .publication = p,
                   .options = options,
                   .need = need,
                   .early = early,
                   .give_back = UINT64_MAX,
                   .at = at,
                   .announced = announced,
                   .use = use,
                   .grace = UINT64_MAX,
                   .look = UINT64_MAX};
    g.askers = calloc(client->n_peers, sizeof *g.askers);
    g.statuses = calloc(client->n_peers, sizeof *g.statuses);
    if (!g.askers || !g.statuses) {
        free(g.askers);
        free(g.statuses);
        return error_set_memory(error);
    }
    for (size_t i = 0; i < client->n_peers; i++) {
        g.askers[i] = (asker){.agreement = &g, .peer = i};
        announced[i] = (announcement){0};
        use[i] = false;
    }
    fanin_status status = wait_for_agreement(&g, error);
    for (size_t i = 0; i < client->n_peers; i++)
        stop_asking(&g, i);
    keep_used(&g, status == FANIN_OK);
    free(g.askers);
    free(g.statuses);
    return status;
}
