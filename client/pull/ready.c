/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/pull.h"

#include "device/devices.h"
#include "error_set.h"
#include "stream/stream_link.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Why the connection is not there, and that nobody else holds @p key ("": not known). */
static fanin_status blame_connection(const connection *c, const char *key,
                                     fanin_error *error)
{
    const fanin_error *fault = &c->fault;
    error_place place = connection_place(c, "connect");
    place.key = key;
    place.remedy = fault->remedy;
    place.sys_errno = fault->sys_errno;
    fanin_status status = fault->status ? fault->status : FANIN_ERR_UNREACHABLE;
    return error_set(error, status, &place, "%s%s%s", fault->message,
                     *key ? "; no other rank holds " : "", key);
}

/* So long others are preferred to a rank that a pull has lost: it may answer what it is asked, and
   serve nothing. */
#define LOST_NS (UINT64_C(10) * 1000 * 1000 * 1000)

static bool just_lost(const peer *of)
{
    return of->lost_ns > 0 && clock_ns() - of->lost_ns < LOST_NS;
}

/* There is nothing to try again: who can't be connected has had its time. */
static void end_if_unreachable(pull *p, fanin_status status)
{
    if (status == FANIN_ERR_UNREACHABLE)
        p->state = PULL_FAILED;
}

/* Without the ranks that were lost just now, if the others have everything; else all are as good.
 */
static fanin_status prefer_others(pull *p, fanin_error *error)
{
    fanin_client *client = p->client;
    bool lost = false, enough = false;
    bool *others = calloc(client->n_peers, sizeof *others);
    if (!others)
        return error_set_memory(error);
    for (size_t i = 0; i < client->n_peers; i++) {
        bool is_lost = p->use[i] && just_lost(&client->peers[i]);
        others[i] = p->use[i] && !is_lost;
        lost = lost || is_lost;
    }
    fanin_status status = FANIN_OK;
    if (lost)
        status =
            agree_sufficient(client, p->publication, others, p->at, &enough, error);
    for (size_t i = 0; i < client->n_peers && lost && status == FANIN_OK; i++) {
        p->use[i] = enough ? others[i] : p->use[i];
        if (!enough)
            client->peers[i].lost_ns = 0;
    }
    free(others);
    return status;
}

/* ----------------------------------------------------------------- connect */

/* The pull's time went by while a rank that is needed did not answer: that one is to blame, and not
   those that were to be asked next. */
static fanin_status blame_silent(pull *p, fanin_error *error)
{
    fanin_client *client = p->client;
    for (size_t i = 0; i < client->n_peers; i++) {
        connection *c = client->peers[i].control;
        if (c->state != CONNECTION_READY)
            connection_give_up(c);
        p->use[i] = peer_ready(&client->peers[i]) && tables_at_hand(p->publication, i);
    }
    size_t silent = agree_culprit(client, p->publication, p->use, p->at);
    if (silent == client->n_peers)
        return FANIN_OK;
    return blame_connection(client->peers[silent].control, p->lost.key, error);
}

/* Digests come by them as well. */
static fanin_status connect_data(const pull *p, fanin_error *error)
{
    const path_reading r = {.client = p->client,
                            .publication = p->publication,
                            .plan = &p->cache->whole.plan,
                            .ranges = p->goal.ranges,
                            .n_ranges = p->goal.n_ranges};
    return stream_connect(&r, p->options->verify, p->at, error);
}

fanin_status pull_streams(pull *p, fanin_error *error)
{
    fanin_status status = connect_data(p, error);
    if (status == FANIN_OK)
        p->state = PULL_BEGIN;
    return status;
}

/* To the ranks that were read last, as far as that is known: what went with an attempt that an
   update has overtaken is there when the next step is announced, and not only in the middle of its
   time. */
