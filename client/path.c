/* SPDX-License-Identifier: Apache-2.0 */
#include "path.h"

#include "digest.h"
#include "error_set.h"
#include "host_id.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A probe on a healthy path takes microseconds on one host, milliseconds over a fabric
   (the first get also connects). */
#define PROBE_MS 3000

static const char *const names[] = {"auto", "stream", "cma", "rdma", "cuda_ipc"};

const char *fanin_path_name(fanin_path path)
{
    return path >= 0 && path < (fanin_path)(sizeof(names) / sizeof(*names))
               ? names[path]
               : NULL;
}

fanin_path fanin_path_from_name(const char *name)
{
    for (size_t i = 0; name && i < sizeof(names) / sizeof(*names); i++) {
        if (strcmp(name, names[i]) == 0)
            return (fanin_path)i;
    }
    return -1;
}

static void set_path(peer *p, fanin_path path, const char *reason)
{
    p->path = path;
    snprintf(p->reason, sizeof(p->reason), "%s", reason);
}

/* ------------------------------------------------------- what could be tried */

/* The one-sided path worth trying with a rank; AUTO: none, *why says why. */
static fanin_path candidate(const fanin_client *client, const peer *p, char why[160])
{
    const msg_hello_ok *hello = connection_peer(p->control);
    fanin_path forced = client->config.path;
    char here[HOST_ID_SIZE];
    host_id(here);
    bool same_host = here[0] && strcmp(here, hello->host_id) == 0;
    fanin_path path = forced != FANIN_PATH_AUTO ? forced
                      : same_host               ? FANIN_PATH_CMA
                                                : FANIN_PATH_RDMA;
    if (!client->ucx)
        snprintf(why, 160, "%.150s", client->ucx_missing);
    else if (hello->ucx_version[0] == 0)
        snprintf(why, 160, "the rank has no UCX");
    else if (!ucx_versions_match(ucx_version(client->ucx), hello->ucx_version))
        snprintf(why, 160, "UCX %s here and %s there cannot talk to each other",
                 ucx_version(client->ucx), hello->ucx_version);
    else if (!(hello->paths & (UINT32_C(1) << path)))
        snprintf(why, 160, "the rank does not offer %s on this connection",
                 fanin_path_name(path));
    else if (path == FANIN_PATH_CMA && !same_host)
        snprintf(why, 160,
                 "cma needs the rank on the same host and in the same pid and "
                 "ipc namespaces");
    else
        return path;
    return FANIN_PATH_AUTO;
}

static fanin_status refuse(const fanin_client *client, const peer *p, const char *why,
                           fanin_error *error)
{
    error_place place = connection_place(p->control, "connect");
    place.remedy = "use --path auto or stream, or set up what the path needs";
    return error_set(error, FANIN_ERR_UNSUPPORTED, &place,
                     "path %s to rank %u at %s is not possible: %s",
                     fanin_path_name(client->config.path),
                     connection_peer(p->control)->rank, connection_text(p->control),
                     why);
}

/* One rank's one-sided path did not come about: stream, or an error if it was forced or if the
   rank itself was lost. */
static fanin_status give_up(fanin_client *client, size_t index, const char *why,
                            fanin_error *error)
{
    peer *p = &client->peers[index];
    if (!peer_ready(p)) { /* lost, which says nothing about paths */
        error_copy(error, connection_fault(p->control));
        return connection_fault(p->control)->status;
    }
    if (client->config.path != FANIN_PATH_AUTO)
        return refuse(client, p, why, error);
    peer_drop_paths(client, index);
    set_path(p, FANIN_PATH_STREAM, why);
    log_write(&client->log, FANIN_LOG_INFO, "path", "rank %u at %s uses stream: %s",
              connection_peer(p->control)->rank, connection_text(p->control), why);
    return FANIN_OK;
}

/* -------------------------------------------------------------- open_path */

typedef struct opening {
    fanin_client *client;
    size_t peer;
    size_t *left;
    bool ok;
    fanin_error error;
} opening;

static void on_open(void *cookie, connection *c, message_type type, body *b)
{
    opening *o = cookie;
    msg_open_path reply;
    o->error = (fanin_error)FANIN_ERROR_INIT;
    --*o->left;
    if (type != MSG_OPEN_PATH_OK) {
        connection_reply_error(c, "connect", type, b, &o->error);
        return;
    }
    if (decode_open_path(b, &reply) != FANIN_OK) {
        error_set(&o->error, FANIN_ERR_PROTOCOL, NULL, "malformed UCX address");
        return;
    }
    o->ok = ucx_endpoint_create(o->client->one_sided, reply.address.data,
                                reply.address.size, &o->client->peers[o->peer].endpoint,
                                &o->error) == FANIN_OK;
}

static fanin_status open_client(fanin_client *client, fanin_path path,
                                fanin_error *error)
{
    if (client->one_sided && client->one_sided_path == path)
        return FANIN_OK;
    (void)client_close_one_sided(client); /* no read is under way here */
    client->one_sided_path = path;
    return ucx_client_create(client->ucx, (ucx_path)path, &client->log,
                             &client->one_sided, error);
}

