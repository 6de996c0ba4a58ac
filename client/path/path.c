/* SPDX-License-Identifier: Apache-2.0 */
#include "path/path.h"

#include "error_set.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One peer, whatever the publication. */
struct path_peer {
    uint64_t generation; /* of the connection that the rest is about */
    uint64_t serial;     /* grows whenever what was decided before is void */
    char avoided[PATH_REASON];
};

/* ------------------------------------------------------------------ keeping */

fanin_status path_states_open(fanin_client *client, publication *p, fanin_error *error)
{
    if (!client->paths)
        client->paths = calloc(client->n_peers, sizeof *client->paths);
    if (!client->paths)
        return error_set_memory(error);
    if (p->paths)
        return FANIN_OK;
    p->paths = calloc(1, sizeof *p->paths + p->n_peers * sizeof *p->paths->peers);
    if (!p->paths)
        return error_set_memory(error);
    return FANIN_OK;
}

void path_state_drop(fanin_client *client, path_state *s, size_t peer)
{
    if (s->hold)
        s->hold->drop(client, peer, s->hold);
    s->hold = NULL;
    s->path = NULL;
}

static void drop_regions(fanin_client *client, path_state *s, size_t peer)
{
    path_state_drop(client, s, peer);
    region_table_free(&s->regions);
    s->regions_path = NULL;
}

void path_states_free(fanin_client *client, publication *p)
{
    for (size_t i = 0; p->paths && i < p->n_peers; i++)
        drop_regions(client, &p->paths->peers[i], i);
    free(p->paths);
    p->paths = NULL;
}

void path_states_close(fanin_client *client)
{
    free(client->paths);
    client->paths = NULL;
}

/* ------------------------------------------------------------------ serials */

static struct path_peer *look_at(fanin_client *client, size_t peer)
{
    struct path_peer *p = &client->paths[peer];
    if (p->generation != client->peers[peer].generation) {
        p->generation = client->peers[peer].generation;
        p->avoided[0] = '\0';
        p->serial++;
    }
    return p;
}

static path_state *state_made_for(fanin_client *client, publication *p, size_t peer,
                                  uint64_t generation, uint64_t version)
{
    path_state *s = &p->paths->peers[peer];
    uint64_t serial = look_at(client, peer)->serial;
    if (s->generation != generation || s->version != version)
        drop_regions(client, s, peer); /* other regions may be other memory */
    else if (s->serial != serial)
        path_state_drop(client, s, peer);
    s->generation = generation;
    s->version = version;
    s->serial = serial;
    return s;
}

path_state *path_state_of(fanin_client *client, publication *p, size_t peer)
{
    const shard_table *tables = &p->shards[peer];
    return state_made_for(client, p, peer, tables->generation, tables->version);
}

path_state *path_state_ahead(fanin_client *client, publication *p, size_t peer,
                             uint64_t version)
{
    return state_made_for(client, p, peer, client->peers[peer].generation, version);
}

const path_state *path_taken(const publication *p, size_t peer)
{
    static const path_state none;
    return p->paths ? &p->paths->peers[peer] : &none;
}

void path_void(fanin_client *client, size_t peer)
{
    if (client->paths)
        client->paths[peer].serial++;
}

void path_avoid(fanin_client *client, size_t peer, const char *why)
{
    struct path_peer *p = look_at(client, peer);
    snprintf(p->avoided, sizeof p->avoided, "%.250s", why);
    p->serial++;
}

const char *path_avoided(fanin_client *client, size_t peer)
{
    const struct path_peer *p = look_at(client, peer);
    return p->avoided[0] ? p->avoided : NULL;
}

/* ------------------------------------------------------------------ regions */

/* A refusal of one rank's, which concerns nobody else. That the publication is gone or away is
   no matter of the path that was asked about. */
static bool is_refusal(const fanin_client *client, const fetch *f, fanin_error *refused)
{
    fanin_status status = f->error.status;
    bool of_publication = status == FANIN_ERR_STALE || status == FANIN_ERR_PAUSED ||
                          status == FANIN_ERR_NOT_FOUND;
    if (status == FANIN_OK || of_publication || !peer_ready(&client->peers[f->peer]))
        return false;
    error_copy(&refused[f->peer], &f->error);
    return true;
}

