/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/pull.h"

#include "convert.h"
#include "device/devices.h"
#include "error_set.h"
#include "pull/agree.h"
#include "pull/lease_round.h"
#include "pull/read_phase.h"
#include "versioned.h"
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* After so many stale attempts the error explains what would help. */
#define ADVISE_AFTER 3
/* Lost paths that a forced path may cost before the pull gives up. */
#define MAX_TRANSPORT_FAILURES 3
/* Device memory of publications that are not pulled any more is unmapped after so long. Mapping it
   again costs less than a millisecond. */
#define KEEP_MAPPED_NS (UINT64_C(60) * 1000 * 1000 * 1000)

typedef struct pull {
    fanin_client *client;
    const fanin_pull_options *options;
    destination *destination;
    deadline at;
    publication *publication;
    plan_cache *cache;
    announcement *announced;
    bool *use, *needed;
    reader_lease *leases;
    fanin_result *result;
    adapter_identity identity;
    const memory_range *ranges;
    size_t n_ranges;
    bool final;   /* the attempt ended by what no other one would mend */
    bool refused; /* the attempt ended before anything was read: not stale */
    bool missing; /* it ended for want of ranks that cannot be connected */
    bool patient; /* ranks that did not answer the last time are waited for again */
    uint64_t attempt_ns;
    unsigned transport_failures;
    fanin_error stale; /* the last reason to restart */
    fanin_error lost;  /* the last lost rank or path that was a reason to restart */
} pull;

/* ----------------------------------------------------------------- options */

void fanin_pull_options_init(fanin_pull_options *options, size_t size)
{
    fanin_pull_options defaults = {.timeout_ms = 60000};
    versioned_init(options, size, &defaults, sizeof defaults);
}

fanin_status pull_check(const fanin_client *client, const fanin_pull_options *in,
                        fanin_pull_options *out, fanin_error *error)
{
    fanin_status status = client_check_connected(client, error);
    if (status != FANIN_OK)
        return status;
    fanin_pull_options_init(out, sizeof *out);
    if (!versioned_read(out, sizeof *out, in, 0))
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "the options are NULL or their struct_size is not set");
    error_place place = {.remedy = "a publication is \"lora:<run>\" or \"full:<run>\""};
    if (!out->publication || !strchr(out->publication, ':') ||
        strlen(out->publication) >= sizeof(((publication *)0)->name))
        return error_set(error, FANIN_ERR_ARGUMENT, &place,
                         "the publication's name is missing or malformed");
    if (out->rule < FANIN_STEP_NEWEST || out->rule > FANIN_STEP_AT_LEAST)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "unknown step rule %d",
                         (int)out->rule);
    if (out->dtype != 0 && convert_between(FANIN_DTYPE_F32, out->dtype) < 0) {
        place.remedy = "use BF16 or F16, or nothing: as published";
        return error_set(error, FANIN_ERR_ARGUMENT, &place,
                         "F32 tensors cannot be converted to dtype %d",
                         (int)out->dtype);
    }
    if (out->dtype == FANIN_DTYPE_F32)
        out->dtype = 0;
    if (out->timeout_ms == 0)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL,
                         "timeout_ms must not be 0: every pull has a deadline");
    return FANIN_OK;
}

/* Without an F32 tensor the conversion changes nothing. */
static fanin_dtype pull_dtype(const key_table *keys, fanin_dtype dtype)
{
    for (uint32_t i = 0; i < keys->count && dtype != 0; i++) {
        if (keys->entries[i].dtype == FANIN_DTYPE_F32)
            return dtype;
    }
    return 0;
}

/* ----------------------------------------------------------------- attempt */

static uint64_t lap(uint64_t *since)
{
    uint64_t now = clock_ns(), passed = now - *since;
    *since = now;
    return passed;
}

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
    bool coming = !p->patient && client_expects_more(p->client);
    p->patient = p->patient || coming;
    p->missing = client_count_ready(p->client) == there && !coming;
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
        p->use[i] = peer_ready(&client->peers[i]) && p->publication->shards[i].boxes;
    }
    size_t silent = agree_culprit(client, p->publication, p->use, p->at);
    if (silent == client->n_peers)
        return FANIN_OK;
    p->missing = true;
    return pull_blame(client->peers[silent].control, p->lost.key, error);
}

