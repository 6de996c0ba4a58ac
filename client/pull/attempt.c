/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/attempt.h"

#include "device/devices.h"
#include "error_set.h"
#include "net/spans.h"
#include "pull/early_lease.h"
#include "pull/lease_round.h"
#include "pull/plan_detail.h"
#include "pull/pull_log.h"
#include "stream/stream_link.h"
#include <inttypes.h>
#include <string.h>

uint64_t lap(uint64_t *since)
{
    uint64_t now = clock_ns(), passed = now - *since;
    *since = now;
    return passed;
}

/* All parts of an attempt end here: lap(), trace and log told. */
static uint64_t part_ended(const pull *p, trace_name name, fanin_status status,
                           uint64_t *since)
{
    span_of_call(p->client, name, *since, status, NULL);
    uint64_t passed = lap(since);
    pull_log_part(p, name, status, passed);
    return passed;
}

/* ----------------------------------------------------------------- prepare */

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

/* What most paths bring is written without asking before each part. */
static fanin_status need_whole(const pull *p, fanin_error *error)
{
    const destination *d = p->destination;
    bool all_ask = true;
    for (size_t i = 0; i < p->client->n_peers; i++)
        all_ask =
            all_ask && (!p->needed[i] || path_taken(p->publication, i)->path->asks);
    if (!d->need || all_ask)
        return FANIN_OK;
    return d->need(d->cookie, 0, p->goal.ranges->length, error);
}

/* What the part is read by, on the paths that were chosen. */
static fanin_status detail_plan(pull *p, plan_part *part, fanin_error *error)
{
    uint64_t clock = clock_ns();
    p->goal.table_ns = 0;
    fanin_status status =
        plan_detail_make(part, p->client, p->publication, &p->goal, p->at, error);
    p->result->info.table_ns += p->goal.table_ns;
    p->result->info.plan_ns += part_ended(p, TRACE_PLAN, status, &clock);
    return status;
}

/* While memory is mapped, which is the driver's work. */
static fanin_status detail_ahead(void *cookie, const path_reader *reader,
                                 const bool *mask, fanin_error *error)
{
    pull *p = cookie;
    return plan_detail_ahead(&p->cache->whole, p->client, p->publication, &p->goal,
                             reader, mask, p->at, error);
}

/* Paths and what they need. */
static fanin_status find_paths(pull *p, fanin_error *error)
{
    fanin_client *client = p->client;
    const path_plan *plan = &p->cache->whole.plan;
    fanin_result_info *info = &p->result->info;
    uint64_t clock = clock_ns();
    memset(p->needed, 0, client->n_peers * sizeof *p->needed);
    for (size_t i = 0; i < plan->n_sources; i++)
        p->needed[plan->peer_of[i]] = plan->plan->ranks[i].n_pieces > 0;
    fanin_status status = check_size(p, error);
    if (status == FANIN_OK)
        status = look_at_ranges(p, error);
    info->plan_ns += part_ended(p, TRACE_PLAN, status, &clock);
    p->goal.base = p->base;
    p->goal.plan = plan;
    p->goal.meanwhile = p->open_only ? NULL : detail_ahead;
    p->goal.cookie = p;
    if (status == FANIN_OK)
        status =
            path_prepare(client, p->publication, p->needed, &p->goal, p->at, error);
    info->connect_ns += part_ended(p, TRACE_PATHS, status, &clock);
    info->map_ns += p->goal.map_ns;
    info->table_ns += p->goal.table_ns;
    if (status == FANIN_OK)
        status = need_whole(p, error);
    return status;
}

/* Digests come by them as well. */
static fanin_status connect_streams(pull *p, fanin_error *error)
{
    const path_reading r = {.client = p->client,
                            .publication = p->publication,
                            .plan = &p->cache->whole.plan,
                            .ranges = p->goal.ranges,
                            .n_ranges = p->goal.n_ranges};
    uint64_t clock = clock_ns();
    fanin_status status = stream_connect(&r, p->options->verify, p->at, error);
    p->result->info.connect_ns += lap(&clock);
    return status;
}

/* Paths, what the whole is read by, unless only parts are read, and connections. */
static fanin_status prepare(pull *p, fanin_error *error)
{
    plan_part *whole = &p->cache->whole;
    fanin_status status = find_paths(p, error);
    if (status == FANIN_OK && p->open_only)
        plan_detail_readers(&whole->plan, p->publication);
    else if (status == FANIN_OK)
        status = detail_plan(p, whole, error);
    return status == FANIN_OK ? connect_streams(p, error) : status;
}

