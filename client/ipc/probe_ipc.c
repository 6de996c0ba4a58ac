/* SPDX-License-Identifier: Apache-2.0 */
/* The path cuda_ipc: other processes' allocations mapped for the devices that read them. */
#include "ipc/ipc.h"

#include "device/devices.h"
#include "error_set.h"
#include "net/threads.h"
#include <stdlib.h>
#include <string.h>

/* A copy on a healthy path takes microseconds. */
#define PROBE_MS 3000
/* How long it is waited for before cancel is looked at. */
#define LOOK_MS 10

/* FANIN_ERR_TIMEOUT and FANIN_ERR_CANCELLED: the pull is over, which says nothing about the path.
   */
static fanin_status await_probe(const regions_use *r, device_probe *p,
                                fanin_error *error)
{
    fanin_client *client = r->round->client;
    error_place place = connection_place(client->peers[r->index].control, "connect");
    deadline end = deadline_sooner(r->round->at, deadline_in_ms(PROBE_MS));
    client_work work;
    client_work_start(&work, client, r->round->at);
    fanin_status status;
    do
        status = gpu_stream_wait(p->stream,
                                 deadline_sooner(end, deadline_in_ms(LOOK_MS)), error);
    while (status == FANIN_ERR_TIMEOUT && !work_stopped_after(&work.stop, WORK_STEPS) &&
           !deadline_passed(end));
    if (status == FANIN_OK)
        ipc_mapping_release(&p->reads);
    if (status != FANIN_ERR_TIMEOUT)
        return status;
    if (!work_stopped_after(&work.stop, WORK_STEPS))
        return error_set(error, FANIN_ERR_TRANSPORT, &place,
                         "GPU %d did not read %d bytes of rank %u's memory in %d ms",
                         r->device, LANDING_BYTES, r->rank, PROBE_MS);
    place.remedy = "look at what keeps the GPU busy, or give the pull more time";
    error_set(error, FANIN_ERR_TIMEOUT, &place,
              "the deadline passed before GPU %d read rank %u's memory", r->device,
              r->rank);
    return client_work_end(&work, FANIN_ERR_TIMEOUT, error);
}

/* Reads a few bytes from a region; no lease is needed, they are thrown away. */
static fanin_status probe_regions(const regions_use *r, fanin_error *error)
{
    const devices *d = r->round->client->devices;
    const msg_hello_ok *hello = &r->round->client->peers[r->index].control->peer;
    const ipc_regions *s = r->shard;
    const ipc_view *view = ipc_view_of(s, r->device);
    device_probe *p = NULL;
    uint32_t i = 0;
    while (i < s->regions->count && !view->mappings[i])
        i++;
    if (i == s->regions->count)
        return FANIN_OK;
    fanin_status status = device_memory_probe(d->memory, r->device, &p, error);
    if (status == FANIN_OK && p->reads) /* one that a pull gave up */
        status = await_probe(r, p, error);
    if (status == FANIN_OK)
        status = ipc_map_take(d->map, r->device, hello->incarnation, &s->keys[i],
                              &p->reads, error);
    if (status != FANIN_OK)
        return status;
    uint64_t length = s->regions->entries[i].length;
    uint64_t from = ipc_mapping_base(view->mappings[i]) + s->keys[i].offset;
    if (length > LANDING_BYTES)
        length = LANDING_BYTES;
    status = gpu_copy(p->stream, p->landing, (const void *)(uintptr_t)from,
                      (size_t)length, error);
    return status == FANIN_OK ? await_probe(r, p, error) : status;
}

/* After the opening: whether all that was taken is mapped, and can be read. */
static fanin_status confirm(const regions_use *r, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    if (regions_covered(r))
        return status;
    ipc_view *view = regions_view(r);
    for (uint32_t i = 0; i < r->shard->regions->count && status == FANIN_OK; i++) {
        if (!view->mappings[i])
            continue;
        status = ipc_mapping_check(view->mappings[i], error);
        if (status != FANIN_OK && !regions_needed(r, i)) {
            ipc_mapping_release(&view->mappings[i]); /* taken before there was a plan */
            status = FANIN_OK;
        }
    }
    if (status == FANIN_OK && r->fresh)
        status = probe_regions(r, error);
    view->whole = status == FANIN_OK;
    view->covers = regions_plan_id(r->round);
    return status;
}

