/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/map_ahead.h"

#include "device/devices.h"
#include "ipc/mapped_regions.h"
#include "ipc/reader_ipc.h"
#include "net/spans.h"
#include <stdlib.h>

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
    o->thread = crew_open(client, at, 1, threads, open_map, o);
    if (o->thread)
        crew_begin(o->thread, 0);
    return o->thread != NULL;
}

fanin_status map_opener_finish(map_opener *o, uint64_t *spent_ns, fanin_error *error)
{
    ipc_map_expect(o->map, false);
    fanin_status status = crew_finish(o->thread, NULL, error);
    *spent_ns += ipc_map_spent_ns(o->map) - o->before_ns;
    return status;
}

void map_opener_close(map_opener *o)
{
    if (!o->thread)
        return;
    ipc_map_expect(o->map, false);
    crew_close(&o->thread);
}

/* -------------------------------------------------------------------- ahead */

/* What a pull without a plan has begun. */
typedef struct map_ahead {
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
static bool is_due(fanin_client *client, const publication *p,
                   const path_foresight *known, size_t peer)
{
    const shard_table *s = &p->shards[peer];
    bool here = s->boxes && s->generation == client->peers[peer].generation &&
                s->version == known->announced[peer].version;
    return !here && peer_ready(&client->peers[peer]) &&
           path_is_allowed(client, &ipc_reader) &&
           path_is_offered(client, peer, &ipc_reader) && path_is_local(client, peer) &&
           (client->forced || !path_avoided(client, peer));
}

/* All regions of a rank for one device; what cannot be done is found out again by who may tell. */
static void take_rank(map_ahead *a, size_t peer, int device)
{
    path_round *r = &a->round;
    path_state *s = &r->publication->paths->peers[peer];
    uint32_t rank = connection_peer(r->client->peers[peer].control)->rank;
    if (regions_hold(s, rank, NULL) != FANIN_OK)
        return;
    const regions_use one = {.round = r,
                             .index = peer,
                             .shard = regions_kept(r, peer),
                             .rank = rank,
                             .device = device};
    if (regions_take(&one, NULL) != FANIN_OK)
        regions_let_go(&one);
}

/* The regions of all ranks are here. */
static void take_all(map_ahead *a)
{
    path_outline outline = {0};
    a->known->outline(a->known->cookie, &outline);
    if (outline.bytes < a->bytes - a->bytes / LEFT_OUT)
        return;
    for (size_t i = 0; i < a->n; i++) {
        for (size_t j = 0; j < outline.devices.n; j++)
            take_rank(a, a->fetches[i].peer, outline.devices.device[j]);
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
static void take_regions(void *cookie, fetch *f)
{
    map_ahead *a = cookie;
    path_state *s = path_state_ahead(a->round.client, a->round.publication, f->peer,
                                     f->request.catalog_version);
    if (!s->regions && region_table_decode(f->data.data, f->data.size, &a->work.stop,
                                           &s->regions, NULL) == FANIN_OK)
        s->regions_path = &ipc_reader;
    if (!s->regions || s->regions_path != &ipc_reader)
        return;
    a->n_here += is_on_devices(s->regions, &a->bytes);
    if (a->n_here == a->n)
        take_all(a);
}

/* Of all that are to be read, or of none: what is wanted of some cannot be told. */
static bool all_due(fanin_client *client, const publication *p,
                    const path_foresight *known)
{
    size_t n = 0;
    for (size_t i = 0; i < client->n_peers; i++) {
        if (known->use[i] && !is_due(client, p, known, i))
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
        path_regions_request(p, i, a->known->announced[i].version, &ipc_reader, f);
        f->here = take_regions;
        f->cookie = a;
    }
    return a->fetches != NULL;
}

void *map_ahead_begin(fanin_client *client, publication *p, const path_foresight *known,
                      deadline at)
{
    if (!known->outline || path_states_open(client, p, NULL) != FANIN_OK ||
        !all_due(client, p, known) || !devices_map(client))
        return NULL;
    map_ahead *a = calloc(1, sizeof *a);
    if (!a)
        return NULL;
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
