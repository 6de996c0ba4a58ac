/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/pull_plan.h"

#include "error_set.h"
#include "ipc/device_plan.h"
#include "pull/agree.h"
#include "stream/stream_link.h"
#include "ucx/one_sided.h"
#include <stdlib.h>
#include <string.h>

/* A get costs about as much as copying this many bytes; measured with cma, where a piece of
   its own is worth it from some tens of KiB on. */
static const span_rule span_rules = {
    .max_length = SPAN_MAX, .max_gap = 8192, .direct_from = 65536};
/* A kernel reads where bytes lie: nothing is joined, nothing read for nothing. */
static const span_rule kernel_rules = {.max_length = UINT64_C(1) << 40};

/* What a plan depends on besides the destination. */
static digest made_from(const fanin_client *client, const publication *p,
                        const bool *use, const destination *d)
{
    buffer b = {0};
    digest layout = d->layout(d->cookie);
    buffer_append(&b, &layout, sizeof(layout));
    buffer_append(&b, &d->dtype, sizeof(d->dtype));
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

static fanin_status list_sources(fanin_client *client, publication *p, const bool *use,
                                 plan_cache *cache, fanin_error *error)
{
    size_t n = client->n_peers;
    cache->sources = calloc(n, sizeof(*cache->sources));
    cache->peer_of = calloc(n, sizeof(*cache->peer_of));
    cache->lists = calloc(n, sizeof(*cache->lists));
    cache->spans = calloc(n, sizeof(*cache->spans));
    cache->spans_of = calloc(n, sizeof(*cache->spans_of));
    if (!cache->sources || !cache->peer_of || !cache->lists || !cache->spans ||
        !cache->spans_of)
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
                       destination *d, deadline at, fanin_error *error)
{
    plan_cache *cache = &p->plans[d->plan_slot];
    client_work work;
    digest from = made_from(client, p, use, d);
    if (cache->valid && digest_equal(&cache->made_from, &from))
        return FANIN_OK;
    client_work_start(&work, client, at);
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
        status =
            plan_build(p->keys, cache->sources, cache->n_sources, targets, n_targets,
                       to_of_key, d->dtype, &work.stop, &cache->plan, why);
    status = client_work_end(&work, status, why);
    bool hole = status == FANIN_ERR_INCOMPLETE;
    if (hole)
        status = blame_missing_rank(client, p, use, at, why);
    if (status != FANIN_OK) {
        plan_cache_clear(cache);
        cache->lacks_rank = hole && status != FANIN_ERR_INCOMPLETE;
        return status;
    }
    cache->made_from = from;
    cache->valid = true;
    return FANIN_OK;
}

fanin_status pull_plan_source(fanin_client *client, publication *p, plan_cache *cache,
                              size_t source, work_stop *stop, fanin_error *error)
{
    size_t index = cache->peer_of[source];
    const shard_table *s = &p->shards[index];
    fanin_path path = client->peers[index].path;
    if (cache->plan->ranks[source].n_pieces == 0)
        return FANIN_OK;
    if (path == FANIN_PATH_STREAM) {
        if (cache->lists[source].requests)
            return FANIN_OK;
        return read_list_build(&cache->plan->ranks[source], s->boxes, p->keys, stop,
                               &cache->lists[source], error);
    }
    if (cache->spans[source] && (path == FANIN_PATH_CUDA_IPC) ==
                                    (cache->spans_of[source] == FANIN_PATH_CUDA_IPC))
        return FANIN_OK;
    plan_spans_free(&cache->spans[source]);
    cache->spans_of[source] = path;
    return plan_spans_build(cache->plan, p->keys, cache->sources, source, s->regions,
                            path == FANIN_PATH_CUDA_IPC ? &kernel_rules : &span_rules,
                            stop, &cache->spans[source], error);
}

fanin_status pull_plan_ranges(plan_cache *cache, destination *d,
                              const memory_range **ranges, size_t *n,
                              fanin_error *error)
{
    if (!cache->ranges || !d->lasting_ranges) {
        fanin_status status = d->ranges(d->cookie, ranges, n, error);
        if (status != FANIN_OK || !d->lasting_ranges)
            return status;
        cache->ranges = malloc((*n + 1) * sizeof(*cache->ranges));
        if (!cache->ranges)
            return error_set_memory(error);
        if (*n > 0)
            memcpy(cache->ranges, *ranges, *n * sizeof(*cache->ranges));
        cache->n_ranges = *n;
    }
    *ranges = cache->ranges;
    *n = cache->n_ranges;
    return FANIN_OK;
}

fanin_status pull_plan_tables(fanin_client *client, plan_cache *cache,
                              const path_goal *goal, uint8_t *base, work_stop *stop,
                              fanin_error *error)
{
    bool *of_source = calloc(cache->n_sources + 1, sizeof(*of_source));
    if (!of_source)
        return error_set_memory(error);
    bool any = false;
    for (size_t i = 0; i < cache->n_sources; i++) {
        of_source[i] = cache->plan->ranks[i].n_pieces > 0 &&
                       client->peers[cache->peer_of[i]].path == FANIN_PATH_CUDA_IPC;
        any = any || of_source[i];
    }
    device_plan_parts parts = {.cache = cache,
                               .of_source = of_source,
                               .base = base,
                               .ranges = goal->ranges,
                               .n_ranges = goal->n_ranges,
                               .gather_device = goal->gather_device,
                               .stop = stop};
    fanin_status status = FANIN_OK;
    if (any && !device_plan_fits(cache->device, &parts)) {
        device_plan_free(&cache->device);
        status = device_plan_build(client->gpu, &parts, &cache->device, error);
    }
    free(of_source);
    return status;
}