/* The error is the pull's end, and nobody's fault. */
static bool is_pull_over(const fanin_error *e)
{
    return e->status == FANIN_ERR_TIMEOUT || e->status == FANIN_ERR_CANCELLED;
}

/* Removes what the publication's ranks have mapped for the @p at th device that gathers. */
static void drop_gatherer(path_round *r, size_t at)
{
    gather_set *set = &r->goal->gather;
    for (size_t i = 0; i < r->client->n_peers; i++) {
        regions_use one = {
            .round = r, .shard = regions_kept(r, i), .device = set->device[at]};
        const path_state *s = path_taken(r->publication, i);
        if (s->hold && s->hold->drop == ipc_regions_drop)
            regions_release(&one);
    }
    memmove(&set->device[at], &set->device[at + 1],
            (--set->n - at) * sizeof set->device[0]);
    r->publication->paths->gather = *set;
}

/* The first device that gathers is needed; what another one cannot do, the others do. */
static fanin_status for_gatherers(regions_use *one,
                                  fanin_status (*what)(const regions_use *,
                                                       fanin_error *),
                                  fanin_error *error)
{
    path_round *r = one->round;
    for (size_t i = 0; i < r->goal->gather.n;) {
        fanin_error local = FANIN_ERROR_INIT;
        one->device = r->goal->gather.device[i];
        if (what(one, &local) == FANIN_OK) {
            i++;
        } else if (i == 0 || is_pull_over(&local)) {
            regions_release(one);
            return error_copy(error, &local);
        } else {
            log_write(&r->client->log, FANIN_LOG_INFO, "gather-device",
                      "GPU %d does not take part in gathering: %s", one->device,
                      local.message);
            drop_gatherer(r, i);
        }
    }
    return FANIN_OK;
}

/* For all devices that the goal needs to read one rank. */
static fanin_status for_devices(path_round *r, size_t index,
                                fanin_status (*what)(const regions_use *,
                                                     fanin_error *),
                                fanin_error *error)
{
    regions_use one = {.round = r,
                       .index = index,
                       .shard = regions_kept(r, index),
                       .rank = r->client->peers[index].control->peer.rank,
                       .fresh = path_taken(r->publication, index)->path != &ipc_reader};
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < r->devices.n && status == FANIN_OK; i++) {
        one.device = r->devices.device[i];
        status = what(&one, error);
        if (status != FANIN_OK)
            regions_release(&one);
    }
    return status == FANIN_OK && r->host ? for_gatherers(&one, what, error) : status;
}

/* --------------------------------------------------- the devices that gather */

/* Bytes of the ranks in @p mask that @p device holds itself, and whether it reaches all. */
static uint64_t count_own_bytes(const path_round *r, const bool *mask, int device,
                                bool *all)
{
    const gpu *g = r->client->devices->g;
    uint64_t own = 0;
    *all = true;
    for (size_t i = 0; i < r->client->n_peers; i++) {
        const ipc_regions *s = mask[i] ? regions_kept(r, i) : NULL;
        for (uint32_t j = 0; s && j < s->regions->count; j++) {
            int owner = gpu_device_of_uuid(g, s->keys[j].uuid);
            own += owner == device ? s->regions->entries[j].length : 0;
            *all = *all && owner >= 0 && gpu_can_access(g, device, owner);
        }
    }
    return own;
}

typedef struct gatherer {
    int device; /* -1: none */
    uint64_t own;
    bool all;
} gatherer;

/* Of the devices that are not in @p set yet: who reaches all ranks and holds most of it itself. */
static gatherer next_gatherer(const path_round *r, const bool *mask,
                              const gather_set *set)
{
    gatherer best = {.device = -1};
    int count = gpu_count(r->client->devices->g);
    for (int device = 0; device < count && device < GPU_MAX_DEVICES; device++) {
        gatherer one = {.device = device};
        if (gather_set_has(set, device))
            continue;
        one.own = count_own_bytes(r, mask, device, &one.all);
        if (best.device < 0 || one.all > best.all ||
            (one.all == best.all && one.own > best.own))
            best = one;
    }
    return best;
}

static uint64_t bytes_of_all(const path_round *r, const bool *mask)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < r->client->n_peers; i++) {
        const ipc_regions *s = mask[i] ? regions_kept(r, i) : NULL;
        for (uint32_t j = 0; s && j < s->regions->count; j++)
            bytes += s->regions->entries[j].length;
    }
    return bytes;
}

