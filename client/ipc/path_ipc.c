/* SPDX-License-Identifier: Apache-2.0 */
/* The path cuda_ipc: other processes' allocations mapped for the devices that read them. */
#include "path/path_round.h"

#include "array.h"
#include "device/device_memory.h"
#include "error_set.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Kernels of one device that are to read one rank's regions. */
typedef struct reading {
    path_round *round;
    size_t index;
    shard_table *shard;
    uint32_t rank;
    int device;
    work_stop *stop;
} reading;

/* -------------------------------------------------------------- remote keys */

static fanin_status decode_keys(shard_table *s, uint32_t rank, fanin_error *error)
{
    if (s->ipc_keys)
        return FANIN_OK;
    ipc_key *keys = calloc((size_t)s->regions->count + 1, sizeof(*keys));
    if (!keys)
        return error_set_memory(error);
    for (uint32_t i = 0; i < s->regions->count; i++) {
        const region_entry *r = &s->regions->entries[i];
        if (r->memory == FANIN_MEMORY_CUDA &&
            ipc_key_decode(r->rkey, r->rkey_size, r->length, &keys[i]))
            continue;
        free(keys);
        if (r->rkey_size == 0)
            return error_set(error, FANIN_ERR_UNSUPPORTED, NULL,
                             "rank %u's GPU memory has no IPC handle (memory of "
                             "PyTorch's expandable_segments or of cudaMallocAsync has "
                             "none; use cudaMalloc's)",
                             rank);
        return error_set(error, FANIN_ERR_PROTOCOL, NULL,
                         "rank %u sent an IPC key that does not fit its region", rank);
    }
    s->ipc_keys = keys;
    return FANIN_OK;
}

/* ------------------------------------------------------------------ devices */

/* Whether @p device may read all GPUs that the rank's regions are on. */
static fanin_status check_reach(const reading *r, fanin_error *error)
{
    const gpu *g = r->round->client->gpu;
    const uint8_t *checked = NULL;
    for (uint32_t i = 0; i < r->shard->regions->count; i++) {
        const uint8_t *uuid = r->shard->ipc_keys[i].uuid;
        if (checked && memcmp(checked, uuid, GPU_UUID_SIZE) == 0)
            continue;
        checked = uuid;
        int owner = gpu_device_of_uuid(g, uuid);
        if (owner < 0)
            return error_set(error, FANIN_ERR_UNSUPPORTED, NULL,
                             "GPU %02x%02x%02x%02x... of rank %u is not visible to "
                             "this process (CUDA_VISIBLE_DEVICES, or the container's "
                             "devices)",
                             uuid[0], uuid[1], uuid[2], uuid[3], r->rank);
        if (!gpu_can_access(g, r->device, owner))
            return error_set(error, FANIN_ERR_UNSUPPORTED, NULL,
                             "GPU %d cannot read GPU %d, which holds rank %u's memory "
                             "(no NVLink or PCIe peer access)",
                             r->device, owner, r->rank);
    }
    return FANIN_OK;
}

/* ------------------------------------------------------------------ mapping */

static void drop_view(ipc_view *view, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        ipc_mapping_release(&view->mappings[i]);
    free(view->mappings);
    view->mappings = NULL;
}

static fanin_status map_regions(const reading *r, fanin_error *error)
{
    fanin_client *client = r->round->client;
    shard_table *s = r->shard;
    const msg_hello_ok *hello = connection_peer(client->peers[r->index].control);
    if (!array_reserve(&s->views, &s->view_capacity, s->n_views + 1, sizeof *s->views))
        return error_set_memory(error);
    ipc_view view = {.device = r->device};
    view.mappings = calloc((size_t)s->regions->count + 1, sizeof(*view.mappings));
    if (!view.mappings)
        return error_set_memory(error);
    uint64_t started = clock_ns();
    fanin_status status = FANIN_OK;
    for (uint32_t i = 0; i < s->regions->count && status == FANIN_OK; i++) {
        if (work_stopped_after(r->stop, WORK_STEPS))
            status = work_broken_off(r->stop, "connect", "memory was mapped", error);
        else
            status = ipc_map_open(client->ipc, r->device, hello->incarnation,
                                  &s->ipc_keys[i], &view.mappings[i], error);
        if (status != FANIN_OK)
            drop_view(&view, i);
    }
    r->round->goal->map_ns += clock_ns() - started;
    if (status == FANIN_OK)
        s->views[s->n_views++] = view;
    return status;
}

