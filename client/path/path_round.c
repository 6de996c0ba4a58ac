/* SPDX-License-Identifier: Apache-2.0 */
#include "path/path_round.h"

#include "error_set.h"
#include <stdio.h>
#include <string.h>

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

/* ---------------------------------------------------------------- deciding */

void path_set(path_round *r, size_t index, fanin_path path, const char *reason)
{
    shard_table *s = &r->publication->shards[index];
    s->path = path;
    snprintf(s->reason, sizeof(s->reason), "%s", reason);
}

void path_choose(path_round *r, size_t index, fanin_path path, const char *reason)
{
    const connection *c = r->client->peers[index].control;
    path_set(r, index, path, reason);
    log_write(&r->client->log, FANIN_LOG_INFO, "path", "rank %u at %s uses %s: %s",
              connection_peer(c)->rank, connection_text(c), fanin_path_name(path),
              reason);
}

/* A forced path: what this host lacks is this host's fault. */
static fanin_status refuse(const path_round *r, size_t index, const char *why,
                           fanin_error *error)
{
    const fanin_client *client = r->client;
    const connection *c = client->peers[index].control;
    bool here = client->config.path == FANIN_PATH_CUDA_IPC ? client->gpu_missing[0]
                                                           : !client->ucx;
    error_place place = connection_place(c, "connect");
    place.remedy = "use --path auto or stream, or set up what the path needs";
    return error_set(error, here ? FANIN_ERR_TRANSPORT : FANIN_ERR_UNSUPPORTED, &place,
                     "path %s to rank %u at %s is not possible: %s",
                     fanin_path_name(client->config.path), connection_peer(c)->rank,
                     connection_text(c), why);
}

fanin_status path_give_up(path_round *r, size_t index, const char *why,
                          fanin_error *error)
{
    const peer *p = &r->client->peers[index];
    if (!peer_ready(p)) { /* lost, which says nothing about paths */
        error_copy(error, connection_fault(p->control));
        return connection_fault(p->control)->status;
    }
    if (r->client->config.path != FANIN_PATH_AUTO)
        return refuse(r, index, why, error);
    path_choose(r, index, FANIN_PATH_STREAM, why);
    return FANIN_OK;
}

region_kinds region_kinds_of(const region_table *regions)
{
    bool host = false, cuda = false;
    for (uint32_t i = 0; i < regions->count; i++) {
        bool on_device = regions->entries[i].memory == FANIN_MEMORY_CUDA;
        cuda = cuda || on_device;
        host = host || !on_device;
    }
    return !cuda ? KINDS_HOST : host ? KINDS_BOTH : KINDS_CUDA;
}

fanin_status path_regions(path_round *r, bool *mask, fanin_path path,
                          fanin_error *error)
{
    size_t n = r->client->n_peers;
    for (size_t i = 0; i < n; i++)
        r->refused[i] = (fanin_error)FANIN_ERROR_INIT;
    fanin_status status = tables_sync_regions(r->client, r->publication, mask, path,
                                              r->at, r->refused, error);
    for (size_t i = 0; i < n && status == FANIN_OK; i++) {
        const shard_table *s = &r->publication->shards[i];
        if (!mask[i] || (s->regions && s->regions_path == path))
            continue;
        mask[i] = false;
        status = path_give_up(r, i, r->refused[i].message, error);
    }
    return status;
}