/* For host destinations: one device, and of those that hold some of it as many more as are worth
   it. */
static gather_set choose_gatherers(const path_round *r, const bool *mask)
{
    gather_set set = {.n = 0};
    uint64_t worth = 1 + bytes_of_all(r, mask) / r->client->devices->gather_bytes;
    while (set.n < GATHER_DEVICES && set.n < worth) {
        gatherer next = next_gatherer(r, mask, &set);
        if (next.device < 0 || (set.n > 0 && (!next.all || next.own == 0)))
            break;
        set.device[set.n++] = next.device;
    }
    return set;
}

/* Warm: those of last time, if all ranks are still mapped for them. */
static void find_gatherers(path_round *r, const bool *mask)
{
    gather_set *set = &r->publication->paths->gather;
    bool mapped = set->n > 0;
    for (size_t i = 0; i < r->client->n_peers; i++) {
        for (size_t k = 0; k < set->n && mapped && mask[i]; k++)
            mapped = ipc_view_of(regions_kept(r, i), set->device[k]) != NULL;
    }
    if (!mapped)
        *set = choose_gatherers(r, mask);
    r->goal->gather = *set;
}

/* ------------------------------------------------------------------- whole */

/* Whether what the rank holds is worth a look. */
static bool is_in_question(const fanin_client *client, size_t peer)
{
    return path_is_allowed(client, &ipc_reader) &&
           path_is_offered(client, peer, &ipc_reader) && path_is_local(client, peer);
}

/* Which kinds of memory ranks hold is told by any region table: one that registers nothing. */
static fanin_status learn_kinds(path_round *r, const bool *open, bool *scratch,
                                fanin_error *error)
{
    bool any = false;
    for (size_t i = 0; i < r->client->n_peers; i++) {
        scratch[i] = open[i] && is_in_question(r->client, i) &&
                     !path_state_of(r->client, r->publication, i)->regions;
        any = any || scratch[i];
    }
    return any ? path_regions(r, scratch, NULL, error) : FANIN_OK;
}

/* What holds against the path; NULL: nothing. *mine false: the rank is another path's. */
static const char *objection(const path_round *r, size_t peer, bool *mine)
{
    const fanin_client *client = r->client;
    bool forced = client->forced == &ipc_reader;
    bool host = false, cuda = false;
    *mine = forced;
    if (!is_in_question(client, peer))
        return path_is_local(client, peer)
                   ? path_not_offered(
                         client, peer,
                         "the rank does not offer cuda_ipc on this connection")
                   : "cuda_ipc needs the rank on the same host and in the same pid "
                     "and ipc namespaces";
    const region_table *regions = path_taken(r->publication, peer)->regions;
    if (!regions)
        return "the kind of the rank's memory is not known";
    for (uint32_t i = 0; i < regions->count; i++) {
        bool on_device = regions->entries[i].memory == FANIN_MEMORY_CUDA;
        cuda = cuda || on_device;
        host = host || !on_device;
    }
    *mine = forced || cuda;
    if (cuda && host)
        return "the rank holds both host and device memory";
    return cuda ? NULL : "the rank holds host memory, which cuda_ipc does not read";
}

/* Takes what is open and for this path into @p mine. */
static fanin_status take_ranks_for_ipc(path_round *r, bool *open, bool *mine,
                                       fanin_error *error)
{
    fanin_status status = learn_kinds(r, open, mine, error);
    for (size_t i = 0; i < r->client->n_peers; i++) {
        mine[i] = false;
        if (status != FANIN_OK || !open[i])
            continue;
        /* The look at its regions may have decided. */
        open[i] = !path_taken(r->publication, i)->path;
        const char *why = open[i] ? objection(r, i, &mine[i]) : NULL;
        open[i] = open[i] && !mine[i];
        if (mine[i] && why) {
            mine[i] = false;
            status = path_give_up(r, i, why, error);
        }
    }
    return status;
}

/* Those that are on the path already join @p mask. */
static bool gather_ranks(const path_round *r, bool *mask)
{
    bool any = false;
    for (size_t i = 0; i < r->client->n_peers; i++) {
        mask[i] = mask[i] ||
                  (r->want[i] && path_taken(r->publication, i)->path == &ipc_reader);
        any = any || mask[i];
    }
    return any;
}

