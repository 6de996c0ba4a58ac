/* SPDX-License-Identifier: Apache-2.0 */
#include "ucx/ucx_end.h"

#include "device/devices.h"
#include "error_set.h"
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#define DRAIN_MS 5000

fanin_status ucx_end_create(fanin_client *client, fanin_error *error)
{
    fanin_error why = FANIN_ERROR_INIT;
    ucx_end *end = calloc(1, sizeof *end);
    client->one_sided = end;
    if (!end)
        return error_set_memory(error);
    if (client->config.no_ucx || !path_is_allowed(client, &ucx_reader))
        snprintf(end->missing, sizeof end->missing,
                 client->config.no_ucx ? "UCX is switched off"
                                       : "a path that needs no UCX was asked for");
    else if (ucx_load(&client->log, &end->ucx, &why) != FANIN_OK)
        snprintf(end->missing, sizeof end->missing, "%.255s", why.message);
    client->shared.ucx_version = end->ucx ? ucx_version(end->ucx) : NULL;
    return FANIN_OK;
}

/* The endpoint to the peer; one to an earlier incarnation is closed first. NULL: there is none. */
static ucx_endpoint *ucx_end_to(fanin_client *client, size_t peer)
{
    const ucx_end *end = client->one_sided;
    if (end->peers && end->peers[peer].endpoint &&
        end->peers[peer].generation != client->peers[peer].generation)
        (void)ucx_end_drop(client, peer, ucx_end_drain_by());
    return end->peers ? end->peers[peer].endpoint : NULL;
}

deadline ucx_end_drain_by(void)
{
    return deadline_in_ms(DRAIN_MS);
}

bool ucx_end_drop(fanin_client *client, size_t peer, deadline at)
{
    ucx_peer *p = client->one_sided->peers ? &client->one_sided->peers[peer] : NULL;
    if (!p || !p->endpoint)
        return true;
    path_void(client, peer);
    bool drained = ucx_endpoint_close(&p->endpoint, at);
    *p = (ucx_peer){.endpoint = NULL};
    return drained;
}

bool ucx_end_close(fanin_client *client)
{
    ucx_end *end = client->one_sided;
    device_memory *memory = client->devices ? client->devices->memory : NULL;
    deadline at = ucx_end_drain_by();
    if (!end)
        return true;
    for (size_t i = 0; end->peers && i < client->n_peers; i++)
        (void)ucx_end_drop(client, i, at);
    free(end->peers);
    end->peers = NULL;
    ucx_local_destroy(&end->staging_local);
    bool drained = ucx_client_destroy(&end->client);
    drained = device_memory_close(memory, drained);
    if (end->staging && drained)
        munmap(end->staging, STAGING_BYTES);
    end->staging = NULL;
    return drained;
}

void ucx_end_free(fanin_client *client)
{
    if (!client->one_sided)
        return;
    ucx_unload(&client->one_sided->ucx);
    free(client->one_sided);
    client->one_sided = NULL;
}

/* --------------------------------------------------- trying it with ranks */

/* The path rdma, which UCX carries: endpoints, remote keys, a probe read. */

/* A probe on a healthy path takes milliseconds over a fabric (the first get also connects). */
#define PROBE_MS 3000
/* Turns of UCX in which answers that have come are taken, and one more for each rank. */
#define PROBE_TURNS 64

/* The rank is given up: what was built so far goes. */
static void drop_tried(path_round *r, size_t index)
{
    if (peer_ready(&r->client->peers[index]))
        (void)ucx_end_drop(r->client, index, ucx_end_drain_by());
}

/* -------------------------------------------------------------- open_path */

static fanin_status make_endpoint(path_round *r, size_t peer,
                                  const msg_open_path *reply, void *cookie,
                                  fanin_error *why)
{
    ucx_end *end = r->client->one_sided;
    ucx_endpoint *e;
    (void)cookie;
    fanin_status status = ucx_endpoint_create(end->client, reply->address.data,
                                              reply->address.size, &e, why);
    if (status == FANIN_OK)
        end->peers[peer] = (ucx_peer){.endpoint = e,
                                      .generation = r->client->peers[peer].generation,
                                      .serial = ++end->serials};
    return status;
}

