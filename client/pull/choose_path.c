/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/choose_path.h"

#include "error_set.h"
#include "host.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------- what could be tried */

static bool offers(const fanin_client *client, size_t index, fanin_path path)
{
    return connection_peer(client->peers[index].control)->paths & (UINT32_C(1) << path);
}

static bool on_this_host(const fanin_client *client, size_t index)
{
    char here[HOST_ID_SIZE];
    host_id(here);
    const msg_hello_ok *hello = connection_peer(client->peers[index].control);
    return here[0] && strcmp(here, hello->host_id) == 0;
}

/* Whether UCX could be tried with a rank; if not, *why says why. */
static bool ucx_may_do(const fanin_client *client, size_t index, fanin_path path,
                       char why[PATH_REASON])
{
    const msg_hello_ok *hello = connection_peer(client->peers[index].control);
    if (!client->ucx)
        snprintf(why, PATH_REASON, "%.250s", client->ucx_missing);
    else if (hello->ucx_version[0] == 0)
        snprintf(why, PATH_REASON, "the rank has no UCX");
    else if (!ucx_versions_match(ucx_version(client->ucx), hello->ucx_version))
        snprintf(why, PATH_REASON, "UCX %s here and %s there cannot talk to each other",
                 ucx_version(client->ucx), hello->ucx_version);
    else if (!offers(client, index, path))
        snprintf(why, PATH_REASON, "the rank does not offer %s on this connection",
                 fanin_path_name(path));
    else if (path == FANIN_PATH_CMA && !on_this_host(client, index))
        snprintf(why, PATH_REASON,
                 "cma needs the rank on the same host and in the same pid and "
                 "ipc namespaces");
    else
        return true;
    return false;
}

/* Whether what the rank holds is worth a look for cuda_ipc. */
static bool ipc_in_question(const fanin_client *client, size_t index)
{
    fanin_path forced = client->config.path;
    return (forced == FANIN_PATH_AUTO || forced == FANIN_PATH_CUDA_IPC) &&
           offers(client, index, FANIN_PATH_CUDA_IPC) && on_this_host(client, index);
}

/* The path worth trying with a rank; AUTO: none, *why says why. */
static fanin_path candidate(const path_round *r, size_t index, char why[PATH_REASON])
{
    const fanin_client *client = r->client;
    fanin_path forced = client->config.path;
    if (ipc_in_question(client, index)) {
        region_kinds kinds = region_kinds_of(r->publication->shards[index].regions);
        if (kinds == KINDS_CUDA)
            return FANIN_PATH_CUDA_IPC;
        if (kinds == KINDS_BOTH || forced == FANIN_PATH_CUDA_IPC) {
            snprintf(why, PATH_REASON,
                     kinds == KINDS_BOTH
                         ? "the rank holds both host and device memory"
                         : "the rank holds host memory, which cuda_ipc does not read");
            return FANIN_PATH_AUTO;
        }
    } else if (forced == FANIN_PATH_CUDA_IPC) {
        snprintf(why, PATH_REASON,
                 on_this_host(client, index)
                     ? "the rank does not offer cuda_ipc on this connection"
                     : "cuda_ipc needs the rank on the same host and in the same pid "
                       "and ipc namespaces");
        return FANIN_PATH_AUTO;
    }
    fanin_path path = forced != FANIN_PATH_AUTO     ? forced
                      : on_this_host(client, index) ? FANIN_PATH_CMA
                                                    : FANIN_PATH_RDMA;
    return ucx_may_do(client, index, path, why) ? path : FANIN_PATH_AUTO;
}

/* ------------------------------------------------------------------ sorting */

/* The undecided ranks; those whose path needs no looking at are decided here. */
static void find_undecided(path_round *r, bool *mask)
{
    fanin_client *client = r->client;
    for (size_t i = 0; i < client->n_peers; i++) {
        mask[i] = false;
        if (!r->want[i] || r->publication->shards[i].path != FANIN_PATH_AUTO)
            continue;
        if (client->config.path == FANIN_PATH_STREAM)
            path_set(r, i, FANIN_PATH_STREAM, "asked for");
        else if (client->peers[i].spoiled && client->config.path == FANIN_PATH_AUTO)
            path_set(r, i, FANIN_PATH_STREAM, client->peers[i].reason);
        else
            mask[i] = true;
    }
}