/* A device does not end a read: what it may touch stays mapped and is never freed. */
static void leave_to_device(fanin_client *client)
{
    ipc_map_abandon(client->ipc);
    device_memory_leave(client->devices);
}

/* Reads a few bytes from the first region; no lease is needed, they are thrown away. */
static fanin_status probe(const reading *r, fanin_error *error)
{
    fanin_client *client = r->round->client;
    const shard_table *s = r->shard;
    const ipc_view *view = tables_view(s, r->device);
    gpu_stream *stream = NULL;
    if (s->regions->count == 0)
        return FANIN_OK;
    fanin_status status =
        device_memory_stream(client->devices, r->device, &stream, error);
    if (status != FANIN_OK)
        return status;
    void *to;
    status = device_memory_landing(client->devices, &to, error);
    if (status != FANIN_OK)
        return status;
    uint64_t length = s->regions->entries[0].length;
    uint64_t from = ipc_mapping_base(view->mappings[0]) + s->ipc_keys[0].offset;
    if (length > LANDING_BYTES)
        length = LANDING_BYTES;
    status = gpu_copy(stream, to, (const void *)(uintptr_t)from, (size_t)length, error);
    if (status == FANIN_OK)
        status = gpu_stream_wait(
            stream, deadline_sooner(r->round->at, deadline_in_ms(PROBE_MS)), error);
    if (status == FANIN_ERR_TIMEOUT &&
        gpu_stream_wait(stream, deadline_in_ms(PROBE_MS), NULL) == FANIN_ERR_TIMEOUT)
        leave_to_device(client);
    return status;
}

static fanin_status read_by(const reading *r, bool fresh, fanin_error *error)
{
    if (tables_view(r->shard, r->device))
        return FANIN_OK;
    fanin_status status = check_reach(r, error);
    if (status == FANIN_OK)
        status = map_regions(r, error);
    if (status == FANIN_OK && fresh)
        status = probe(r, error);
    return status;
}

/* All that the goal's devices need of one rank. */
static fanin_status bring(path_round *r, size_t index, bool fresh, work_stop *stop,
                          fanin_error *error)
{
    reading one = {.round = r,
                   .index = index,
                   .shard = &r->publication->shards[index],
                   .rank = connection_peer(r->client->peers[index].control)->rank,
                   .stop = stop};
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < r->n_devices && status == FANIN_OK; i++) {
        one.device = r->devices[i];
        status = read_by(&one, fresh, error);
    }
    if (status == FANIN_OK && r->host) {
        one.device = r->goal->gather_device;
        status = read_by(&one, fresh, error);
    }
    return status;
}

/* ---------------------------------------------------- the device that gathers */

/* Bytes of the ranks in @p mask that @p device holds itself, and whether it reaches all. */
static uint64_t weigh(const path_round *r, const bool *mask, int device, bool *all)
{
    uint64_t own = 0;
    *all = true;
    for (size_t i = 0; i < r->client->n_peers; i++) {
        const shard_table *s = &r->publication->shards[i];
        for (uint32_t j = 0; mask[i] && j < s->regions->count; j++) {
            int owner = gpu_device_of_uuid(r->client->gpu, s->ipc_keys[j].uuid);
            own += owner == device ? s->regions->entries[j].length : 0;
            *all = *all && owner >= 0 && gpu_can_access(r->client->gpu, device, owner);
        }
    }
    return own;
}

/* For host destinations: the device that reaches all ranks and holds most of it itself. */
static int choose_gather_device(const path_round *r, const bool *mask)
{
    int best = -1, count = gpu_count(r->client->gpu);
    uint64_t best_own = 0;
    bool best_all = false;
    for (int device = 0; device < count && device < GPU_MAX_DEVICES; device++) {
        bool all;
        uint64_t own = weigh(r, mask, device, &all);
        if (best >= 0 && (all < best_all || (all == best_all && own <= best_own)))
            continue;
        best = device;
        best_own = own;
        best_all = all;
    }
    return best;
}

