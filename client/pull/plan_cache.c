/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/plan_cache.h"

#include "error_set.h"
#include "pull/agree.h"
#include <stdlib.h>
#include <string.h>

#define SLOTS 2 /* memory, adapter */

/* ------------------------------------------------------------------ keeping */

plan_cache *plan_cache_of(publication *p, unsigned slot)
{
    if (!p->plans)
        p->plans = calloc(SLOTS, sizeof *p->plans);
    return p->plans ? &p->plans[slot] : NULL;
}

static void clear(plan_cache *cache)
{
    for (size_t i = 0; i < PATH_READERS; i++) {
        for (size_t j = 0; cache->details[i] && j < cache->plan.n_sources; j++)
            path_readers[i]->forget(cache->details[i][j]);
        if (path_readers[i]->forget_all)
            path_readers[i]->forget_all(cache->shared[i]);
        free(cache->details[i]);
    }
    free(cache->ranges);
    free(cache->plan.sources);
    free(cache->plan.reader_of);
    free(cache->plan.peer_of);
    plan_free(&cache->plan.plan);
    *cache = (plan_cache){0};
}

void plan_cache_drop(publication *p)
{
    for (unsigned i = 0; p->plans && i < SLOTS; i++)
        clear(&p->plans[i]);
}

void plan_cache_free(fanin_client *client)
{
    for (publication *p = client->publications; p; p = p->next) {
        plan_cache_drop(p);
        free(p->plans);
        p->plans = NULL;
    }
}

/* ------------------------------------------------------------------- making */

/* What a plan depends on. */
static fanin_status made_from(const fanin_client *client, const publication *p,
                              const bool *use, const destination *d, digest *out,
                              fanin_error *error)
{
    buffer b = {0};
    digest layout = d->layout(d->cookie);
    buffer_append(&b, &layout, sizeof layout);
    buffer_append(&b, &d->dtype, sizeof d->dtype);
    buffer_append(&b, &p->keys->id, sizeof p->keys->id);
    for (size_t i = 0; i < client->n_peers; i++) {
        const shard_table *s = &p->shards[i];
        uint64_t serial = use[i] ? s->serial : 0;
        buffer_append(&b, &serial, sizeof serial);
    }
    /* Of less, two plans would look like one. */
    fanin_status status = b.failed ? error_set_memory(error) : FANIN_OK;
    *out = digest_of(b.data, b.size);
    buffer_free(&b);
    return status;
}

fanin_status pull_blame(const connection *c, const char *key, fanin_error *error)
{
    const fanin_error *fault = connection_fault(c);
    error_place place = connection_place(c, "connect");
    place.key = key;
    place.remedy = fault->remedy;
    place.sys_errno = fault->sys_errno;
    fanin_status status = fault->status ? fault->status : FANIN_ERR_UNREACHABLE;
    return error_set(error, status, &place, "%s%s%s", fault->message,
                     *key ? "; no other rank holds " : "", key);
}

/* A hole that a missing rank leaves is that rank's fault, not the trainer's. */
static fanin_status blame_missing_rank(fanin_client *client, const publication *p,
                                       const bool *use, deadline at, fanin_error *error)
{
    fanin_error hole = FANIN_ERROR_INIT;
    error_copy(&hole, error);
    size_t culprit = agree_culprit(client, p, use, at);
    if (culprit == client->n_peers)
        return FANIN_ERR_INCOMPLETE;
    return pull_blame(client->peers[culprit].control, hole.key, error);
}

static fanin_status list_sources(const fanin_client *client, const publication *p,
                                 const bool *use, path_plan *plan, fanin_error *error)
{
    size_t n = client->n_peers;
    plan->sources = calloc(n, sizeof *plan->sources);
    plan->peer_of = calloc(n, sizeof *plan->peer_of);
    plan->reader_of = calloc(n, sizeof *plan->reader_of);
    if (!plan->sources || !plan->peer_of || !plan->reader_of)
        return error_set_memory(error);
    for (size_t i = 0; i < n; i++) {
        if (!use[i])
            continue;
        plan->sources[plan->n_sources] = (plan_source){
            connection_peer(client->peers[i].control)->rank, p->shards[i].boxes};
        plan->peer_of[plan->n_sources++] = i;
    }
    return FANIN_OK;
}