/* Which kinds of memory ranks hold is told by any region table: one that registers nothing. */
static fanin_status learn_kinds(path_round *r, const bool *mask, bool *scratch,
                                fanin_error *error)
{
    bool any = false;
    for (size_t i = 0; i < r->client->n_peers; i++) {
        scratch[i] = mask[i] && ipc_in_question(r->client, i) &&
                     !r->publication->shards[i].regions;
        any = any || scratch[i];
    }
    return any ? path_regions(r, scratch, FANIN_PATH_STREAM, error) : FANIN_OK;
}

/* Parts the undecided into those for cuda_ipc (mask) and those for UCX by *path_out (ucx);
   AUTO: there are none of the latter. */
static fanin_status sort_out(path_round *r, bool *mask, bool *ucx, fanin_path *path_out,
                             fanin_error *error)
{
    const fanin_client *client = r->client;
    *path_out = FANIN_PATH_AUTO;
    for (size_t i = 0; i < client->n_peers; i++) {
        ucx[i] = false;
        if (!mask[i] || r->publication->shards[i].path != FANIN_PATH_AUTO) {
            mask[i] = false;
            continue;
        }
        char why[PATH_REASON];
        fanin_path path = candidate(r, i, why);
        if (path == FANIN_PATH_CUDA_IPC)
            continue;
        mask[i] = false;
        /* One UCX client serves one path; ranks that need another one use stream. */
        bool other = (*path_out != FANIN_PATH_AUTO && *path_out != path) ||
                     (client->one_sided && client->one_sided_path != path);
        if (path != FANIN_PATH_AUTO && !other) {
            *path_out = path;
            ucx[i] = true;
            continue;
        }
        fanin_status status = path_give_up(
            r, i,
            path == FANIN_PATH_AUTO ? why : "other ranks use another one-sided path",
            error);
        if (status != FANIN_OK)
            return status;
    }
    return FANIN_OK;
}

/* ------------------------------------------------------------------- whole */

static void learn_goal(path_round *r)
{
    for (size_t i = 0; i < r->goal->n_ranges; i++) {
        int device = r->goal->ranges[i].device;
        bool known = device < 0;
        for (size_t j = 0; j < r->n_devices && !known; j++)
            known = r->devices[j] == device;
        r->host = r->host || device < 0;
        if (!known && r->n_devices < GPU_MAX_DEVICES)
            r->devices[r->n_devices++] = device;
    }
}

/* Remote keys for ranks that have an endpoint and new tables. */
static fanin_status refresh_keys(path_round *r, bool *mask, fanin_error *error)
{
    bool any = false;
    for (size_t i = 0; i < r->client->n_peers; i++) {
        const shard_table *s = &r->publication->shards[i];
        mask[i] = r->want[i] && !s->rkeys &&
                  (s->path == FANIN_PATH_CMA || s->path == FANIN_PATH_RDMA);
        any = any || mask[i];
    }
    return any ? path_ucx_keys(r, mask, r->client->one_sided_path, error) : FANIN_OK;
}

static fanin_status decide(path_round *r, bool *mask, bool *ucx, fanin_error *error)
{
    fanin_path path = FANIN_PATH_AUTO;
    find_undecided(r, mask);
    fanin_status status = learn_kinds(r, mask, ucx, error);
    if (status == FANIN_OK)
        status = sort_out(r, mask, ucx, &path, error);
    if (status == FANIN_OK)
        status = path_try_ipc(r, mask, error);
    if (status == FANIN_OK && path != FANIN_PATH_AUTO)
        status = path_try_ucx(r, ucx, path, error);
    return status == FANIN_OK ? refresh_keys(r, mask, error) : status;
}

fanin_status path_prepare(fanin_client *client, publication *p, const bool *want,
                          path_goal *goal, deadline at, fanin_error *error)
{
    path_round r = {
        .client = client, .publication = p, .want = want, .goal = goal, .at = at};
    goal->gather_device = -1;
    goal->map_ns = 0;
    bool *masks = calloc(client->n_peers, 2 * sizeof(*masks));
    r.refused = calloc(client->n_peers, sizeof(*r.refused));
    learn_goal(&r);
    fanin_status status = masks && r.refused
                              ? decide(&r, masks, masks + client->n_peers, error)
                              : error_set_memory(error);
    for (size_t i = 0; i < client->n_peers && status == FANIN_OK; i++) {
        if (!want[i])
            continue;
        client->peers[i].path = p->shards[i].path;
        memcpy(client->peers[i].reason, p->shards[i].reason, PATH_REASON);
    }
    if (client->ipc)
        ipc_map_sweep(client->ipc); /* what newer tables do not list */
    free(masks);
    free(r.refused);
    return status;
}
