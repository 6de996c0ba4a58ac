/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/ipc.h"

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

static bool lacks_some_mapping(const ipc_view *view, uint32_t n)
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
    const msg_hello_ok *hello = &client->peers[r->index].control->peer;
    fanin_status status = need_view(r, error);
    if (status != FANIN_OK)
        return status;
    ipc_view *view = regions_view(r);
    if (!lacks_some_mapping(view, s->regions->count))
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

void regions_release(const regions_use *r)
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

/* ----------------------------------------------------------------- opener */

/* A destination that leaves out more than one of so many parts of what ranks hold has nothing
   mapped ahead: which part is known by the plan alone. */
#define LEFT_OUT 8

/* ------------------------------------------------------------------- opener */

static fanin_status open_map(void *cookie, size_t part, work_stop *stop,
                             fanin_error *error)
{
    const map_opener *o = cookie;
    (void)part;
    uint64_t started = clock_ns();
    fanin_status status = ipc_map_open(o->map, stop, error);
    span_of_call(o->client, TRACE_MAP, started, status, NULL);
    return status;
}

bool map_opener_start(map_opener *o, fanin_client *client, deadline at, bool threads)
{
    *o = (map_opener){.client = client, .map = client->devices->map};
    o->before_ns = ipc_map_spent_ns(o->map);
    o->thread = workers_open(client, at, 1, threads, open_map, o);
    if (o->thread)
        workers_begin(o->thread, 0);
    return o->thread != NULL;
}

fanin_status map_opener_finish(map_opener *o, uint64_t *spent_ns, fanin_error *error)
{
    ipc_map_expect(o->map, false);
    fanin_status status = workers_finish(o->thread, NULL, error);
    *spent_ns += ipc_map_spent_ns(o->map) - o->before_ns;
    return status;
}

void map_opener_close(map_opener *o)
{
    if (!o->thread)
        return;
    ipc_map_expect(o->map, false);
    workers_close(&o->thread);
}

/* -------------------------------------------------------------------- ahead */

/* What a pull without a plan has begun. */
typedef struct map_ahead {
    const path_reader *self;
    path_round round;
    path_goal goal; /* without a plan */
    const path_foresight *known;
    client_work work;
    fetch *fetches;
    size_t n, left;
    size_t n_here;  /* whose regions are all on devices */
    uint64_t bytes; /* of those */
    map_opener opener;
} map_ahead;

/* Whether the rank's regions are to be asked for before its boxes. */
static bool is_due(const path_reader *self, fanin_client *client, const publication *p,
                   const path_foresight *known, size_t peer)
{
    const shard_table *s = &p->shards[peer];
    bool here = s->boxes && s->generation == client->peers[peer].generation &&
                s->version == known->announced[peer].version;
    return !here && peer_ready(&client->peers[peer]) && path_is_allowed(client, self) &&
           path_is_offered(client, peer, self) && path_is_local(client, peer) &&
           (client->forced || !path_avoided(client, peer));
}

/* All regions of a rank for one device; what cannot be done is found out again by who may tell. */
static void take_announced_rank(map_ahead *a, size_t peer, int device)
{
    path_round *r = &a->round;
    path_state *s = &r->publication->paths->peers[peer];
    uint32_t rank = r->client->peers[peer].control->peer.rank;
    if (regions_hold(s, rank, NULL) != FANIN_OK)
        return;
    const regions_use one = {.round = r,
                             .index = peer,
                             .shard = regions_kept(r, peer),
                             .rank = rank,
                             .device = device};
    if (regions_take(&one, NULL) != FANIN_OK)
        regions_release(&one);
}

/* The regions of all ranks are here. */
static void take_announced(map_ahead *a)
{
    path_outline outline = {0};
    a->known->outline(a->known->cookie, &outline);
    if (outline.bytes < a->bytes - a->bytes / LEFT_OUT)
        return;
    for (size_t i = 0; i < a->n; i++) {
        for (size_t j = 0; j < outline.devices.n; j++)
            take_announced_rank(a, a->fetches[i].peer, outline.devices.device[j]);
    }
}

static bool is_on_devices(const region_table *regions, uint64_t *bytes)
{
    for (uint32_t i = 0; i < regions->count; i++) {
        if (regions->entries[i].memory != FANIN_MEMORY_CUDA)
            return false;
        *bytes += regions->entries[i].length;
    }
    return true;
}

/* A rank's regions are here. */
static void on_regions(void *cookie, fetch *f)
{
    map_ahead *a = cookie;
    path_state *s = path_state_ahead(a->round.client, a->round.publication, f->peer,
                                     f->request.catalog_version);
    if (!s->regions && region_table_decode(f->data.data, f->data.size, &a->work.stop,
                                           &s->regions, NULL) == FANIN_OK)
        s->regions_path = a->self;
    if (!s->regions || s->regions_path != a->self)
        return;
    a->n_here += is_on_devices(s->regions, &a->bytes);
    if (a->n_here == a->n)
        take_announced(a);
}

/* Of all that are to be read, or of none: what is wanted of some cannot be told. */
static bool all_due(const path_reader *self, fanin_client *client, const publication *p,
                    const path_foresight *known)
{
    size_t n = 0;
    for (size_t i = 0; i < client->n_peers; i++) {
        if (known->use[i] && !is_due(self, client, p, known, i))
            return false;
        n += known->use[i];
    }
    return n > 0;
}

static bool list_regions(map_ahead *a)
{
    fanin_client *client = a->round.client;
    publication *p = a->round.publication;
    a->fetches = calloc(client->n_peers, sizeof *a->fetches);
    for (size_t i = 0; a->fetches && i < client->n_peers; i++) {
        if (!a->known->use[i])
            continue;
        fetch *f = &a->fetches[a->n++];
        path_regions_request(p, i, a->known->announced[i].version, a->self, f);
        f->here = on_regions;
        f->cookie = a;
    }
    return a->fetches != NULL;
}

void *map_ahead_begin(const path_reader *self, fanin_client *client, publication *p,
                      const path_foresight *known, deadline at)
{
    if (!known->outline || path_states_open(client, p, NULL) != FANIN_OK ||
        !all_due(self, client, p, known) || !devices_map(client))
        return NULL;
    map_ahead *a = calloc(1, sizeof *a);
    if (!a)
        return NULL;
    a->self = self;
    a->known = known;
    a->round = (path_round){
        .client = client, .publication = p, .want = known->use, .goal = &a->goal};
    client_work_start(&a->work, client, at);
    if (!list_regions(a)) {
        free(a);
        return NULL;
    }
    ipc_map_expect(client->devices->map, true);
    if (!map_opener_start(&a->opener, client, at, true))
        ipc_map_expect(client->devices->map, false);
    fetch_ask(client, a->fetches, a->n, &a->left);
    return a;
}

void map_ahead_settle(void *ahead)
{
    map_ahead *a = ahead;
    if (!a || !a->fetches)
        return;
    (void)fetch_settle(a->round.client, a->fetches, a->n, FANIN_ERR_TIMEOUT, NULL);
    fetch_free(a->fetches, a->n);
    free(a->fetches);
    a->fetches = NULL;
}

map_opener *map_ahead_opener(void *ahead)
{
    map_ahead *a = ahead;
    return a && a->opener.thread ? &a->opener : NULL;
}

void map_ahead_close(void *ahead)
{
    map_ahead *a = ahead;
    if (a)
        map_opener_close(&a->opener);
}

void map_ahead_free(void *ahead)
{
    map_ahead_settle(ahead);
    map_ahead_close(ahead);
    free(ahead);
}
