/* SPDX-License-Identifier: Apache-2.0 */
#include "pull_plan.h"

#include "error_set.h"
#include "stream_link.h"
#include <stdlib.h>
#include <string.h>

/* A get costs about as much as copying this many bytes; measured with cma, where a piece of
   its own is worth it from some tens of KiB on. */
static const span_rule span_rules = {
    .max_length = SPAN_MAX, .max_gap = 8192, .direct_from = 65536};

/* What a plan depends on besides the destination. */
static digest made_from(const fanin_client *client, const publication *p,
                        const bool *use, const destination *d)
{
    buffer b = {0};
    digest layout = d->layout(d->cookie);
    buffer_append(&b, &layout, sizeof(layout));
    buffer_append(&b, &p->keys->id, sizeof(p->keys->id));
    for (size_t i = 0; i < client->n_peers; i++) {
        const shard_table *s = &p->shards[i];
        uint64_t of_peer[3] = {use[i], use[i] ? s->generation : 0,
                               use[i] ? s->version : 0};
        buffer_append(&b, of_peer, sizeof(of_peer));
    }
    digest result = digest_of(b.data, b.size);
    buffer_free(&b);
    return result;
}

/* A hole that a missing rank leaves is that rank's fault, not the trainer's. */
static fanin_status blame_missing_rank(const fanin_client *client, const bool *use,
                                       fanin_error *error)
{
    for (size_t i = 0; i < client->n_peers; i++) {
        const connection *c = client->peers[i].control;
        if (use[i] || connection_get_state(c) == CONNECTION_READY)
            continue;
        const fanin_error *fault = connection_fault(c);
        fanin_error hole = *error;
        error_place place = connection_place(c, "connect");
        place.key = hole.key;
        place.remedy = fault->remedy;
        place.sys_errno = fault->sys_errno;
        fanin_status status = fault->status ? fault->status : FANIN_ERR_UNREACHABLE;
        return error_set(error, status, &place, "%s; no other rank holds %s",
                         fault->message, hole.key);
    }
    return FANIN_ERR_INCOMPLETE;
}

static fanin_status list_sources(fanin_client *client, publication *p, const bool *use,
                                 plan_cache *cache, fanin_error *error)
{
    size_t n = client->n_peers;
    cache->sources = calloc(n, sizeof(*cache->sources));
    cache->peer_of = calloc(n, sizeof(*cache->peer_of));
    cache->lists = calloc(n, sizeof(*cache->lists));
    cache->spans = calloc(n, sizeof(*cache->spans));
    if (!cache->sources || !cache->peer_of || !cache->lists || !cache->spans)
        return error_set_memory(error);
    for (size_t i = 0; i < n; i++) {
        if (!use[i])
            continue;
        cache->sources[cache->n_sources] = (plan_source){
            connection_peer(client->peers[i].control)->rank, p->shards[i].boxes};
        cache->peer_of[cache->n_sources++] = i;
    }
    return FANIN_OK;
}

fanin_status pull_plan(fanin_client *client, publication *p, const bool *use,
                       destination *d, fanin_error *error)
{
    plan_cache *cache = &p->plans[d->plan_slot];
    digest from = made_from(client, p, use, d);
    if (cache->valid && digest_equal(&cache->made_from, &from))
        return FANIN_OK;
    plan_cache_clear(cache);
    const plan_target *targets = NULL;
    const uint64_t *to_of_key = NULL;
    size_t n_targets = 0;
    fanin_error local = FANIN_ERROR_INIT;
    fanin_error *why = error ? error : &local;
    fanin_status status =
        d->prepare(d->cookie, p->keys, &targets, &n_targets, &to_of_key, why);
    if (status == FANIN_OK)
        status = list_sources(client, p, use, cache, why);
    if (status == FANIN_OK)
        status = plan_build(p->keys, cache->sources, cache->n_sources, targets,
                            n_targets, to_of_key, &cache->plan, why);
    if (status == FANIN_ERR_INCOMPLETE)
        status = blame_missing_rank(client, use, why);
    if (status != FANIN_OK) {
        plan_cache_clear(cache);
        return status;
    }
    cache->made_from = from;
    cache->valid = true;
    return FANIN_OK;
}

fanin_status pull_plan_source(fanin_client *client, publication *p, plan_cache *cache,
                              size_t source, fanin_error *error)
{
    size_t index = cache->peer_of[source];
    const shard_table *s = &p->shards[index];
    if (client->peers[index].path == FANIN_PATH_STREAM) {
        if (cache->lists[source].requests)
            return FANIN_OK;
        return read_list_build(&cache->plan->ranks[source], s->boxes, p->keys,
                               &cache->lists[source], error);
    }
    if (cache->spans[source])
        return FANIN_OK;
    return plan_spans_build(cache->plan, p->keys, cache->sources, source, s->regions,
                            &span_rules, &cache->spans[source], error);
}
