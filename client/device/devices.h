/* SPDX-License-Identifier: Apache-2.0 */
/** @file What a client has of CUDA; each part is made by the first pull that needs it. One thread.
    */
#ifndef DEVICES_H
#define DEVICES_H

#include "device/device_memory.h"
#include "device/ipc_map.h"
#include "net/client_state.h"

typedef struct devices {
    gpu *g;                /**< NULL: not loaded */
    char missing[256];     /**< why there is none; "": not tried yet */
    ipc_map *map;          /**< other processes' device memory; NULL: none yet */
    device_memory *memory; /**< own memory and streams; NULL: not needed yet */
    uint64_t
        gather_bytes; /**< for host memory a device more gathers for each so many */
} devices;

/** Fills client->devices; nothing is loaded yet. FANIN_ERR_MEMORY. */
fanin_status devices_create(fanin_client *client, fanin_error *error);
/** CUDA, loaded if need be; NULL: there is none, `missing` says why. */
gpu *client_gpu(fanin_client *client);
/** client->devices->map, made if need be. NULL: there is no CUDA, or no memory. */
ipc_map *devices_map(fanin_client *client);
/** Unmaps all memory of other processes, frees the own and ends the own streams, for which it waits
    5 s at most: what one may use is never freed then. After device_memory_close(). */
void devices_disconnect(fanin_client *client);
/** After that. */
void devices_free(fanin_client *client);

#endif