/* Exchanges addresses with all candidates at once. */
static fanin_status open_endpoints(fanin_client *client, bool *want, fanin_path path,
                                   deadline at, fanin_error *error)
{
    opening *o = calloc(client->n_peers, sizeof(*o));
    if (!o)
        return error_set_memory(error);
    size_t left = 0;
    msg_open_path m = {.path = path};
    m.address.data = ucx_client_address(client->one_sided, &m.address.size);
    for (size_t i = 0; i < client->n_peers; i++) {
        if (!want[i])
            continue;
        o[i] = (opening){.client = client, .peer = i, .left = &left};
        left++;
        connection *c = client->peers[i].control;
        uint64_t request = connection_next_request(c);
        if (connection_get_state(c) == CONNECTION_READY)
            encode_open_path(connection_out(c), request, MSG_OPEN_PATH, &m);
        connection_ask(c, request, on_open, &o[i]);
    }
    fanin_status status = client_run(client, &left, at, "connect", error);
    for (size_t i = 0; i < client->n_peers; i++) {
        if (!want[i])
            continue;
        connection_forget(client->peers[i].control, &o[i]);
        if (status == FANIN_OK && !o[i].ok) {
            want[i] = false;
            status = give_up(client, i, o[i].error.message, error);
        }
    }
    free(o);
    return status;
}

/* ------------------------------------------------------------ remote keys */

static fanin_status unpack_keys(peer *p, shard_table *s, fanin_error *error)
{
    if (s->rkeys)
        return FANIN_OK;
    s->rkeys = calloc(s->regions->count + 1, sizeof(*s->rkeys));
    if (!s->rkeys)
        return error_set_memory(error);
    for (uint32_t i = 0; i < s->regions->count; i++) {
        const region_entry *r = &s->regions->entries[i];
        fanin_status status =
            ucx_rkey_unpack(p->endpoint, r->rkey, r->rkey_size, &s->rkeys[i], error);
        if (status != FANIN_OK)
            return status;
    }
    return FANIN_OK;
}

/* ------------------------------------------------------------------ probe */

typedef struct probe {
    bool posted, done;
    int ucx_status;
} probe;

static void on_probed(void *cookie, uint64_t tag, int ucx_status)
{
    probe *p = &((probe *)cookie)[tag];
    p->done = true;
    p->ucx_status = ucx_status;
}

static bool all_probed(const probe *probes, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (probes[i].posted && !probes[i].done)
            return false;
    }
    return true;
}

/* Waits for the probes; endpoints of those that never answer are closed, which drains them. */
static fanin_status await_probes(fanin_client *client, probe *probes, deadline at,
                                 fanin_error *error)
{
    deadline by = deadline_sooner(at, deadline_in_ms(PROBE_MS));
    fanin_status status = FANIN_OK;
    while (!all_probed(probes, client->n_peers) && !deadline_passed(by) &&
           status == FANIN_OK) {
        if (!ucx_client_progress(client->one_sided))
            status = client_step(client, at, deadline_sooner(by, deadline_in_ms(1)),
                                 "connect", error);
    }
    for (size_t i = 0; i < client->n_peers; i++) {
        if (probes[i].posted && !probes[i].done) {
            probes[i].ucx_status = -1;
            peer_drop_paths(client, i);
        }
    }
    return status;
}

static uint64_t probe_length(const region_entry *r)
{
    return r->length < 8 ? r->length : 8;
}

/* Reads a few bytes from the first region of each; no lease is needed, they are thrown away. */
static fanin_status probe_all(fanin_client *client, publication *p, bool *want,
                              fanin_path path, deadline at, fanin_error *error)
{
    uint64_t *landing = calloc(client->n_peers, sizeof(*landing));
    probe *probes = calloc(client->n_peers, sizeof(*probes));
    ucx_local *local = NULL;
    fanin_memory host = {FANIN_MEMORY_HOST, -1};
    fanin_status status = landing && probes ? FANIN_OK : error_set_memory(error);
    if (status == FANIN_OK)
        status =
            ucx_local_create(client->one_sided, landing,
                             client->n_peers * sizeof(*landing), host, &local, error);
    char(*why)[160] = calloc(client->n_peers, sizeof(*why));
    for (size_t i = 0; i < client->n_peers && status == FANIN_OK && why; i++) {
        const shard_table *s = &p->shards[i];
        if (!want[i] || s->regions->count == 0)
            continue;
        const region_entry *r = &s->regions->entries[0];
        fanin_error failed = FANIN_ERROR_INIT;
        probes[i].posted = true;
        if (ucx_get(client->peers[i].endpoint, s->rkeys[0], r->base, &landing[i],
                    probe_length(r), local, on_probed, probes, i,
                    &failed) != FANIN_OK) {
            probes[i] = (probe){.posted = true, .done = true, .ucx_status = -1};
            snprintf(why[i], sizeof(*why), "%.150s", failed.message);
        }
    }
    if (status == FANIN_OK)
        status = await_probes(client, probes, at, error);
    for (size_t i = 0; i < client->n_peers && status == FANIN_OK && why; i++) {
        if (!want[i])
            continue;
        if (probes[i].posted && probes[i].ucx_status != 0) {
            if (!why[i][0])
                snprintf(why[i], sizeof(*why), "a probe read by %s failed",
                         fanin_path_name(path));
            want[i] = false;
            status = give_up(client, i, why[i], error);
            continue;
        }
        char reason[160];
        const char *name = fanin_path_name(path);
        snprintf(reason, sizeof(reason), "a probe read by %s succeeded (%.60s)",
                 name ? name : "?",
                 client->peers[i].endpoint
                     ? ucx_endpoint_transport(client->peers[i].endpoint)
                     : "");
        set_path(&client->peers[i], path, reason);
        log_write(&client->log, FANIN_LOG_INFO, "path", "rank %u at %s uses %s: %s",
                  connection_peer(client->peers[i].control)->rank,
                  connection_text(client->peers[i].control), fanin_path_name(path),
                  reason);
    }
    ucx_local_destroy(&local);
    free(why);
    free(landing);
    free(probes);
    return status;
}

