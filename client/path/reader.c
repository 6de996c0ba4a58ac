/* SPDX-License-Identifier: Apache-2.0 */
#include "path/reader.h"

#include "error_set.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------- choosing */

void path_set(path_round *r, size_t peer, const path_reader *path, const char *reason)
{
    path_state *s = path_state_of(r->client, r->publication, peer);
    s->path = path;
    snprintf(s->reason, sizeof s->reason, "%s", reason);
}

void path_choose(path_round *r, size_t peer, const path_reader *path,
                 const char *reason)
{
    const connection *c = r->client->peers[peer].control;
    path_set(r, peer, path, reason);
    log_write(&r->client->log, FANIN_LOG_INFO, "path", "rank %u at %s uses %s: %s",
              connection_peer(c)->rank, connection_text(c), path->name, reason);
}

bool path_is_allowed(const fanin_client *client, const path_reader *path)
{
    return !client->forced || client->forced == path;
}

/* A forced path. */
static fanin_status refuse(const path_round *r, size_t peer, const char *why,
                           fanin_error *error)
{
    const fanin_client *client = r->client;
    const connection *c = client->peers[peer].control;
    error_place place = connection_place(c, "connect");
    place.remedy = "use --path auto or stream, or set up what the path needs";
    return error_set(error, r->lacks ? FANIN_ERR_TRANSPORT : FANIN_ERR_UNSUPPORTED,
                     &place, "path %s to rank %u at %s is not possible: %s",
                     client->forced->name, connection_peer(c)->rank, connection_text(c),
                     why);
}

fanin_status path_give_up(path_round *r, size_t peer, const char *why,
                          fanin_error *error)
{
    const struct peer *p = &r->client->peers[peer];
    if (!peer_ready(p)) /* lost, which says nothing about paths */
        return error_copy(error, connection_fault(p->control));
    if (r->client->forced)
        return refuse(r, peer, why, error);
    path_choose(r, peer, r->fallback, why);
    return FANIN_OK;
}

fanin_status path_give_up_all(path_round *r, const bool *mask, const char *why,
                              fanin_error *error)
{
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < r->client->n_peers && status == FANIN_OK; i++) {
        if (mask[i])
            status = path_give_up(r, i, why, error);
    }
    return status;
}

fanin_status path_regions(path_round *r, bool *mask, const path_reader *path,
                          fanin_error *error)
{
    size_t n = r->client->n_peers;
    fanin_error *refused = calloc(n, sizeof *refused);
    if (!refused)
        return error_set_memory(error);
    for (size_t i = 0; i < n; i++)
        refused[i] = (fanin_error)FANIN_ERROR_INIT;
    fanin_status status = path_state_regions(r->client, r->publication, mask, path,
                                             r->at, refused, error);
    for (size_t i = 0; i < n && status == FANIN_OK; i++) {
        const path_state *s = path_taken(r->publication, i);
        if (!mask[i] || (s->regions && s->regions_path == path))
            continue;
        mask[i] = false;
        status = path_give_up(r, i, refused[i].message, error);
    }
    free(refused);
    return status;
}

bool path_is_offered(const fanin_client *client, size_t peer, const path_reader *path)
{
    return connection_peer(client->peers[peer].control)->paths &
           (UINT32_C(1) << path->number);
}

const char *path_not_offered(const fanin_client *client, size_t peer, const char *plain)
{
    const char *stranger = connection_stranger(client->peers[peer].control);
    return stranger ? stranger : plain;
}

bool path_is_local(const fanin_client *client, size_t peer)
{
    const msg_hello_ok *hello = connection_peer(client->peers[peer].control);
    return client->host[0] && strcmp(client->host, hello->host_id) == 0;
}

/* ----------------------------------------------------------------- reading */

connection *path_source(const path_reading *r, size_t source)
{
    return r->client->peers[r->plan->peer_of[source]].control;
}

/* Spans name the regions of the first arena; another one must be as large. */
fanin_status path_arena(const path_reading *r, size_t source, uint32_t *first_region,
                        fanin_error *error)
{
    size_t peer = r->plan->peer_of[source];
    const connection *c = r->client->peers[peer].control;
    const region_table *regions = path_taken(r->publication, peer)->regions;
    uint64_t first = r->leases[peer].first_region;
    uint32_t n = box_table_regions(r->publication->shards[peer].boxes);
    *first_region = r->leases[peer].first_region;
    for (uint32_t i = 0; i < n && first > 0; i++) {
        if (i + first < regions->count &&
            regions->entries[i + first].length >= regions->entries[i].length)
            continue;
        error_place place = connection_place(c, "begin");
        return error_set(error, FANIN_ERR_PROTOCOL, &place,
                         "rank %u at %s granted an arena outside of its regions",
                         connection_peer(c)->rank, connection_text(c));
    }
    return FANIN_OK;
}

fanin_status path_make_spans(const path_planning *how, size_t source, void **detail,
                             fanin_error *error)
{
    const path_plan *p = how->plan;
    plan_spans *spans = NULL;
    fanin_status status =
        plan_spans_build(p->plan, how->publication->keys, p->sources, source,
                         path_taken(how->publication, p->peer_of[source])->regions,
                         p->reader_of[source]->span_rule, how->stop, &spans, error);
    *detail = spans;
    return status;
}

void path_forget_spans(void *detail)
{
    plan_spans *spans = detail;
    plan_spans_free(&spans);
}
