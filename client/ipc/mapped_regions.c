/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/mapped_regions.h"

#include "array.h"
#include "device/devices.h"
#include "error_set.h"
#include <stdlib.h>
#include <string.h>

/* -------------------------------------------------------------- remote keys */

ipc_regions *regions_kept(const path_round *r, size_t peer)
{
    return (ipc_regions *)path_taken(r->publication, peer)->hold;
}

static fanin_status decode_keys(const region_table *regions, uint32_t rank,
                                ipc_key *keys, fanin_error *error)
{
    for (uint32_t i = 0; i < regions->count; i++) {
        const region_entry *r = &regions->entries[i];
        if (r->memory == FANIN_MEMORY_CUDA &&
            ipc_key_decode(r->rkey, r->rkey_size, r->length, &keys[i]))
            continue;
        if (r->rkey_size == 0)
            return error_set(error, FANIN_ERR_UNSUPPORTED, NULL,
                             "rank %u's GPU memory has no IPC handle (memory of "
                             "PyTorch's expandable_segments or of cudaMallocAsync has "
                             "none; use cudaMalloc's)",
                             rank);
        return error_set(error, FANIN_ERR_PROTOCOL, NULL,
                         "rank %u sent an IPC key that does not fit its region", rank);
    }
    return FANIN_OK;
}

fanin_status regions_hold(path_state *s, uint32_t rank, fanin_error *error)
{
    if (s->hold)
        return FANIN_OK;
    ipc_regions *kept = calloc(1, sizeof *kept);
    ipc_key *keys = calloc((size_t)s->regions->count + 1, sizeof *keys);
    fanin_status status = kept && keys ? decode_keys(s->regions, rank, keys, error)
                                       : error_set_memory(error);
    if (status != FANIN_OK) {
        free(kept);
        free(keys);
        return status;
    }
    *kept =
        (ipc_regions){.hold = {ipc_regions_drop}, .regions = s->regions, .keys = keys};
    s->hold = &kept->hold;
    return FANIN_OK;
}

/* ------------------------------------------------------------------ devices */

/* Whether @p device may read all GPUs that the rank's regions are on. */
static fanin_status check_reach(const regions_use *r, fanin_error *error)
{
    const gpu *g = r->round->client->devices->g;
    const uint8_t *checked = NULL;
    for (uint32_t i = 0; i < r->shard->regions->count; i++) {
        const uint8_t *uuid = r->shard->keys[i].uuid;
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

/* Marks those of the @p count regions, of the first arena, that the plan reads from the peer. */
static void mark_read(const path_plan *p, size_t peer, uint32_t count, bool *marks)
{
    size_t s = 0;
    while (s < p->n_sources && p->peer_of[s] != peer)
        s++;
    for (uint64_t i = 0; s < p->n_sources && i < p->plan->ranks[s].n_pieces; i++) {
        const piece *pieces = p->plan->ranks[s].pieces;
        box_place place;
        if (i > 0 && pieces[i].box == pieces[i - 1].box)
            continue;
        box_table_get(p->sources[s].boxes, pieces[i].box, NULL, NULL, &place);
        if (place.region < count)
            marks[place.region] = true;
    }
}

ipc_view *regions_view(const regions_use *r)
{
    return (ipc_view *)ipc_view_of(r->shard, r->device);
}

digest regions_plan_id(const path_round *r)
{
    return r->goal->plan ? r->goal->plan->id : (digest){0};
}

bool regions_covered(const regions_use *r)
{
    const ipc_view *view = ipc_view_of(r->shard, r->device);
    digest id = regions_plan_id(r->round);
    return view && view->whole && digest_equal(&view->covers, &id);
}

static fanin_status need_view(const regions_use *r, fanin_error *error)
{
    ipc_regions *s = r->shard;
    if (regions_view(r))
        return FANIN_OK;
    ipc_view view = {.device = r->device};
    if (!array_reserve(&s->views, &s->view_capacity, s->n_views + 1, sizeof *s->views))
        return error_set_memory(error);
    view.mappings = calloc((size_t)s->regions->count + 1, sizeof *view.mappings);
    if (!view.mappings)
        return error_set_memory(error);
    s->views[s->n_views++] = view;
    return FANIN_OK;
}

/* Which regions the plan reads, in any arena that a lease may name; NULL: no memory. Where boxes
   are known in part they do not tell how many regions an arena has: of a second one it is half of
   the table. */
static bool *find_needed(const regions_use *r)
{
    uint32_t known = box_table_regions(r->round->publication->shards[r->index].boxes);
    uint32_t count = r->shard->regions->count, half = count / 2;
    bool *needed = calloc((size_t)count + 1, sizeof *needed);
    if (needed)
        mark_read(r->round->goal->plan, r->index, count, needed);
    bool may_be_two = known <= half && count % 2 == 0;
    for (uint32_t i = half; needed && may_be_two && i < count; i++)
        needed[i] = needed[i - half];
    return needed;
}

bool regions_needed(const regions_use *r, uint32_t region)
{
    bool *needed = r->round->goal->plan ? find_needed(r) : NULL;
    bool is = !needed || needed[region];
    free(needed);
    return is;
}

static bool lacks_some(const ipc_view *view, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        if (!view->mappings[i])
            return true;
    }
    return false;
}

/* Those that the plan reads; without a plan all. To find which takes a look at each piece. */
static fanin_status take_needed(const regions_use *r, fanin_error *error)
{
    fanin_client *client = r->round->client;
    const ipc_regions *s = r->shard;
    const msg_hello_ok *hello = connection_peer(client->peers[r->index].control);
    fanin_status status = need_view(r, error);
    if (status != FANIN_OK)
        return status;
    ipc_view *view = regions_view(r);
    if (!lacks_some(view, s->regions->count))
        return FANIN_OK;
    bool *needed = NULL;
    if (r->round->goal->plan && !(needed = find_needed(r)))
        return error_set_memory(error);
    for (uint32_t i = 0; i < s->regions->count && status == FANIN_OK; i++) {
        if ((!needed || needed[i]) && !view->mappings[i])
            status = ipc_map_take(client->devices->map, r->device, hello->incarnation,
                                  &s->keys[i], &view->mappings[i], error);
    }
    free(needed);
    return status;
}

void regions_let_go(const regions_use *r)
{
    ipc_regions *s = r->shard;
    ipc_view *view = regions_view(r);
    if (!view)
        return;
    ipc_view_drop(view, s->regions->count);
    *view = s->views[--s->n_views];
}

fanin_status regions_take(const regions_use *r, fanin_error *error)
{
    if (regions_covered(r))
        return FANIN_OK;
    fanin_status status = check_reach(r, error);
    return status == FANIN_OK ? take_needed(r, error) : status;
}