static fanin_status open_client(const path_round *r, fanin_error *error)
{
    fanin_client *client = r->client;
    ucx_end *end = client->one_sided;
    gpu *g = client->devices->g;
    gpu_device device;
    const char *pci = NULL; /* of the GPU that an RDMA adapter should be near to */
    if (!end->client)
        (void)ucx_end_close(client); /* no read is under way here */
    if (!end->peers)
        end->peers = calloc(client->n_peers, sizeof *end->peers);
    if (!end->peers)
        return error_set_memory(error);
    if (end->client)
        return FANIN_OK;
    if (r->devices.n > 0 && g &&
        gpu_device_get(g, r->devices.device[0], &device, NULL) == FANIN_OK)
        pci = device.pci;
    return ucx_client_create(end->ucx, UCX_PATH_RDMA, pci, &client->log, &end->client,
                             error);
}

/* Exchanges addresses with all candidates at once. */
static fanin_status open_endpoints(path_round *r, bool *want, fanin_error *error)
{
    fanin_client *client = r->client;
    bool *lacking = calloc(client->n_peers, sizeof *lacking);
    if (!lacking)
        return error_set_memory(error);
    msg_open_path m = {.path = FANIN_PATH_RDMA};
    m.address.data = ucx_client_address(client->one_sided->client, &m.address.size);
    for (size_t i = 0; i < client->n_peers; i++) {
        lacking[i] = want[i] && !ucx_end_to(client, i);
        want[i] = want[i] && !lacking[i];
    }
    fanin_status status = path_open(r, lacking, &m, make_endpoint, NULL, error);
    for (size_t i = 0; i < client->n_peers; i++)
        want[i] = want[i] || lacking[i];
    free(lacking);
    return status;
}

/* ------------------------------------------------------------ remote keys */

/* What UCX is not given to read: GPU memory that needs another path, or none. */
static fanin_status check_kinds(const region_table *regions, fanin_error *error)
{
    for (uint32_t i = 0; i < regions->count; i++) {
        const region_entry *r = &regions->entries[i];
        if (r->memory == FANIN_MEMORY_CUDA && r->rkey_size == 0)
            return error_set(error, FANIN_ERR_UNSUPPORTED, NULL,
                             "the rank's GPU memory is not registered for rdma (a UCX "
                             "with CUDA and GPUDirect RDMA are needed there)");
    }
    return FANIN_OK;
}

typedef struct key_hold {
    path_hold hold;  /* first */
    uint64_t serial; /* of the endpoint that the keys go with */
    uint32_t n;
    ucx_rkey *keys[];
} key_hold;

ucx_rkey *const *ucx_keys_of(const path_state *s)
{
    return ((const key_hold *)s->hold)->keys;
}

static void drop_keys(fanin_client *client, size_t peer, path_hold *hold)
{
    key_hold *h = (key_hold *)hold;
    const ucx_end *end = client->one_sided;
    bool live = end->peers && end->peers[peer].serial == h->serial;
    for (uint32_t i = 0; live && i < h->n; i++)
        ucx_rkey_destroy(&h->keys[i]);
    free(h);
}

static fanin_status unpack_keys(path_round *r, size_t peer, work_stop *stop,
                                fanin_error *error)
{
    path_state *s = path_state_of(r->client, r->publication, peer);
    const ucx_peer *end = &r->client->one_sided->peers[peer];
    if (s->hold)
        return FANIN_OK;
    fanin_status status = check_kinds(s->regions, error);
    if (status != FANIN_OK)
        return status;
    key_hold *h = calloc(1, sizeof *h + s->regions->count * sizeof *h->keys);
    if (!h)
        return error_set_memory(error);
    h->hold.drop = drop_keys;
    h->serial = end->serial;
    for (; h->n < s->regions->count && status == FANIN_OK; h->n++) {
        const region_entry *e = &s->regions->entries[h->n];
        status = work_stopped_after(stop, WORK_STEPS)
                     ? work_broken_off(stop, "connect", "remote keys were read", error)
                     : ucx_rkey_unpack(end->endpoint, e->rkey, e->rkey_size,
                                       &h->keys[h->n], error);
    }
    if (status == FANIN_OK)
        s->hold = &h->hold;
    else
        drop_keys(r->client, peer, &h->hold);
    return status;
}

static fanin_status take_keys(path_round *r, size_t peer, void *cookie,
                              fanin_error *why)
{
    work_stop *stop = cookie;
    fanin_status status = unpack_keys(r, peer, stop, why);
    if (status != FANIN_OK && !stop->stopped)
        drop_tried(r, peer);
    return status;
}

