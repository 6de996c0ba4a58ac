/* SPDX-License-Identifier: Apache-2.0 */
#include "device/device_kit.h"

#include "error_set.h"
#include <stdlib.h>
#include <string.h>

struct device_kit {
    gpu *g;
    gpu_stream *streams[GPU_MAX_DEVICES];
    void *landing; /* pinned; NULL: none yet */
    /* the lanes */
    int device;                        /* that they are on */
    uint64_t device_chunk, host_chunk; /* bytes of one; 0: none */
    uint8_t *device_memory, *host_memory;
    gpu_stream *lanes[GATHER_LANES];
};

device_kit *device_kit_create(gpu *g)
{
    device_kit *kit = calloc(1, sizeof(*kit));
    if (kit) {
        kit->g = g;
        kit->device = -1;
    }
    return kit;
}

static void drop_device_side(device_kit *kit)
{
    for (int i = 0; i < GATHER_LANES; i++)
        gpu_stream_destroy(&kit->lanes[i]);
    if (kit->device_memory)
        gpu_free(kit->g, kit->device, kit->device_memory);
    kit->device_memory = NULL;
    kit->device_chunk = 0;
    kit->device = -1;
}

static void drop_host_side(device_kit *kit)
{
    if (kit->host_memory)
        gpu_host_free(kit->g, kit->host_memory);
    kit->host_memory = NULL;
    kit->host_chunk = 0;
}

void device_kit_destroy(device_kit **kit)
{
    if (!*kit)
        return;
    for (int i = 0; i < GPU_MAX_DEVICES; i++)
        gpu_stream_destroy(&(*kit)->streams[i]);
    drop_device_side(*kit); /* its streams end first: they write the host's side */
    drop_host_side(*kit);
    if ((*kit)->landing)
        gpu_host_free((*kit)->g, (*kit)->landing);
    free(*kit);
    *kit = NULL;
}

fanin_status device_kit_stream(device_kit *kit, int device, gpu_stream **out,
                               fanin_error *error)
{
    if (device < 0 || device >= GPU_MAX_DEVICES)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "there is no CUDA device %d",
                         device);
    fanin_status status = FANIN_OK;
    if (!kit->streams[device])
        status = gpu_stream_create(kit->g, device, &kit->streams[device], error);
    *out = kit->streams[device];
    return status;
}

static fanin_status make_device_side(device_kit *kit, int device, uint64_t chunk,
                                     fanin_error *error)
{
    if (kit->device == device && kit->device_chunk >= chunk)
        return FANIN_OK;
    drop_device_side(kit);
    void *memory = NULL;
    fanin_status status =
        gpu_alloc(kit->g, device, (size_t)(chunk * GATHER_LANES), &memory, error);
    if (status != FANIN_OK)
        return status;
    kit->device = device;
    kit->device_memory = memory;
    for (int i = 0; i < GATHER_LANES && status == FANIN_OK; i++)
        status = gpu_stream_create(kit->g, device, &kit->lanes[i], error);
    if (status == FANIN_OK)
        kit->device_chunk = chunk;
    else
        drop_device_side(kit);
    return status;
}

static fanin_status make_host_side(device_kit *kit, uint64_t chunk, fanin_error *error)
{
    if (kit->host_chunk >= chunk)
        return FANIN_OK;
    drop_host_side(kit);
    void *memory = NULL;
    fanin_status status =
        gpu_host_alloc(kit->g, (size_t)(chunk * GATHER_LANES), &memory, error);
    if (status != FANIN_OK)
        return status;
    kit->host_memory = memory;
    kit->host_chunk = chunk;
    return FANIN_OK;
}

fanin_status device_kit_lanes(device_kit *kit, int device, uint64_t chunk, bool pinned,
                              gather_lane lanes[GATHER_LANES], fanin_error *error)
{
    fanin_status status = make_device_side(kit, device, chunk, error);
    if (status == FANIN_OK && pinned)
        status = make_host_side(kit, chunk, error);
    if (status != FANIN_OK)
        return status;
    for (uint64_t i = 0; i < GATHER_LANES; i++)
        lanes[i] = (gather_lane){.stream = kit->lanes[i],
                                 .device = kit->device_memory + i * kit->device_chunk,
                                 .host = pinned ? kit->host_memory + i * kit->host_chunk
                                                : NULL};
    return FANIN_OK;
}

fanin_status device_kit_landing(device_kit *kit, void **out, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    if (!kit->landing)
        status = gpu_host_alloc(kit->g, LANDING_BYTES, &kit->landing, error);
    *out = kit->landing;
    return status;
}