/* Warm: the device of last time, if all ranks are still mapped for it. */
static void find_gather_device(path_round *r, const bool *mask)
{
    publication *p = r->publication;
    bool mapped = p->gather_device_plus_1 > 0;
    for (size_t i = 0; i < r->client->n_peers && mapped; i++)
        mapped = !mask[i] || tables_view(&p->shards[i], p->gather_device_plus_1 - 1);
    if (!mapped)
        p->gather_device_plus_1 = choose_gather_device(r, mask) + 1;
    r->goal->gather_device = p->gather_device_plus_1 - 1;
}

/* ------------------------------------------------------------------- whole */

/* Those that are on the path already join @p mask. */
static bool gather_ranks(const path_round *r, bool *mask)
{
    bool any = false;
    for (size_t i = 0; i < r->client->n_peers; i++) {
        mask[i] = mask[i] ||
                  (r->want[i] && r->publication->shards[i].path == FANIN_PATH_CUDA_IPC);
        any = any || mask[i];
    }
    return any;
}

static fanin_status need_cuda(fanin_client *client, fanin_error *error)
{
    if (!client_gpu(client))
        return error_set(error, FANIN_ERR_UNSUPPORTED, NULL, "%.250s",
                         client->gpu_missing);
    if (!client->ipc)
        client->ipc = ipc_map_create(client->gpu);
    if (!client->devices)
        client->devices = device_memory_create(client->gpu);
    return client->ipc && client->devices ? FANIN_OK : error_set_memory(error);
}

/* Drops from @p mask whoever's memory cannot be mapped at all. */
static fanin_status learn_keys(path_round *r, bool *mask, fanin_error *error)
{
    fanin_status status = path_regions(r, mask, FANIN_PATH_CUDA_IPC, error);
    for (size_t i = 0; i < r->client->n_peers && status == FANIN_OK; i++) {
        fanin_error why = FANIN_ERROR_INIT;
        uint32_t rank = connection_peer(r->client->peers[i].control)->rank;
        if (!mask[i] || decode_keys(&r->publication->shards[i], rank, &why) == FANIN_OK)
            continue;
        mask[i] = false;
        status = path_give_up(r, i, why.message, error);
    }
    return status;
}

static fanin_status settle(path_round *r, size_t index, fanin_error *error)
{
    shard_table *s = &r->publication->shards[index];
    fanin_error why = FANIN_ERROR_INIT;
    bool fresh = s->path != FANIN_PATH_CUDA_IPC;
    client_work work;
    client_work_start(&work, r->client, r->at);
    fanin_status status = bring(r, index, fresh, &work.stop, &why);
    if (work.stop.stopped) { /* that says nothing about the path */
        error_copy(error, &why);
        return client_work_end(&work, status, error);
    }
    if (status != FANIN_OK)
        return path_give_up(r, index, why.message, error);
    if (fresh)
        path_choose(r, index, FANIN_PATH_CUDA_IPC,
                    "a probe read by cuda_ipc succeeded");
    return FANIN_OK;
}

fanin_status path_try_ipc(path_round *r, bool *fresh, fanin_error *error)
{
    if (!gather_ranks(r, fresh))
        return FANIN_OK;
    fanin_error why = FANIN_ERROR_INIT;
    fanin_status status = need_cuda(r->client, &why);
    for (size_t i = 0; i < r->client->n_peers && status != FANIN_OK; i++) {
        fanin_status given_up =
            fresh[i] ? path_give_up(r, i, why.message, error) : FANIN_OK;
        if (given_up != FANIN_OK)
            return given_up;
        fresh[i] = false;
    }
    if (status != FANIN_OK)
        return FANIN_OK;
    status = learn_keys(r, fresh, error);
    if (status == FANIN_OK && r->host)
        find_gather_device(r, fresh);
    for (size_t i = 0; i < r->client->n_peers && status == FANIN_OK; i++) {
        if (fresh[i])
            status = settle(r, i, error);
    }
    return status;
}