/* The first error that is not a rank's own. */
static fanin_status drop_refused(const fanin_client *client, const fetch *fetches,
                                 size_t n, fanin_status status, fanin_error *refused,
                                 fanin_error *error)
{
    if (status == FANIN_OK || status == FANIN_ERR_CANCELLED ||
        status == FANIN_ERR_TIMEOUT)
        return status;
    for (size_t i = 0; i < n; i++) {
        if (fetches[i].error.status != FANIN_OK &&
            !is_refusal(client, &fetches[i], refused))
            return error_copy(error, &fetches[i].error);
    }
    return FANIN_OK;
}

/* Of a table that is here, maybe since before the boxes were. */
static fanin_status check_regions(const peer *owner, const shard_table *tables,
                                  const path_state *s, fanin_error *error)
{
    if (box_table_regions(tables->boxes) <= s->regions->count)
        return FANIN_OK;
    error_place place = connection_place(owner->control, "catalog");
    return error_set(error, FANIN_ERR_PROTOCOL, &place,
                     "rank %u at %s has boxes in a region that its table does not list",
                     owner->control->peer.rank, owner->control->text);
}

void path_regions_request(const publication *p, size_t peer, uint64_t version,
                          const path_reader *path, fetch *f)
{
    *f = (fetch){.peer = peer, .type = MSG_REGIONS};
    snprintf(f->request.publication, sizeof f->request.publication, "%s", p->name);
    f->request.catalog_version = version;
    f->request.path = path ? path->number : WIRE_KEYS_NONE;
}

/* Those that came. */
static fanin_status take_region_tables(fanin_client *client, publication *p,
                                       const fetch *fetches, size_t n,
                                       const path_reader *path, client_work *work,
                                       fanin_error *error)
{
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < n && status == FANIN_OK; i++) {
        const fetch *f = &fetches[i];
        path_state *s = &p->paths->peers[f->peer];
        if (f->error.status != FANIN_OK)
            continue;
        status = region_table_decode(f->data.data, f->data.size, &work->stop,
                                     &s->regions, error);
        if (status != FANIN_OK)
            status = tables_end_decoding(work, &client->peers[f->peer], status, error);
        s->regions_path = path;
    }
    return status;
}

fanin_status path_state_regions(fanin_client *client, publication *p, const bool *want,
                                const path_reader *path, deadline at,
                                fanin_error *refused, fanin_error *error)
{
    fetch *fetches = calloc(client->n_peers, sizeof *fetches);
    if (!fetches)
        return error_set_memory(error);
    size_t n = 0;
    for (size_t i = 0; i < client->n_peers; i++) {
        path_state *s = want[i] ? path_state_of(client, p, i) : NULL;
        if (!s || !p->shards[i].boxes || (s->regions && s->regions_path == path))
            continue;
        drop_regions(client, s, i);
        path_regions_request(p, i, p->shards[i].version, path, &fetches[n++]);
    }
    client_work work;
    client_work_start(&work, client, at);
    fanin_status status = fetch_all(client, fetches, n, at, error);
    status = drop_refused(client, fetches, n, status, refused, error);
    if (status == FANIN_OK)
        status = take_region_tables(client, p, fetches, n, path, &work, error);
    for (size_t i = 0; i < client->n_peers && status == FANIN_OK; i++) {
        path_state *s = &p->paths->peers[i];
        if (want[i] && s->regions && p->shards[i].boxes)
            status = check_regions(&client->peers[i], &p->shards[i], s, error);
        if (status != FANIN_OK)
            drop_regions(client, s, i);
    }
    fetch_free(fetches, n);
    free(fetches);
    return status;
}

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
              c->peer.rank, c->text, path->name, reason);
}

bool path_is_allowed(const fanin_client *client, const path_reader *path)
{
    return !client->forced || client->forced == path;
}