/* --------------------------------------------------------------- decision */

static fanin_status keys_for_all(fanin_client *client, publication *p, bool *want,
                                 fanin_path path, deadline at, fanin_error *error)
{
    fanin_status status = tables_sync_regions(client, p, want, path, at, error);
    for (size_t i = 0; i < client->n_peers && status == FANIN_OK; i++) {
        fanin_error why = FANIN_ERROR_INIT;
        if (!want[i] || unpack_keys(&client->peers[i], &p->shards[i], &why) == FANIN_OK)
            continue;
        want[i] = false;
        status = give_up(client, i, why.message, error);
    }
    return status;
}

static fanin_status try_one_sided(fanin_client *client, publication *p, bool *fresh,
                                  fanin_path path, deadline at, fanin_error *error)
{
    fanin_error why = FANIN_ERROR_INIT;
    fanin_status status = open_client(client, path, &why);
    for (size_t i = 0; i < client->n_peers && status != FANIN_OK; i++) {
        if (fresh[i] && give_up(client, i, why.message, error) != FANIN_OK)
            return FANIN_ERR_UNSUPPORTED;
    }
    if (status != FANIN_OK)
        return FANIN_OK;
    status = open_endpoints(client, fresh, path, at, error);
    if (status == FANIN_OK)
        status = keys_for_all(client, p, fresh, path, at, error);
    if (status == FANIN_OK)
        status = probe_all(client, p, fresh, path, at, error);
    return status;
}

/* The path that undecided peers are to try; AUTO: all are decided now. */
static fanin_status sort_out(fanin_client *client, const bool *want, bool *fresh,
                             fanin_path *path_out, fanin_error *error)
{
    *path_out = FANIN_PATH_AUTO;
    for (size_t i = 0; i < client->n_peers; i++) {
        peer *p = &client->peers[i];
        fresh[i] = false;
        if (!want[i] || p->path != FANIN_PATH_AUTO)
            continue;
        if (client->config.path == FANIN_PATH_STREAM) {
            set_path(p, FANIN_PATH_STREAM, "asked for");
            continue;
        }
        char why[160];
        fanin_path path = candidate(client, p, why);
        if (path == FANIN_PATH_AUTO) {
            fanin_status status = give_up(client, i, why, error);
            if (status != FANIN_OK)
                return status;
            continue;
        }
        /* One UCX client serves one path; ranks that need another one use stream. */
        bool other = client->one_sided && client->one_sided_path != path;
        if ((*path_out != FANIN_PATH_AUTO && *path_out != path) || other) {
            fanin_status status =
                give_up(client, i, "other ranks use another one-sided path", error);
            if (status != FANIN_OK)
                return status;
            continue;
        }
        *path_out = path;
        fresh[i] = true;
    }
    return FANIN_OK;
}

fanin_status path_prepare(fanin_client *client, publication *p, const bool *want,
                          deadline at, fanin_error *error)
{
    bool *mask = calloc(client->n_peers, sizeof(*mask));
    if (!mask)
        return error_set_memory(error);
    fanin_path path;
    fanin_status status = sort_out(client, want, mask, &path, error);
    if (status == FANIN_OK && path != FANIN_PATH_AUTO)
        status = try_one_sided(client, p, mask, path, at, error);
    bool any = false;
    for (size_t i = 0; i < client->n_peers; i++) {
        const peer *q = &client->peers[i];
        mask[i] = want[i] && q->path != FANIN_PATH_STREAM &&
                  q->path != FANIN_PATH_AUTO && !p->shards[i].rkeys;
        any = any || mask[i];
    }
    if (status == FANIN_OK && any)
        status = keys_for_all(client, p, mask, client->one_sided_path, at, error);
    free(mask);
    return status;
}