static void start_counting(pull *p)
{
    memset(p->result->served, 0, p->result->n_peers * sizeof *p->result->served);
    p->progress = (read_progress){.whole = &p->cache->whole.plan,
                                  .total = p->cache->whole.plan.plan->bytes};
    p->bytes = p->tensors = 0;
    p->result->info.fixed_ns = 0; /* reads; turned into the rest at the end */
}

/* ------------------------------------------------------------------- ready */

static fanin_status plan_without(void *cookie, const bool *use, bool *vain,
                                 fanin_error *error)
{
    const pull *p = cookie;
    fanin_status status = plan_cache_make(p->cache, p->client, p->publication, use,
                                          p->destination, p->at, error);
    *vain = p->cache->lacks_rank;
    return status;
}

/* The attempt failed. Who was lost just now may be back, and who was not waited for may come. */
static void look_for_more(pull *p, size_t there)
{
    p->coming = !p->patient && client_expects_more(p->client);
    p->patient = p->patient || p->coming;
    p->missing = client_count_ready(p->client) == there && !p->coming;
}

/* The pull's time went by while a rank that is needed did not answer: that one is to blame, and not
   those that were to be asked next. */
static fanin_status blame_silent(pull *p, fanin_error *error)
{
    fanin_client *client = p->client;
    for (size_t i = 0; i < client->n_peers; i++) {
        connection *c = client->peers[i].control;
        if (connection_get_state(c) != CONNECTION_READY)
            connection_give_up(c);
        p->use[i] = peer_ready(&client->peers[i]) && tables_at_hand(p->publication, i);
    }
    size_t silent = agree_culprit(client, p->publication, p->use, p->at);
    if (silent == client->n_peers)
        return FANIN_OK;
    p->missing = true;
    return pull_blame(client->peers[silent].control, p->lost.key, error);
}

static read_phase phase_of(pull *p, plan_part *part)
{
    bool whole = part == &p->cache->whole;
    return (read_phase){.client = p->client,
                        .publication = p->publication,
                        .part = part,
                        .leases = p->leases,
                        .destination = p->destination,
                        .base = p->base,
                        .ranges = whole ? p->goal.ranges : part->ranges,
                        .n_ranges = whole ? p->goal.n_ranges : part->n_ranges,
                        .options = p->options,
                        .progress = &p->progress,
                        .result = p->result};
}

static fanin_status agree_on_step(pull *p, fanin_error *error)
{
    const agree_need need = {.without = plan_without, .cookie = p};
    fanin_status status = agree(p->client, p->publication, p->options, &need,
                                early_lease_ask(p), p->at, p->announced, p->use, error);
    early_lease_keep(p);
    return status;
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
    for (size_t i = 0; i < plan->n_sources; i++) {
        if (plan->plan->ranks[i].n_pieces > 0 &&
            !peer_ready(&p->client->peers[plan->peer_of[i]]))
            return FANIN_OK;
    }
    plan_detail_readers(plan, p->publication);
    return connect_streams(p, error);
}

/* Connected, agreed, catalogs and plan at hand. */
static fanin_status make_ready(pull *p, fanin_error *error)
{
    fanin_client *client = p->client;
    fanin_result_info *info = &p->result->info;
    p->cache->lacks_rank = p->coming = false;
    uint64_t clock = clock_ns();
    fanin_status status = client_ensure_connected(client, p->patient, p->at, error);
    info->connect_ns += part_ended(p, TRACE_CONNECT, status, &clock);
    p->missing = status != FANIN_OK;
    if (status == FANIN_OK && p->patient && deadline_passed(p->at))
        status = blame_silent(p, error);
    if (status != FANIN_OK)
        return status;
    size_t there = client_count_ready(client);
    status = connect_again(p, error);
    if (status != FANIN_OK)
        return status;
    status = agree_on_step(p, error);
    /* Its owner may want to free memory that is mapped here. */
    if (status == FANIN_ERR_PAUSED || status == FANIN_ERR_NOT_FOUND)
        path_unmap(client, p->publication);
    if (status == FANIN_ERR_NOT_FOUND) {
        plan_cache_drop(p->publication);
        tables_forget(p->publication);
    }
    info->wait_ns += part_ended(p, TRACE_WAIT, status, &clock);
    if (status == FANIN_OK)
        map_ahead(p);
    if (status == FANIN_OK)
        status =
            tables_sync(client, p->publication, p->announced, p->use, p->at, error);
    info->catalog_ns += part_ended(p, TRACE_CATALOG, status, &clock);
    if (status == FANIN_OK)
        status = plan_cache_make(p->cache, client, p->publication, p->use,
                                 p->destination, p->at, error);
    if (p->cache->lacks_rank)
        look_for_more(p, there);
    info->plan_ns += part_ended(p, TRACE_PLAN, status, &clock);
    return status;
}

