/* SPDX-License-Identifier: Apache-2.0 */
#include "device/devices.h"

#include "error_set.h"
#include <stdio.h>
#include <stdlib.h>

fanin_status devices_create(fanin_client *client, fanin_error *error)
{
    client->devices = calloc(1, sizeof *client->devices);
    return client->devices ? FANIN_OK : error_set_memory(error);
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

void devices_disconnect(fanin_client *client)
{
    if (!client->devices)
        return;
    ipc_map_destroy(&client->devices->map);
    device_memory_destroy(&client->devices->memory);
}

void devices_free(fanin_client *client)
{
    free(client->devices);
    client->devices = NULL;
}
