/* SPDX-License-Identifier: Apache-2.0 */
#include "device/devices.h"

#include "error_set.h"
#include <stdio.h>
#include <stdlib.h>

/* Nothing is under way; a stream may wait for one of the caller's that a pull gave up waiting for.
   */
#define DRAIN_MS 5000

/* It needs a context, tables and staging on a device that is somebody else's, for a link more. */
#define GATHER_BYTES ((uint64_t)256 << 20)

fanin_status devices_create(fanin_client *client, fanin_error *error)
{
    client->devices = calloc(1, sizeof *client->devices);
    if (!client->devices)
        return error_set_memory(error);
    client->devices->gather_bytes = GATHER_BYTES;
    return FANIN_OK;
}

gpu *client_gpu(fanin_client *client)
{
    devices *d = client->devices;
    fanin_error why = FANIN_ERROR_INIT;
    if (d->g || d->missing[0])
        return d->g;
    if (gpu_load(&client->log, &d->g, &why) != FANIN_OK) {
        d->g = NULL;
        snprintf(d->missing, sizeof d->missing, "%.255s",
                 why.message[0] ? why.message : "there is no CUDA");
    }
    return d->g;
}

ipc_map *devices_map(fanin_client *client)
{
    devices *d = client->devices;
    if (!d->map && client_gpu(client))
        d->map = ipc_map_create(d->g);
    return d->map;
}

void devices_disconnect(fanin_client *client)
{
    devices *d = client->devices;
    if (!d)
        return;
    if (d->memory && !device_memory_drain(d->memory, deadline_in_ms(DRAIN_MS))) {
        log_write(
            &client->log, FANIN_LOG_ERROR, "device-stuck",
            "a stream did not end in %d ms: memory that it may use is never freed",
            DRAIN_MS);
        if (d->map)
            ipc_map_abandon(d->map);
    }
    ipc_map_destroy(&d->map);
    device_memory_destroy(&d->memory);
}

void devices_free(fanin_client *client)
{
    free(client->devices);
    client->devices = NULL;
}