static fanin_status get_ready(pull *p, fanin_error *error)
{
    const destination *d = p->destination;
    p->publication->need = d->wants.mark ? &d->wants : &need_all;
    fanin_status status = make_ready(p, error);
    p->publication->need = NULL;
    return status;
}

/* Without an F32 tensor that is converted the conversion changes nothing. */
static fanin_dtype pull_dtype(const key_table *keys, fanin_dtype dtype)
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
    p->identity.dtype = pull_dtype(p->publication->keys, p->options->dtype);
}

/* ------------------------------------------------------------------- begin */

/* Nothing slow happens under a lease but reads; only parts are not known before they are read. */
static fanin_status take_leases(pull *p, fanin_error *error)
{
    fanin_status status = prepare(p, error);
    if (status != FANIN_OK)
        return status;
    uint64_t clock = clock_ns();
    bool early = early_lease_holds(p);
    status = lease_round_begin(p->client, p->publication, p->announced, p->needed,
                               p->leases, p->at, error);
    p->result->info.begin_ns += part_ended(p, TRACE_BEGIN, status, &clock);
    p->refused = status == FANIN_ERR_STALE;
    p->leased_ns = early ? p->early.since_ns : clock;
    p->cache->proven = p->cache->proven || status == FANIN_OK;
    p->lease_ms = 0;
    for (size_t i = 0; i < p->client->n_peers; i++)
        if (p->leases[i].held && p->leases[i].lease_ms > p->lease_ms)
            p->lease_ms = p->leases[i].lease_ms;
    return status;
}

static fanin_status begin(pull *p, bool *skip_out, fanin_error *error)
{
    destination *d = p->destination;
    p->refused = true;
    *skip_out = false;
    fanin_status status = get_ready(p, error);
    if (status != FANIN_OK)
        return status;
    identify(p);
    start_counting(p);
    uint64_t clock = clock_ns();
    p->base = NULL;
    status = d->agreed(d->cookie, p->publication->keys, &p->identity, &p->base,
                       skip_out, error);
    p->result->info.write_ns += part_ended(p, TRACE_WRITE, status, &clock);
    if (status == FANIN_OK && !*skip_out)
        status = take_leases(p, error);
    return status;
}

fanin_status attempt_begin(pull *p, bool *skip_out, fanin_error *error)
{
    fanin_status status = begin(p, skip_out, error);
    path_end_ahead(&p->goal);
    return status;
}

/* -------------------------------------------------------------------- read */

static fanin_status verify(pull *p, read_phase *r, fanin_error *error)
{
    fanin_result_info *info = &p->result->info;
    uint64_t clock = clock_ns();
    fanin_status status = verify_run(r, p->at, error);
    p->final = r->final;
    info->verify_ns += part_ended(p, TRACE_DIGEST, status, &clock);
    info->verified = status == FANIN_OK;
    return status;
}

fanin_status attempt_read(pull *p, plan_part *part, fanin_error *error)
{
    fanin_result_info *info = &p->result->info;
    read_phase r = phase_of(p, part);
    /* The whole's details were made before there was a lease. */
    fanin_status status =
        part == &p->cache->whole ? FANIN_OK : detail_plan(p, part, error);
    if (status != FANIN_OK)
        return status;
    p->refused = false;
    status = read_phase_run(&r, p->at, error);
    p->final = r.final;
    uint64_t took = r.last_ns - r.first_ns;
    info->read_ns += took;
    info->fixed_ns += took;
    pull_log_part(p, TRACE_READ, status, took);
    if (status == FANIN_OK && p->options->verify)
        status = verify(p, &r, error);
    if (status != FANIN_OK)
        return status;
    p->bytes += part->plan.plan->bytes;
    p->tensors += part->plan.plan->tensors;
    return FANIN_OK;
}

fanin_status attempt_end(pull *p, fanin_error *error)
{
    uint64_t clock = clock_ns();
    fanin_status status = lease_round_end(p->client, p->publication, p->announced,
                                          p->leases, p->result->served, p->at, error);
    p->result->info.end_ns += part_ended(p, TRACE_END, status, &clock);
    return status;
}
