/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/prepare.h"

#include "convert.h"
#include "device/devices.h"
#include "error_set.h"
#include "pull/plan_detail.h"
#include <inttypes.h>
#include <string.h>

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

static void identify(pull *p)
{
    for (size_t i = 0; i < p->client->n_peers; i++) {
        if (!p->use[i])
            continue;
        memcpy(p->identity.world_id,
               connection_peer(p->client->peers[i].control)->world_id,
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
    identify(p);
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
    bool devices = false;
    for (size_t i = 0; i < goal->n_ranges && status == FANIN_OK; i++)
        devices = devices || goal->ranges[i].device >= 0;
    if (devices && !client_gpu(client)) {
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
        p->state = PULL_ROOM;
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