/* Regions and remote keys of peers with mask[i], whose endpoints are there. */
static fanin_status get_remote_keys(path_round *r, bool *mask, fanin_error *error)
{
    client_work work;
    client_work_start(&work, r->client, r->at);
    fanin_status status = path_regions(r, mask, &ucx_reader, error);
    if (status == FANIN_OK)
        status = path_try(r, mask, take_keys, &work.stop, error);
    return client_work_end(&work, status, error);
}

/* ------------------------------------------------------------------ probe */

typedef struct probe {
    bool posted, judged; /* judged: by its answer, or given up without one */
    int ucx_status;
    char why[PATH_REASON];
} probe;

static void on_probed(void *cookie, uint64_t tag, int ucx_status)
{
    probe *p = &((probe *)cookie)[tag];
    if (p->judged)
        return; /* recalled: its endpoint is gone, whatever the read came to */
    p->judged = true;
    p->ucx_status = ucx_status;
}

static bool all_judged(const probe *probes, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (probes[i].posted && !probes[i].judged)
            return false;
    }
    return true;
}

/* Takes the answers that are there; true: there were some. */
static bool take_probe_answers(const fanin_client *client)
{
    bool any = false;
    for (size_t turn = 0; turn < PROBE_TURNS + client->n_peers; turn++) {
        if (!ucx_client_progress(client->one_sided->client))
            break;
        any = true;
    }
    return any;
}

/* Endpoints of probes that were never answered are closed, which recalls the reads. False: some
   could not be recalled, they may still call back. */
static bool recall_probes(fanin_client *client, probe *probes)
{
    bool recalled = true;
    deadline at = ucx_end_drain_by();
    for (size_t i = 0; i < client->n_peers; i++) {
        if (!probes[i].posted || probes[i].judged)
            continue;
        probes[i].judged = true;
        probes[i].ucx_status = -1;
        recalled = ucx_end_drop(client, i, at) && recalled;
    }
    return recalled;
}

static fanin_status await_probes(fanin_client *client, const probe *probes, deadline at,
                                 fanin_error *error)
{
    deadline by = deadline_sooner(at, deadline_in_ms(PROBE_MS));
    fanin_status status = FANIN_OK;
    /* The clock is read before the answers are taken: that this process was stopped for a while
       says nothing about the path. */
    bool late = false;
    while (!late && status == FANIN_OK) {
        late = deadline_passed(by);
        bool any = take_probe_answers(client);
        if (all_judged(probes, client->n_peers))
            break;
        if (!any && !late)
            status = client_step(client, at, deadline_sooner(by, deadline_in_ms(1)),
                                 "connect", error);
    }
    return status;
}

static uint64_t probe_length(const region_entry *r)
{
    return r->length < 8 ? r->length : 8;
}

/* Posts a read of a few bytes from the first region of each; no lease is needed, they are
   thrown away. */
static void post_probes(path_round *r, const bool *want, probe *probes,
                        uint64_t *landing, const ucx_local *local)
{
    fanin_client *client = r->client;
    for (size_t i = 0; i < client->n_peers; i++) {
        const path_state *s = path_taken(r->publication, i);
        if (!want[i] || s->regions->count == 0)
            continue;
        const region_entry *first = &s->regions->entries[0];
        fanin_error failed = FANIN_ERROR_INIT;
        probes[i].posted = true;
        if (ucx_get(client->one_sided->peers[i].endpoint, ucx_keys_of(s)[0],
                    first->base, &landing[i], probe_length(first), local, on_probed,
                    probes, i, &failed) == FANIN_OK)
            continue;
        probes[i] = (probe){.posted = true, .judged = true, .ucx_status = -1};
        snprintf(probes[i].why, sizeof probes[i].why, "%.250s", failed.message);
    }
}

static fanin_status judge_probe(path_round *r, size_t peer, void *cookie,
                                fanin_error *why)
{
    const probe *p = (const probe *)cookie + peer;
    char reason[PATH_REASON];
    if (p->posted && p->ucx_status != 0) {
        drop_tried(r, peer);
        return error_set(why, FANIN_ERR_TRANSPORT, NULL, "%s",
                         p->why[0] ? p->why : "a probe read by rdma failed");
    }
    snprintf(reason, sizeof reason, "a probe read by rdma succeeded (%.60s)",
             ucx_endpoint_transport(r->client->one_sided->peers[peer].endpoint));
    path_choose(r, peer, &ucx_reader, reason);
    return FANIN_OK;
}

