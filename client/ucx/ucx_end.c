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

ucx_endpoint *ucx_end_to(fanin_client *client, size_t peer)
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
    device_memory_unregister(memory);
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