/* A forced path. */
static fanin_status refuse_forced(const path_round *r, size_t peer, const char *why,
                                  fanin_error *error)
{
    const fanin_client *client = r->client;
    const connection *c = client->peers[peer].control;
    error_place place = connection_place(c, "connect");
    place.remedy = "use --path auto or stream, or set up what the path needs";
    return error_set(error, r->lacks ? FANIN_ERR_TRANSPORT : FANIN_ERR_UNSUPPORTED,
                     &place, "path %s to rank %u at %s is not possible: %s",
                     client->forced->name, c->peer.rank, c->text, why);
}

fanin_status path_give_up(path_round *r, size_t peer, const char *why,
                          fanin_error *error)
{
    const struct peer *p = &r->client->peers[peer];
    if (!peer_ready(p)) /* lost, which says nothing about paths */
        return error_copy(error, &p->control->fault);
    if (r->client->forced)
        return refuse_forced(r, peer, why, error);
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

fanin_status path_try(path_round *r, bool *mask, path_try_fn fn, void *cookie,
                      fanin_error *error)
{
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < r->client->n_peers && status == FANIN_OK; i++) {
        fanin_error why = FANIN_ERROR_INIT;
        if (!mask[i] || fn(r, i, cookie, &why) == FANIN_OK)
            continue;
        mask[i] = false;
        status = why.status == FANIN_ERR_TIMEOUT || why.status == FANIN_ERR_CANCELLED
                     ? error_copy(error, &why)
                     : path_give_up(r, i, why.message, error);
    }
    return status;
}

/* One rank is asked to open a path. */
typedef struct opening {
    path_round *round;
    size_t peer, *left; /* left: who has not answered */
    path_opened_fn opened;
    void *cookie;
    fanin_error why;
} opening;

static void on_opened(void *cookie, connection *c, message_type type, body *b)
{
    opening *o = cookie;
    msg_open_path reply;
    --*o->left;
    if (type != MSG_OPEN_PATH_OK)
        connection_reply_error(c, "connect", type, b, &o->why);
    else if (decode_open_path(b, &reply) != FANIN_OK)
        error_set(&o->why, FANIN_ERR_PROTOCOL, NULL, "a malformed answer");
    else
        (void)o->opened(o->round, o->peer, &reply, o->cookie, &o->why);
}

static fanin_status was_opened(path_round *r, size_t peer, void *cookie,
                               fanin_error *why)
{
    const opening *all = cookie;
    (void)r;
    return error_copy(why, &all[peer].why);
}

fanin_status path_open(path_round *r, bool *mask, const msg_open_path *m,
                       path_opened_fn opened, void *cookie, fanin_error *error)
{
    size_t left = 0, n = r->client->n_peers;
    opening *all = calloc(n, sizeof *all);
    if (!all)
        return error_set_memory(error);
    for (size_t i = 0; i < n; i++) {
        connection *c = r->client->peers[i].control;
        if (!mask[i])
            continue;
        all[i] = (opening){r, i, &left, opened, cookie, FANIN_ERROR_INIT};
        left++;
        if (c->state == CONNECTION_READY)
            encode_open_path(connection_out(c), c->next_request, MSG_OPEN_PATH, m);
        connection_ask(c, on_opened, &all[i]);
    }
    fanin_status status = client_run(r->client, &left, r->at, "connect", error);
    for (size_t i = 0; i < n; i++) {
        if (mask[i])
            connection_forget(r->client->peers[i].control, &all[i]);
    }
    if (status == FANIN_OK)
        status = path_try(r, mask, was_opened, all, error);
    free(all);
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
    return client->peers[peer].control->peer.paths & (UINT32_C(1) << path->number);
}

const char *path_not_offered(const fanin_client *client, size_t peer, const char *plain)
{
    const char *stranger = client->peers[peer].control->stranger;
    return stranger ? stranger : plain;
}

bool path_is_local(const fanin_client *client, size_t peer)
{
    const msg_hello_ok *hello = &client->peers[peer].control->peer;
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
                         c->peer.rank, c->text);
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
