/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/pull.h"

#include "adapter/adapter.h"
#include "error_set.h"
#include "text.h"
#include "versioned.h"
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

fanin_result *result_create(size_t n_peers)
{
    fanin_result *r = calloc(1, sizeof *r);
    if (!r)
        return NULL;
    r->served = calloc(n_peers, sizeof *r->served);
    r->n_peers = n_peers;
    if (!r->served)
        fanin_result_free(&r);
    return r;
}

fanin_result *result_of_several(fanin_result *r, const fanin_result_info *whole,
                                const char *how)
{
    if (!r)
        r = result_create(1);
    if (r && !r->ranks_json)
        r->ranks_json = strdup("[]");
    if (!r || !r->ranks_json) {
        fanin_result_free(&r);
        return NULL;
    }
    fanin_result_info *info = &r->info;
    info->step = whole->step;
    memcpy(info->world_id, whole->world_id, sizeof info->world_id);
    info->bytes = whole->bytes;
    info->tensors = whole->tensors;
    info->restarts = whole->restarts;
    info->stale = whole->stale;
    info->verified = whole->verified;
    info->total_ns = whole->total_ns;
    info->verify_ns += whole->verify_ns;
    char before[PATH_REASON];
    snprintf(before, sizeof before, "%s", r->reason);
    text t = text_in(r->reason, sizeof r->reason);
    text_add(&t, "%s%s%s", how, before[0] ? "; " : "", before);
    info->ranks_json = r->ranks_json;
    info->path_reason = r->reason;
    return r;
}

void fanin_result_free(fanin_result **result)
{
    if (!result || !*result)
        return;
    free((*result)->ranks_json);
    free((*result)->served);
    free(*result);
    *result = NULL;
}

void fanin_result_get(const fanin_result *result, fanin_result_info *info)
{
    static const fanin_result_info nothing;
    versioned_write(info, result ? &result->info : &nothing, sizeof nothing);
}

/* How the bytes of one rank were guarded. */
static fanin_checksums guard_of(const peer *p, const path_reader *path)
{
    return path && path->guard ? path->guard(p->control) : FANIN_CHECKSUMS_LOCAL;
}

fanin_checksums result_guard(const fanin_result *r, const fanin_client *client,
                             const publication *p)
{
    bool any = false, all = true;
    for (size_t i = 0; i < r->n_peers; i++) {
        if (!r->served[i].used)
            continue;
        fanin_checksums guard = guard_of(&client->peers[i], path_taken(p, i)->path);
        any = any || guard == FANIN_CHECKSUMS_ALL;
        all = all && guard != FANIN_CHECKSUMS_NONE;
    }
    if (!all)
        return FANIN_CHECKSUMS_NONE;
    return any ? FANIN_CHECKSUMS_ALL : FANIN_CHECKSUMS_LOCAL;
}

static json_t *describe_rank(const peer *p, const path_state *taken, const served *s)
{
    return json_pack(
        "{s:i,s:s,s:s,s:s,s:I,s:I,s:I,s:i,s:o}", "rank",
        p->control->known ? (int)p->control->peer.rank : -1, "address",
        p->control->text, "path", s->used ? taken->path->name : "none", "reason",
        taken->reason, "bytes", (json_int_t)s->bytes, "reads", (json_int_t)s->reads,
        "read_ns", (json_int_t)s->read_ns, "connections", (int)s->connections,
        "checksums",
        guard_json(s->used ? guard_of(p, taken->path) : FANIN_CHECKSUMS_NONE));
}

fanin_status result_finish(fanin_result *r, const fanin_client *client,
                           const publication *p, fanin_error *error)
{
    json_t *list = json_array();
    uint64_t most = 0;
    r->info.reads = 0;
    for (size_t i = 0; list && i < r->n_peers; i++) {
        const served *s = &r->served[i];
        const path_state *taken = path_taken(p, i);
        r->info.reads += s->reads;
        if (s->used && s->bytes >= most) {
            most = s->bytes;
            r->info.path = taken->path->number;
            snprintf(r->reason, sizeof r->reason, "%s", taken->reason);
        }
        if (json_array_append_new(list, describe_rank(&client->peers[i], taken, s)) !=
            0) {
            json_decref(list);
            list = NULL;
        }
    }
    free(r->ranks_json);
    r->ranks_json = list ? json_dumps(list, JSON_COMPACT) : NULL;
    json_decref(list);
    if (!r->ranks_json)
        return error_set_memory(error);
    r->info.ranks_json = r->ranks_json;
    r->info.path_reason = r->reason;
    return FANIN_OK;
}