static fanin_status make(path_plan *plan, fanin_client *client, const publication *p,
                         const bool *use, const destination *d, deadline at,
                         fanin_error *error)
{
    const plan_target *targets = NULL;
    const uint64_t *to_of_key = NULL;
    size_t n_targets = 0;
    client_work work;
    client_work_start(&work, client, at);
    plan_rules rules = {
        .dtype = d->dtype, .seed = client->plan_seed, .stop = &work.stop};
    fanin_status status =
        d->prepare(d->cookie, p->keys, &targets, &n_targets, &to_of_key, error);
    if (status == FANIN_OK)
        status = list_sources(client, p, use, plan, error);
    if (status == FANIN_OK)
        status = plan_build(p->keys, plan->sources, plan->n_sources, targets, n_targets,
                            to_of_key, &rules, &plan->plan, error);
    return client_work_end(&work, status, error);
}

fanin_status plan_cache_make(plan_cache *cache, fanin_client *client,
                             const publication *p, const bool *use,
                             const destination *d, deadline at, fanin_error *error)
{
    digest from;
    fanin_status status = made_from(client, p, use, d, &from, error);
    if (status != FANIN_OK)
        return status;
    if (cache->valid && digest_equal(&cache->made_from, &from))
        return FANIN_OK;
    clear(cache);
    fanin_error local = FANIN_ERROR_INIT;
    fanin_error *why = error ? error : &local;
    status = make(&cache->plan, client, p, use, d, at, why);
    bool hole = status == FANIN_ERR_INCOMPLETE;
    if (hole)
        status = blame_missing_rank(client, p, use, at, why);
    if (status != FANIN_OK) {
        clear(cache);
        cache->lacks_rank = hole && status != FANIN_ERR_INCOMPLETE;
        return status;
    }
    cache->made_from = from;
    cache->valid = true;
    return FANIN_OK;
}

static fanin_status detail_of(plan_cache *cache, size_t reader,
                              const path_planning *how, fanin_error *error)
{
    const path_reader *r = path_readers[reader];
    const path_plan *p = &cache->plan;
    void ***details = &cache->details[reader];
    bool any = false;
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < p->n_sources && status == FANIN_OK; i++) {
        if (p->reader_of[i] != r)
            continue;
        any = true;
        if (!*details)
            *details = calloc(p->n_sources, sizeof **details);
        if (!*details)
            return error_set_memory(error);
        if (!(*details)[i])
            status = r->plan(how, i, &(*details)[i], error);
    }
    if (status == FANIN_OK && any && r->plan_all)
        status = r->plan_all(how, *details, &cache->shared[reader], error);
    return status;
}

fanin_status plan_cache_detail(plan_cache *cache, fanin_client *client, publication *p,
                               path_goal *goal, work_stop *stop, fanin_error *error)
{
    const path_plan *plan = &cache->plan;
    path_planning how = {
        .client = client, .publication = p, .plan = plan, .goal = goal, .stop = stop};
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < plan->n_sources; i++)
        plan->reader_of[i] = plan->plan->ranks[i].n_pieces > 0
                                 ? path_reader_of(path_taken(p, plan->peer_of[i])->path)
                                 : NULL;
    for (size_t i = 0; i < PATH_READERS && status == FANIN_OK; i++)
        status = detail_of(cache, i, &how, error);
    return status;
}

fanin_status plan_cache_ranges(plan_cache *cache, const destination *d,
                               const memory_range **ranges, size_t *n,
                               fanin_error *error)
{
    if (!cache->ranges || !d->lasting_ranges) {
        fanin_status status = d->ranges(d->cookie, ranges, n, error);
        if (status != FANIN_OK || !d->lasting_ranges)
            return status;
        cache->ranges = malloc((*n + 1) * sizeof *cache->ranges);
        if (!cache->ranges)
            return error_set_memory(error);
        if (*n > 0)
            memcpy(cache->ranges, *ranges, *n * sizeof *cache->ranges);
        cache->n_ranges = *n;
    }
    *ranges = cache->ranges;
    *n = cache->n_ranges;
    return FANIN_OK;
}