static fanin_status connect_again(pull *p, fanin_error *error)
{
    const path_plan *plan = &p->cache->whole.plan;
    p->goal.ranges = NULL; /* of the attempt before */
    p->goal.n_ranges = 0;
    if (!p->cache->valid)
        return FANIN_OK;
    for (size_t i = 0; i < p->client->n_peers; i++)
        p->use[i] =
            peer_ready(&p->client->peers[i]) && tables_at_hand(p->publication, i);
    fanin_status status = prefer_others(p, error);
    if (status != FANIN_OK)
        return status;
    for (size_t i = 0; i < plan->n_sources; i++) {
        size_t peer = plan->peer_of[i];
        if (plan->plan->ranks[i].n_pieces > 0 &&
            (!peer_ready(&p->client->peers[peer]) || !p->use[peer]))
            return FANIN_OK;
    }
    plan_detail_readers(plan, p->publication);
    return connect_data(p, error);
}

fanin_status pull_connect(pull *p, fanin_error *error)
{
    fanin_status status = client_ensure_connected(p->client, p->patient, p->at, error);
    if (status == FANIN_OK && p->patient && deadline_passed(p->at))
        status = blame_silent(p, error);
    if (status != FANIN_OK) {
        end_if_unreachable(p, status);
        return status;
    }
    p->there = client_count_ready(p->client);
    status = connect_again(p, error);
    if (status == FANIN_OK)
        p->state = PULL_AGREE;
    return status;
}

/* ------------------------------------------------------------------- agree */

/* A hole that a missing rank leaves is that rank's fault, not the trainer's: *@p lacks. */
static fanin_status make_plan(pull *p, const bool *use, bool *lacks, fanin_error *error)
{
    fanin_error hole = FANIN_ERROR_INIT;
    fanin_status status = plan_cache_make(p->cache, p->client, p->publication, use,
                                          p->destination, p->at, error);
    size_t culprit = p->client->n_peers;
    if (status == FANIN_ERR_INCOMPLETE)
        culprit = agree_culprit(p->client, p->publication, use, p->at);
    *lacks = culprit < p->client->n_peers;
    if (!*lacks)
        return status;
    error_copy(&hole, error);
    return blame_connection(p->client->peers[culprit].control, hole.key, error);
}

typedef struct lacking {
    pull *pull;
    bool lacks; /* a rank that is gone */
} lacking;

static fanin_status plan_without(void *cookie, const bool *use, bool *vain,
                                 fanin_error *error)
{
    lacking *l = cookie;
    fanin_status status = make_plan(l->pull, use, &l->lacks, error);
    *vain = l->lacks;
    return status;
}

/* The attempt failed for want of a rank. Who was lost just now may be back, and who was not waited
   for may come. */
static void look_for_more(pull *p, fanin_status status)
{
    bool coming = !p->patient && client_expects_more(p->client);
    p->patient = p->patient || coming;
    if (coming) /* why the connection before was lost says nothing of this one */
        p->state = PULL_PAUSE;
    else if (client_count_ready(p->client) == p->there)
        end_if_unreachable(p, status);
}

/* Regions are asked for before key table and boxes, and what ranks have is mapped beside all that
   follows. */
static void map_ahead(pull *p)
{
    const destination *d = p->destination;
    p->known = (path_foresight){.announced = p->announced,
                                .use = p->use,
                                .outline = d->outline,
                                .cookie = d->cookie};
    path_begin_ahead(p->client, p->publication, &p->known, &p->goal, p->at);
}

fanin_status pull_agree(pull *p, fanin_error *error)
{
    lacking l = {.pull = p};
    const agree_need need = {
        .without = plan_without, .cookie = &l, .deltas = pull_wants_patches(p)};
    const destination *d = p->destination;
    p->publication->need = d->wants.mark ? &d->wants : &need_all;
    fanin_status status = agree(p->client, p->publication, p->options, &need,
                                early_lease_ask(p), p->at, p->announced, p->use, error);
    p->publication->need = NULL;
    early_lease_keep(p);
    /* Its owner may want to free memory that is mapped here. */
    if (status == FANIN_ERR_PAUSED || status == FANIN_ERR_NOT_FOUND)
        path_unmap(p->client, p->publication);
    if (status == FANIN_ERR_NOT_FOUND) {
        plan_cache_drop(p->publication);
        tables_forget(p->publication);
    }
    if (status != FANIN_OK && l.lacks)
        look_for_more(p, status);
    if (status != FANIN_OK)
        return status;
    map_ahead(p);
    p->state = PULL_TABLES;
    return FANIN_OK;
}