/* ---------------------------------------------------------------------- log */

#define LINES_A_SECOND 10
#define SECOND UINT64_C(1000000000)

void pull_log_part(const pull *p, trace_name name, fanin_status status, uint64_t ns)
{
    const fanin_client *client = p->client;
    if (!log_wants(&client->log, FANIN_LOG_DEBUG))
        return;
    log_write(&client->log, FANIN_LOG_DEBUG, "phase",
              "trace %s/%u attempt %u: %s %.3f ms%s%s", client->shared.trace_id,
              client->place.pull, client->place.attempt, trace_name_text(name),
              (double)ns / 1e6, status == FANIN_OK ? "" : ", ",
              status == FANIN_OK ? "" : fanin_status_name(status));
}

static bool may_tell(fanin_client *client, uint64_t now, unsigned *left_out)
{
    if (now - client->pulls_told.since_ns >= SECOND) {
        client->pulls_told.since_ns = now;
        client->pulls_told.told = 0;
    }
    if (client->pulls_told.told == LINES_A_SECOND) {
        client->pulls_told.left_out++;
        return false;
    }
    client->pulls_told.told++;
    *left_out = client->pulls_told.left_out;
    client->pulls_told.left_out = 0;
    return true;
}

static void add_phases(text *line, const fanin_result_info *info)
{
    const struct {
        const char *name;
        uint64_t ns;
    } phases[] = {{"connect", info->connect_ns}, {"wait", info->wait_ns},
                  {"catalog", info->catalog_ns}, {"plan", info->plan_ns},
                  {"begin", info->begin_ns},     {"read", info->read_ns},
                  {"scatter", info->scatter_ns}, {"verify", info->verify_ns},
                  {"end", info->end_ns},         {"apply", info->apply_ns},
                  {"write", info->write_ns}};
    for (size_t i = 0; i < sizeof phases / sizeof *phases; i++)
        text_add(line, "%s%s %.2f", i ? ", " : "", phases[i].name,
                 (double)phases[i].ns / 1e6);
}

/* Those that it read, or wanted to. */
static void add_ranks(text *line, const pull *p)
{
    char ranks[200];
    bool any = false;
    for (size_t i = 0; i < p->client->n_peers; i++)
        any = any || p->needed[i];
    if (any)
        rank_list_text(p->client, p->needed, ranks, sizeof ranks);
    text_add(line, " of %s,", any ? ranks : "no rank");
}

void pull_log_whole(pull *p, fanin_status status, const fanin_error *error)
{
    fanin_client *client = p->client;
    unsigned left_out = 0;
    uint64_t now = clock_ns();
    if (!log_wants(&client->log, FANIN_LOG_INFO) || !p->result || !p->needed ||
        !may_tell(client, now, &left_out))
        return;
    const fanin_result_info *info = &p->result->info;
    char chars[900];
    text line = text_in(chars, sizeof chars);
    text_add(&line, "trace %s/%u: %s step %" PRIu64, client->shared.trace_id,
             client->place.pull, p->options->publication, p->identity.step);
    add_ranks(&line, p);
    text_add(&line, " %" PRIu64 " tensors, %" PRIu64 " bytes", p->tensors, p->bytes);
    if (status == FANIN_OK && info->reused)
        text_add(&line, ", which were there");
    else if (status == FANIN_OK)
        text_add(&line, " by %s", fanin_path_name(info->path));
    if (p->delta)
        text_add(&line, ", %" PRIu64 " bytes of patches since step %" PRIu64,
                 info->patch_bytes, info->base_step);
    if (info->whole_because)
        text_add(&line, ", whole: %s", info->whole_because);
    text_add(&line, ", %.2f ms (", (double)(now - p->started_ns) / 1e6);
    add_phases(&line, info);
    text_add(&line, "), %u restarts, %u stale", info->restarts, info->stale);
    if (left_out > 0)
        text_add(&line, "; %u pulls before it were not told", left_out);
    if (status != FANIN_OK)
        text_add(&line, "; %s: %s", fanin_status_name(status),
                 error ? error->message : fanin_status_text(status));
    log_write(&client->log, FANIN_LOG_INFO, "pull", "%s", chars);
}