/* UCX was closed for want of another way to recall a read: what it carried takes stream. */
static fanin_status go_without(path_round *r, bool *want, fanin_error *error)
{
    for (size_t i = 0; i < r->client->n_peers; i++)
        want[i] = r->want[i] && !path_state_of(r->client, r->publication, i)->path;
    return path_give_up_all(r, want, "a probe read could not be recalled", error);
}

static fanin_status probe_all(path_round *r, bool *want, fanin_error *error)
{
    fanin_client *client = r->client;
    uint64_t *landing = calloc(client->n_peers, sizeof *landing);
    probe *probes = calloc(client->n_peers, sizeof *probes);
    ucx_local *local = NULL;
    fanin_memory host = {FANIN_MEMORY_HOST, -1};
    fanin_status status = landing && probes ? FANIN_OK : error_set_memory(error);
    if (status == FANIN_OK)
        status =
            ucx_local_create(client->one_sided->client, landing,
                             client->n_peers * sizeof *landing, host, &local, error);
    bool recalled = true, closed = false;
    if (status == FANIN_OK) {
        post_probes(r, want, probes, landing, local);
        status = await_probes(client, probes, r->at, error);
        recalled = recall_probes(client, probes);
    }
    ucx_local_destroy(&local);
    if (!recalled) {
        recalled = ucx_end_close(client);
        closed = true;
    }
    if (status == FANIN_OK)
        status = closed ? go_without(r, want, error)
                        : path_try(r, want, judge_probe, probes, error);
    if (!recalled)
        return status; /* what the reads may still write stays */
    free(landing);
    free(probes);
    return status;
}

/* ------------------------------------------------------------------- whole */

/* Whether UCX could be tried with a rank. */
static fanin_status find_objection(path_round *r, size_t peer, void *cookie,
                                   fanin_error *why)
{
    const connection *c = r->client->peers[peer].control;
    const msg_hello_ok *hello = &c->peer;
    const ucx_end *end = r->client->one_sided;
    const char *plain = NULL;
    (void)cookie;
    if (!end->ucx)
        return error_set(why, FANIN_ERR_UNSUPPORTED, NULL, "%s", end->missing);
    if (hello->ucx_version[0] == 0)
        return error_set(why, FANIN_ERR_UNSUPPORTED, NULL, "the rank has no UCX");
    if (!ucx_versions_match(ucx_version(end->ucx), hello->ucx_version))
        return error_set(why, FANIN_ERR_UNSUPPORTED, NULL,
                         "UCX %s here and %s there cannot talk to each other",
                         ucx_version(end->ucx), hello->ucx_version);
    if (!c->is_unix && !connection_tls(c))
        plain = "nobody proves who is at the other end of this connection: rdma needs "
                "the launch's secret, or certificates";
    else if (!path_is_offered(r->client, peer, &ucx_reader))
        plain = "the rank does not offer rdma on this connection";
    return plain ? error_set(why, FANIN_ERR_UNSUPPORTED, NULL, "%s",
                             path_not_offered(r->client, peer, plain))
                 : FANIN_OK;
}

static fanin_status try_rdma(path_round *r, bool *fresh, fanin_error *error)
{
    fanin_error why = FANIN_ERROR_INIT;
    /* Without a client there are no endpoints that would have to go. */
    r->lacks = open_client(r, &why) != FANIN_OK;
    if (r->lacks)
        return path_give_up_all(r, fresh, why.message, error);
    fanin_status status = open_endpoints(r, fresh, error);
    if (status == FANIN_OK)
        status = get_remote_keys(r, fresh, error);
    if (status == FANIN_OK)
        status = probe_all(r, fresh, error);
    return status;
}

fanin_status ucx_probe(path_round *r, bool *open, fanin_error *error)
{
    bool any = false;
    r->lacks = !r->client->one_sided->ucx;
    fanin_status status = path_try(r, open, find_objection, NULL, error);
    for (size_t i = 0; i < r->client->n_peers; i++)
        any = any || open[i];
    if (status == FANIN_OK && any)
        status = try_rdma(r, open, error);
    for (size_t i = 0; i < r->client->n_peers; i++)
        open[i] = false;
    return status;
}