static fanin_status need_cuda(path_round *r, fanin_error *error)
{
    devices *d = r->client->devices;
    r->lacks = !client_gpu(r->client);
    if (r->lacks)
        return error_set(error, FANIN_ERR_UNSUPPORTED, NULL, "%.250s", d->missing);
    if (!d->memory)
        d->memory = device_memory_create(d->g);
    return devices_map(r->client) && d->memory ? FANIN_OK : error_set_memory(error);
}

/* FANIN_ERR_UNSUPPORTED: its memory cannot be mapped at all. */
static fanin_status hold_rank(path_round *r, size_t peer, void *cookie,
                              fanin_error *why)
{
    (void)cookie;
    return regions_hold(path_state_of(r->client, r->publication, peer),
                        r->client->peers[peer].control->peer.rank, why);
}

/* All ranks' mappings, while what they are read by is made. */
static fanin_status open_taken(path_round *r, const bool *mask, fanin_error *error)
{
    path_goal *goal = r->goal;
    ipc_map *map = r->client->devices->map;
    map_opener own = {0}, *opener = map_ahead_opener(goal->ahead);
    if (!opener && !ipc_map_is_behind(map))
        return FANIN_OK;
    if (!opener && !map_opener_start(&own, r->client, r->at, goal->meanwhile != NULL))
        return error_set_memory(error);
    fanin_error why = FANIN_ERROR_INIT;
    fanin_status status = goal->meanwhile
                              ? goal->meanwhile(goal->cookie, &ipc_reader, mask, &why)
                              : FANIN_OK;
    if (status == FANIN_ERR_CANCELLED)
        error_copy(error, &why);
    else
        status = map_opener_finish(opener ? opener : &own, &goal->map_ns, error);
    map_opener_close(&own);
    return status;
}

static fanin_status take_rank(path_round *r, size_t peer, void *cookie,
                              fanin_error *why)
{
    (void)cookie;
    return for_devices(r, peer, regions_take, why);
}

static fanin_status settle_rank(path_round *r, size_t peer, void *cookie,
                                fanin_error *why)
{
    bool fresh = path_taken(r->publication, peer)->path != &ipc_reader;
    fanin_status status = for_devices(r, peer, confirm, why);
    (void)cookie;
    if (status == FANIN_OK && fresh)
        path_choose(r, peer, &ipc_reader, "a probe read by cuda_ipc succeeded");
    return status;
}

static fanin_status try_ipc(path_round *r, bool *mask, fanin_error *error)
{
    if (!gather_ranks(r, mask))
        return FANIN_OK;
    fanin_error why = FANIN_ERROR_INIT;
    if (need_cuda(r, &why) != FANIN_OK)
        return path_give_up_all(r, mask, why.message, error);
    fanin_status status = path_regions(r, mask, &ipc_reader, error);
    if (status == FANIN_OK)
        status = path_try(r, mask, hold_rank, NULL, error);
    if (status == FANIN_OK && r->host)
        find_gatherers(r, mask);
    if (status == FANIN_OK)
        status = path_try(r, mask, take_rank, NULL, error);
    if (status == FANIN_OK)
        status = open_taken(r, mask, error);
    return status == FANIN_OK ? path_try(r, mask, settle_rank, NULL, error) : status;
}

fanin_status ipc_probe(path_round *r, bool *open, fanin_error *error)
{
    bool *mine = calloc(r->client->n_peers, sizeof *mine);
    if (!mine)
        return error_set_memory(error);
    map_ahead_settle(r->goal->ahead);
    device_memory_end_probes(r->client->devices->memory);
    fanin_status status = take_ranks_for_ipc(r, open, mine, error);
    if (status == FANIN_OK)
        status = try_ipc(r, mine, error);
    map_ahead_close(r->goal->ahead); /* nothing is swept that is being opened */
    if (r->client->devices->map)
        ipc_map_sweep(r->client->devices->map); /* what newer tables do not list */
    free(mine);
    return status;
}

void ipc_unmap(fanin_client *client, publication *p)
{
    bool any = false;
    for (size_t i = 0; p->paths && i < p->n_peers; i++) {
        path_state *s = &p->paths->peers[i];
        if (!s->hold || s->hold->drop != ipc_regions_drop)
            continue;
        path_state_drop(client, s, i);
        any = true;
    }
    device_memory_end_probes(client->devices->memory);
    if (any && client->devices->map)
        ipc_map_sweep(client->devices->map);
}