/* Connected, agreed, catalogs and plan at hand. */
static fanin_status get_ready(pull *p, fanin_error *error)
{
    fanin_client *client = p->client;
    fanin_result_info *info = &p->result->info;
    const agree_need need = {.without = plan_without, .cookie = p};
    p->cache->lacks_rank = false;
    uint64_t clock = clock_ns();
    fanin_status status = client_ensure_connected(client, p->patient, p->at, error);
    info->connect_ns += lap(&clock);
    p->missing = status != FANIN_OK;
    if (status == FANIN_OK && p->patient && deadline_passed(p->at))
        status = blame_silent(p, error);
    if (status != FANIN_OK)
        return status;
    size_t there = client_count_ready(client);
    status = agree(client, p->publication, p->options, &need, p->at, p->announced,
                   p->use, error);
    /* Its owner may want to free memory that is mapped here. */
    if (status == FANIN_ERR_PAUSED || status == FANIN_ERR_NOT_FOUND)
        path_unmap(client, p->publication);
    if (status == FANIN_ERR_NOT_FOUND) {
        plan_cache_drop(p->publication);
        tables_forget(p->publication);
    }
    info->wait_ns += lap(&clock);
    if (status == FANIN_OK)
        status =
            tables_sync(client, p->publication, p->announced, p->use, p->at, error);
    info->catalog_ns += lap(&clock);
    if (status == FANIN_OK)
        status = plan_cache_make(p->cache, client, p->publication, p->use,
                                 p->destination, p->at, error);
    if (p->cache->lacks_rank)
        look_for_more(p, there);
    info->plan_ns += lap(&clock);
    return status;
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

/* Destinations on devices need CUDA, whatever the paths. */
static fanin_status look_at_ranges(pull *p, fanin_error *error)
{
    fanin_client *client = p->client;
    fanin_status status =
        plan_cache_ranges(p->cache, p->destination, &p->ranges, &p->n_ranges, error);
    bool devices = false;
    for (size_t i = 0; i < p->n_ranges && status == FANIN_OK; i++)
        devices = devices || p->ranges[i].device >= 0;
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

/* What the paths that were chosen read by. */
static fanin_status detail_plan(pull *p, path_goal *goal, fanin_error *error)
{
    client_work work;
    client_work_start(&work, p->client, p->at);
    fanin_status status =
        plan_cache_detail(p->cache, p->client, p->publication, goal, &work.stop, error);
    p->result->info.table_ns += goal->table_ns;
    return client_work_end(&work, status, error);
}

static fanin_status check_size(const pull *p, fanin_error *error)
{
    uint64_t bytes = p->cache->plan.plan->bytes;
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
            all_ask && (!p->needed[i] ||
                        path_reader_of(path_taken(p->publication, i)->path)->asks);
    if (!d->need || all_ask)
        return FANIN_OK;
    return d->need(d->cookie, 0, p->ranges->length, error);
}

/* Paths and what they need, then leases: nothing slow happens under a lease but reads. */
static fanin_status begin(pull *p, uint8_t *base, fanin_error *error)
{
    fanin_client *client = p->client;
    const path_plan *plan = &p->cache->plan;
    fanin_result_info *info = &p->result->info;
    uint64_t clock = clock_ns();
    memset(p->needed, 0, client->n_peers * sizeof *p->needed);
    for (size_t i = 0; i < plan->n_sources; i++)
        p->needed[plan->peer_of[i]] = plan->plan->ranks[i].n_pieces > 0;
    fanin_status status = check_size(p, error);
    if (status == FANIN_OK)
        status = look_at_ranges(p, error);
    info->plan_ns += lap(&clock);
    path_goal goal = {.ranges = p->ranges, .n_ranges = p->n_ranges, .base = base};
    if (status == FANIN_OK)
        status = path_prepare(client, p->publication, p->needed, &goal, p->at, error);
    info->connect_ns += lap(&clock);
    info->map_ns += goal.map_ns;
    if (status == FANIN_OK)
        status = need_whole(p, error);
    if (status == FANIN_OK)
        status = detail_plan(p, &goal, error);
    info->plan_ns += lap(&clock);
    if (status != FANIN_OK)
        return status;
    status = lease_round_begin(client, p->publication, p->announced, p->needed,
                               p->leases, p->at, error);
    info->begin_ns += lap(&clock);
    p->refused = status == FANIN_ERR_STALE;
    return status;
}

static fanin_status read_and_end(pull *p, uint8_t *base, fanin_error *error)
{
    fanin_result_info *info = &p->result->info;
    read_phase r = {.client = p->client,
                    .publication = p->publication,
                    .cache = p->cache,
                    .leases = p->leases,
                    .destination = p->destination,
                    .base = base,
                    .ranges = p->ranges,
                    .n_ranges = p->n_ranges,
                    .options = p->options,
                    .result = p->result};
    memset(p->result->served, 0, p->result->n_peers * sizeof *p->result->served);
    p->refused = false;
    fanin_status status = read_phase_run(&r, p->at, error);
    p->final = r.final;
    info->read_ns += r.last_ns - r.first_ns;
    info->fixed_ns = r.last_ns - r.first_ns; /* turned into the rest at the end */
    if (status != FANIN_OK)
        return status;
    uint64_t clock = clock_ns();
    if (p->options->verify) {
        status = verify_run(&r, p->at, error);
        p->final = r.final;
        info->verify_ns += lap(&clock);
        info->verified = status == FANIN_OK;
    }
    if (status != FANIN_OK)
        return status;
    status = lease_round_end(p->client, p->leases, p->at, error);
    info->end_ns += lap(&clock);
    return status;
}

static fanin_status attempt(pull *p, fanin_error *error)
{
    destination *d = p->destination;
    uint64_t started = clock_ns();
    p->refused = true;
    fanin_status status = get_ready(p, error);
    if (status != FANIN_OK)
        return status;
    identify(p);
    uint8_t *base = NULL;
    bool skip = false;
    uint64_t clock = clock_ns();
    status =
        d->agreed(d->cookie, p->publication->keys, &p->identity, &base, &skip, error);
    p->result->info.write_ns += lap(&clock);
    if (status != FANIN_OK || skip) {
        p->result->info.reused = skip;
        return status;
    }
    status = begin(p, base, error);
    if (status == FANIN_OK)
        status = read_and_end(p, base, error);
    lease_round_abandon(p->client, p->leases);
    p->attempt_ns = clock_ns() - started;
    return status;
}

/* ---------------------------------------------------------------- restarting */

static bool may_restart(pull *p, fanin_status status, const fanin_error *why)
{
    switch (status) {
    case FANIN_ERR_STALE:
        return p->options->max_attempts == 0 || p->refused ||
               p->result->info.stale + 1 < p->options->max_attempts;
    case FANIN_ERR_CLOSED:
        return true;
    case FANIN_ERR_UNREACHABLE:
        /* Lost on the way: its boxes may be had from a replica, or it is back. Found
           missing when the plan was made: nothing to try. */
        return !p->missing;
    case FANIN_ERR_TRANSPORT:
        /* A checksum that does not fit says nothing of the next attempt's bytes. */
        if (why->sys_errno == EBADMSG)
            return true;
        return ++p->transport_failures < MAX_TRANSPORT_FAILURES;
    default:
        return false;
    }
}

static fanin_status stale_error(const pull *p, fanin_error *error)
{
    const fanin_result_info *info = &p->result->info;
    error_place place = {.phase = p->stale.phase,
                         .address = p->stale.address,
                         .key = p->publication->name,
                         .rank_plus_1 = p->stale.rank + 1};
    if (info->stale < ADVISE_AFTER) {
        place.remedy = "pull again";
        return error_set(error, FANIN_ERR_STALE, &place, "%s", p->stale.message);
    }
    uint64_t stable = 0;
    for (size_t i = 0; i < p->client->n_peers; i++) {
        if (p->announced[i].stable_ns > stable)
            stable = p->announced[i].stable_ns;
    }
    place.remedy = "keep the weights stable for longer, raise the lease, or publish "
                   "snapshots";
    return error_set(
        error, FANIN_ERR_STALE, &place,
        "%u attempts were overtaken by the trainer: one takes %.1f ms, the "
        "weights are stable for %.1f ms (last: %s)",
        info->stale, (double)p->attempt_ns / 1e6, (double)stable / 1e6,
        p->stale.message);
}

/* The time went by with attempts to go on without something that was lost. */
static fanin_status lost_error(const pull *p, fanin_error *error)
{
    const fanin_error *lost = &p->lost;
    error_place place = {.phase = lost->phase,
                         .address = lost->address,
                         .key = lost->key,
                         .remedy = lost->remedy,
                         .rank_plus_1 = lost->rank + 1,
                         .sys_errno = lost->sys_errno};
    return error_set(error, FANIN_ERR_TIMEOUT, &place,
                     "the deadline passed after %u restarts (last: %s)",
                     p->result->info.restarts, lost->message);
}

static fanin_status pause_before_restart(pull *p, fanin_error *error)
{
    uint16_t random = 0;
    (void)random_bytes(&random, sizeof random); /* 0 will do as well */
    uint64_t widest = p->result->info.restarts < 8 ? p->result->info.restarts : 8;
    uint64_t ns = widest * 1000000 * random / 65536;
    deadline until = clock_ns() + ns;
    fanin_status status = FANIN_OK;
    while (status == FANIN_OK && !deadline_passed(until))
        status = client_step(p->client, p->at, until, "wait", error);
    return status;
}

static fanin_status pull_until_good(pull *p, fanin_error *error)
{
    fanin_error local = FANIN_ERROR_INIT;
    for (;;) {
        fanin_status status = attempt(p, &local);
        if (status == FANIN_OK)
            return status;
        bool again =
            may_restart(p, status, &local) && !p->destination->leak && !p->final;
        if (status == FANIN_ERR_STALE) {
            p->result->info.stale += !p->refused;
            p->stale = local;
        }
        if (again) {
            if (status != FANIN_ERR_STALE || p->refused)
                p->lost = local;
            p->result->info.restarts++;
            log_write(&p->client->log, FANIN_LOG_DEBUG, "restart", "%s", local.message);
            if (p->destination->restart)
                p->destination->restart(p->destination->cookie);
            status = pause_before_restart(p, &local);
            if (status == FANIN_OK)
                continue;
        }
        if (p->result->info.stale > 0 &&
            (status == FANIN_ERR_TIMEOUT || status == FANIN_ERR_STALE))
            return stale_error(p, error);
        /* An error of the agreement has a key, and tells of lost ranks itself. */
        if (status == FANIN_ERR_TIMEOUT && p->lost.status != FANIN_OK && !local.key[0])
            return lost_error(p, error);
        error_copy(error, &local);
        return status;
    }
}

/* -------------------------------------------------------------------- whole */

static void release(pull *p)
{
    free(p->announced);
    free(p->use);
    free(p->needed);
    free(p->leases);
    fanin_result_free(&p->result);
}

static fanin_status prepare(pull *p, fanin_error *error)
{
    size_t n = p->client->n_peers;
    p->publication = tables_of(p->client, p->options->publication);
    p->cache = p->publication ? plan_cache_of(p->publication, p->destination->plan_slot)
                              : NULL;
    p->announced = calloc(n, sizeof *p->announced);
    p->use = calloc(n, sizeof *p->use);
    p->needed = calloc(n, sizeof *p->needed);
    p->leases = calloc(n, sizeof *p->leases);
    p->result = result_create(n);
    if (!p->cache || !p->announced || !p->use || !p->needed || !p->leases || !p->result)
        return error_set_memory(error);
    uint64_t now = clock_ns();
    p->publication->used_ns = now;
    if (now > KEEP_MAPPED_NS)
        path_unmap_idle(p->client, now - KEEP_MAPPED_NS);
    return FANIN_OK;
}

static fanin_status complete(pull *p, uint64_t started, fanin_error *error)
{
    fanin_result_info *info = &p->result->info;
    uint64_t clock = clock_ns();
    fanin_status status = FANIN_OK;
    if (!info->reused)
        info->transport_checksums = result_guard(p->result, p->client, p->publication);
    p->identity.verified = info->verified;
    p->identity.transport_checksums = info->transport_checksums;
    if (p->destination->publish && !info->reused)
        status = p->destination->publish(p->destination->cookie, &p->identity, error);
    info->write_ns += lap(&clock);
    const plan *plan = p->cache->plan.plan;
    info->step = p->identity.step;
    memcpy(info->world_id, p->identity.world_id, sizeof info->world_id);
    info->bytes = plan->bytes;
    info->tensors = plan->tensors;
    info->total_ns = clock_ns() - started;
    info->fixed_ns = info->total_ns - info->fixed_ns;
    if (status == FANIN_OK)
        status = result_finish(p->result, p->client, p->publication, error);
    return status;
}

fanin_status pull_run(fanin_client *client, const fanin_pull_options *options,
                      destination *d, fanin_result **result_out, fanin_error *error)
{
    uint64_t started = clock_ns();
    pull p = {.client = client,
              .options = options,
              .destination = d,
              .at = deadline_in_ms(options->timeout_ms),
              .stale = FANIN_ERROR_INIT,
              .lost = FANIN_ERROR_INIT};
    fanin_status status = prepare(&p, error);
    if (status == FANIN_OK)
        status = pull_until_good(&p, error);
    if (status == FANIN_OK)
        status = complete(&p, started, error);
    if (status == FANIN_OK && result_out) {
        *result_out = p.result;
        p.result = NULL;
    }
    release(&p);
    return status;
}