/* ------------------------------------------------------------ tables, plan */

fanin_status pull_tables(pull *p, fanin_error *error)
{
    const destination *d = p->destination;
    p->publication->need = d->wants.mark ? &d->wants : &need_all;
    fanin_status status =
        tables_sync(p->client, p->publication, p->announced, p->use, p->at, error);
    p->publication->need = NULL;
    if (status == FANIN_OK)
        p->state = PULL_PLAN;
    return status;
}

fanin_status pull_plan(pull *p, fanin_error *error)
{
    bool lacks = false;
    fanin_status status = prefer_others(p, error);
    if (status == FANIN_OK)
        status = make_plan(p, p->use, &lacks, error);
    if (lacks)
        look_for_more(p, status);
    if (status == FANIN_OK)
        p->state = PULL_SETTLE;
    return status;
}

/* ------------------------------------------------------------------ settle */

/* Without an F32 tensor that is converted the conversion changes nothing. */
static fanin_dtype arriving_dtype(const key_table *keys, fanin_dtype dtype)
{
    for (uint32_t i = 0; i < keys->count && dtype != 0; i++) {
        if (keys->entries[i].dtype == FANIN_DTYPE_F32 && !keys->entries[i].keep)
            return dtype;
    }
    return 0;
}

static bool do_suffice(void *cookie, const bool *which)
{
    pull *p = cookie;
    return agree_suffice(p->client, p->publication, which, p->at);
}

/* By the connections over which they have announced it. */
static void identify_ranks(pull *p)
{
    for (size_t i = 0; i < p->client->n_peers; i++) {
        p->ranks[i].has_step = p->use[i];
        if (!p->use[i])
            continue;
        const msg_hello_ok *rank = &p->client->peers[i].control->peer;
        p->ranks[i].rank = rank->rank;
        memcpy(p->ranks[i].incarnation, rank->incarnation,
               sizeof p->ranks[i].incarnation);
    }
    p->identity.ranks = p->ranks;
    p->identity.n_ranks = p->client->n_peers;
    p->identity.suffice = do_suffice;
    p->identity.cookie = p;
}

static void identify_content(pull *p)
{
    for (size_t i = 0; i < p->client->n_peers; i++) {
        if (!p->use[i])
            continue;
        memcpy(p->identity.world_id, p->client->peers[i].control->peer.world_id,
               sizeof p->identity.world_id);
        p->identity.step = p->announced[i].step;
        break;
    }
    p->identity.publication = p->publication->name;
    p->identity.key_table = p->publication->keys->id;
    p->identity.dtype = arriving_dtype(p->publication->keys, p->options->dtype);
}

static void start_counting(pull *p)
{
    memset(p->result->served, 0, p->result->n_peers * sizeof *p->result->served);
    p->progress = (read_progress){.whole = &p->cache->whole.plan,
                                  .total = p->cache->whole.plan.plan->bytes};
    p->bytes = p->tensors = 0;
    p->result->info.fixed_ns = 0; /* reads; turned into the rest at the end */
}

fanin_status pull_settle(pull *p, fanin_error *error)
{
    destination *d = p->destination;
    const plan *whole = p->cache->whole.plan.plan;
    bool skip = false;
    identify_content(p);
    if (d->directory)
        identify_ranks(p);
    start_counting(p);
    p->base = NULL;
    fanin_status status = d->agreed(d->cookie, p->publication->keys, &p->identity,
                                    &p->base, &skip, error);
    p->result->info.reused = status == FANIN_OK && skip;
    if (status != FANIN_OK)
        return status;
    if (skip) {
        p->bytes = whole->bytes;
        p->tensors = whole->tensors;
    }
    p->state = skip ? PULL_PUBLISH : PULL_RANGES;
    return FANIN_OK;
}

/* ------------------------------------------------------------------ ranges */

/* Destinations on devices need CUDA, whatever the paths. */
static fanin_status look_at_ranges(pull *p, fanin_error *error)
{
    fanin_client *client = p->client;
    path_goal *goal = &p->goal;
    fanin_status status = plan_cache_ranges(p->cache, p->destination, &goal->ranges,
                                            &goal->n_ranges, error);
    if (status == FANIN_OK && memory_range_on_devices(goal->ranges, goal->n_ranges) &&
        !client_gpu(client)) {
        error_place place = {.phase = "plan",
                             .remedy = "use a build and a machine with CUDA, or pull "
                                       "into host memory"};
        return error_set(error, FANIN_ERR_UNSUPPORTED, &place,
                         "the destination is CUDA memory, and %.200s",
                         client->devices->missing);
    }
    return status;
}

static fanin_status check_size(const pull *p, fanin_error *error)
{
    uint64_t bytes = p->cache->whole.plan.plan->bytes;
    uint64_t most = p->options->max_bytes;
    error_place place = {.phase = "plan",
                         .key = p->publication->name,
                         .remedy = "if that is right, raise max_bytes"};
    if (most == 0 || bytes <= most)
        return FANIN_OK;
    return error_set(error, FANIN_ERR_LIMIT, &place,
                     "the pull would bring %" PRIu64 " bytes, more than the %" PRIu64
                     " that it may (max_bytes)",
                     bytes, most);
}

fanin_status pull_ranges(pull *p, fanin_error *error)
{
    const path_plan *plan = &p->cache->whole.plan;
    memset(p->needed, 0, p->client->n_peers * sizeof *p->needed);
    for (size_t i = 0; i < plan->n_sources; i++)
        p->needed[plan->peer_of[i]] = plan->plan->ranks[i].n_pieces > 0;
    fanin_status status = check_size(p, error);
    if (status == FANIN_OK)
        status = look_at_ranges(p, error);
    if (status == FANIN_OK)
        p->state = PULL_PATHS;
    return status;
}

/* ------------------------------------------------------------------- paths */

/* While memory is mapped, which is the driver's work. */
static fanin_status detail_ahead(void *cookie, const path_reader *reader,
                                 const bool *mask, fanin_error *error)
{
    pull *p = cookie;
    return plan_detail_ahead(&p->cache->whole, p->client, p->publication, &p->goal,
                             reader, mask, p->at, error);
}

fanin_status pull_paths(pull *p, fanin_error *error)
{
    fanin_result_info *info = &p->result->info;
    p->goal.base = p->base;
    p->goal.plan = &p->cache->whole.plan;
    p->goal.meanwhile = p->session ? NULL : detail_ahead;
    p->goal.cookie = p;
    fanin_status status =
        path_prepare(p->client, p->publication, p->needed, &p->goal, p->at, error);
    info->map_ns += p->goal.map_ns;
    info->table_ns += p->goal.table_ns;
    if (status == FANIN_OK)
        p->state = pull_wants_patches(p) ? PULL_CHOOSE : PULL_ROOM;
    return status;
}

/* What most paths bring is written without asking before each part. */
fanin_status pull_room(pull *p, fanin_error *error)
{
    const destination *d = p->destination;
    bool all_ask = true;
    for (size_t i = 0; i < p->client->n_peers; i++)
        all_ask =
            all_ask && (!p->needed[i] || path_taken(p->publication, i)->path->asks);
    fanin_status status = FANIN_OK;
    if (d->need && !all_ask)
        status = d->need(d->cookie, 0, p->goal.ranges->length, error);
    if (status == FANIN_OK)
        p->state = PULL_DETAIL;
    return status;
}

/* What the part is read by, on the paths that were chosen. A session that begins knows only later
   what it reads. */
fanin_status pull_detail(pull *p, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    p->goal.table_ns = 0;
    if (p->session && !p->part)
        plan_detail_readers(&p->cache->whole.plan, p->publication);
    else
        status = plan_detail_make(pull_part(p), p->client, p->publication, &p->goal,
                                  p->at, error);
    p->result->info.table_ns += p->goal.table_ns;
    if (status == FANIN_OK)
        p->state = p->part ? PULL_READ : PULL_STREAMS;
    return status;
}
