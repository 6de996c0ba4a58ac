/* SPDX-License-Identifier: Apache-2.0 */
#include "ipc/ipc.h"

#include "copy_kernel.h"
#include "device/devices.h"
#include "worker_pool.h"
#include "error_set.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* A kernel reads some GB in milliseconds. One that takes so long will never end. */
#define DRAIN_MS 10000
#define MAX_THREADS 4 /* of each device that gathers */
/* Below so many bytes the copying is not worth threads. */
#define THREADS_FROM ((uint64_t)16 << 20)
#define JOBS_A_CHUNK 8 /* each at least one landing */
/* A copy engine loses 4 us a copy. From so many bytes on it is as fast as a kernel. */
#define ENGINE_BYTES ((uint64_t)8 << 20)

typedef struct part_run {
    gpu_stream *stream;
    bool queued, done;
} part_run;

typedef struct job {
    worker_job job; /* first: the pool hands it back */
    struct lane *lane;
    uint64_t first, n; /* landings */
    uint64_t ns;
} job;

typedef enum lane_state { LANE_FREE, LANE_COPYING, LANE_LANDING } lane_state;

/* One of the chunks that are under way. */
typedef struct lane {
    gather_lane at;
    struct device_reader *reader;
    const host_chunk *chunk;
    uint64_t turn; /* chunks that were started before, on all devices */
    lane_state state;
    unsigned jobs_left;
    job jobs[JOBS_A_CHUNK];
} lane;

/* A device that gathers its chunks. */
typedef struct gathering {
    const gather_part *part;
    lane lanes[GATHER_LANES];
    uint64_t next_chunk; /* of the part's */
} gathering;

struct device_reader {
    const path_reading *r;
    const device_plan *plan;
    const device_source *sources;
    bool entered; /* the caller's stream has come to where the reading may begin */
    part_run *parts;
    uint64_t *addresses;               /* of the plan's bases on one device */
    gathering gathers[GATHER_DEVICES]; /* as many as the plan's */
    uint64_t started_chunks, landed_chunks;
    bool direct;  /* the copy engines write the destination */
    bool digests; /* the devices make those of the destination's pieces */
    worker_pool *pool;
    uint64_t bytes, scatter_ns;
};

/* ---------------------------------------------------------------- addresses */

const ipc_view *ipc_view_of(const ipc_regions *r, int device)
{
    for (size_t i = 0; i < r->n_views; i++) {
        if (r->views[i].device == device)
            return &r->views[i];
    }
    return NULL;
}

void ipc_view_drop(ipc_view *view, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        ipc_mapping_release(&view->mappings[i]);
    free(view->mappings);
    view->mappings = NULL;
}

void ipc_regions_drop(fanin_client *client, size_t peer, path_hold *hold)
{
    ipc_regions *r = (ipc_regions *)hold;
    (void)client;
    (void)peer;
    for (size_t i = 0; i < r->n_views; i++)
        ipc_view_drop(&r->views[i], r->regions->count);
    free(r->views);
    free(r->keys);
    free(r);
}

static fanin_status refuse_region(const device_reader *r, const device_base *b,
                                  uint64_t region, fanin_error *error)
{
    uint32_t rank = r->r->plan->sources[b->source].rank;
    error_place place = {.phase = "read",
                         .rank_plus_1 = (int32_t)rank + 1,
                         .remedy = "run the same fanin on both ends, or use stream"};
    return error_set(error, FANIN_ERR_PROTOCOL, &place,
                     "rank %u's region %" PRIu64 " is not there, or has fewer than the "
                     "%" PRIu64 " bytes that are to be read of it",
                     rank, region, b->region.reach);
}

/* Where a base of the plan is for kernels of @p device. The rank may have told other regions since
   the copies were made: its catalog's version says nothing about that. */
static fanin_status address_of(const device_reader *r, const device_base *b, int device,
                               uint64_t *out, fanin_error *error)
{
    const device_source *source = &r->sources[b->source];
    const ipc_regions *s = source->regions;
    const ipc_view *view = ipc_view_of(s, device);
    uint64_t region = (uint64_t)b->region.number + source->first_region;
    if (!view)
        return error_set(error, FANIN_ERR_INTERNAL, NULL,
                         "a rank's memory is not mapped for device %d", device);
    if (region >= s->regions->count || !view->mappings[region] ||
        s->regions->entries[region].length < b->region.reach)
        return refuse_region(r, b, region, error);
    *out = ipc_mapping_base(view->mappings[region]) + s->keys[region].offset;
    return FANIN_OK;
}

static fanin_status find_addresses(device_reader *r, int device, fanin_error *error)
{
    const device_plan *d = r->plan;
    fanin_status status = FANIN_OK;
    for (uint32_t i = 0; i < d->n_bases && status == FANIN_OK; i++)
        status = address_of(r, &d->bases[i], device, &r->addresses[i], error);
    return status;
}

/* FANIN_OK: the stream is idle; FANIN_ERR_TIMEOUT, and nothing written: not yet. */
static fanin_status ask_if_copied(gpu_stream *stream, deadline until,
                                  fanin_error *error)
{
    fanin_error local = FANIN_ERROR_INIT;
    fanin_status status = gpu_stream_wait(stream, until, &local);
    if (status != FANIN_OK && status != FANIN_ERR_TIMEOUT)
        error_copy(error, &local);
    return status;
}

/* ------------------------------------------------------------------ digests */

/* The pieces of a chunk that are whole: [first, end) of DIGEST_PIECE bytes each. */
typedef struct whole_pieces {
    uint64_t first, end;
} whole_pieces;

static whole_pieces pieces_of(const host_chunk *c)
{
    uint64_t first = (c->lead + DIGEST_PIECE - 1) / DIGEST_PIECE;
    uint64_t end = (c->lead + c->length) / DIGEST_PIECE;
    return (whole_pieces){first, end > first ? end : first};
}

/* Of what has been gathered, before it is copied. */
static fanin_status start_chunk_digests(const device_reader *r, const lane *l,
                                        fanin_error *error)
{
    whole_pieces p = pieces_of(l->chunk);
    if (!r->digests)
        return FANIN_OK;
    return gpu_file_digest_run(l->at.stream, l->at.device + p.first * DIGEST_PIECE,
                               p.end - p.first, l->at.digests, error);
}

/* NULL: the landing is no whole piece, or nobody has digested it. */
static const uint64_t *digest_at(const device_reader *r, const lane *l,
                                 const host_landing *landing)
{
    uint64_t piece = landing->offset / DIGEST_PIECE;
    if (!r->digests || landing->length != DIGEST_PIECE)
        return NULL;
    return &l->at.digests[2 * (piece - pieces_of(l->chunk).first)];
}

/* If somebody wants them, pieces lie together, and all devices have the kernel. */
static bool can_digest(const device_reader *r)
{
    const device_plan *d = r->plan;
    bool can = d->contiguous && r->r->digested;
    for (size_t i = 0; i < d->n_gathers && can; i++)
        can = gpu_prepare(r->r->client->devices->g, d->gathers[i].device,
                          GPU_FILE_DIGEST, NULL) == FANIN_OK;
    return can;
}

/* ------------------------------------------------------------------ starting */

static fanin_status come_after(const device_reader *r, gpu_stream *stream,
                               fanin_error *error)
{
    const fanin_stream *after = r->r->after;
    return after && after->handle ? gpu_stream_after(stream, after, error) : FANIN_OK;
}

/* Kernels of several processes take turns on a GPU. Its copy engines work beside them. */
static bool suits_engines(const device_part *part)
{
    bool suits = part->bytes / ENGINE_BYTES >= part->n_entries;
    for (uint64_t i = 0; i < part->n_entries && suits; i++)
        suits = part->entries[i].runs == 1 && part->entries[i].convert == CONVERT_NONE;
    return suits;
}

static fanin_status run_by_engine(gpu_stream *stream, const copy_entry *e,
                                  fanin_error *error)
{
    /* NOLINTBEGIN(performance-no-int-to-ptr) */
    return gpu_copy(stream, (void *)(uintptr_t)e->to, (const void *)(uintptr_t)e->from,
                    e->run, error);
    /* NOLINTEND(performance-no-int-to-ptr) */
}

/* From all sources in turn, as a table has them. */
static fanin_status run_entries(const device_reader *r, const device_part *part,
                                gpu_stream *stream, fanin_error *error)
{
    copy_entry *room;
    uint32_t ways = (uint32_t)r->plan->n_sources;
    uint64_t n = 0;
    bool engines = suits_engines(part);
    fanin_status status = device_memory_entries(r->r->client->devices->memory,
                                                part->device, &room, error);
    if (status != FANIN_OK)
        return status;
    for (uint64_t turn = 0; turn < copy_turns(part->n_entries, ways); turn++) {
        uint64_t at = copy_entry_of(turn, part->n_entries, ways);
        if (at >= part->n_entries)
            continue;
        room[n] = part->entries[at];
        room[n].from += r->addresses[room[n].base];
        room[n++].base = 0;
    }
    for (uint64_t i = 0; i < n && engines && status == FANIN_OK; i++)
        status = run_by_engine(stream, &room[i], error);
    return engines ? status : gpu_entries_run(stream, room, n, 0, 0, error);
}

static fanin_status start_part(device_reader *r, size_t i, fanin_error *error)
{
    const device_part *part = &r->plan->parts[i];
    part_run *run = &r->parts[i];
    fanin_status status = find_addresses(r, part->device, error);
    if (status != FANIN_OK)
        return status;
    run->queued = true; /* from now on something may be on the stream */
    if (!part->table)
        return run_entries(r, part, run->stream, error);
    status = gpu_table_set_bases(part->table, run->stream, r->addresses, error);
    if (status == FANIN_OK)
        status = gpu_table_run(part->table, run->stream, 0,
                               gpu_table_count(part->table), 0, 0, error);
    return status;
}

static void run_job(worker_job *scatter)
{
    job *j = (job *)scatter;
    const device_reader *r = j->lane->reader;
    const device_plan *d = r->plan;
    uint64_t started = clock_ns();
    for (uint64_t i = j->first; i < j->first + j->n; i++) {
        const host_landing *l = &d->landings[i];
        const uint8_t *from = j->lane->at.host + l->offset;
        if (l->view)
            strided_copy(&d->views[l->view - 1], r->r->base + l->to, from);
        else
            memcpy(r->r->base + l->to, from, l->length);
    }
    j->ns = clock_ns() - started;
}

static uint64_t host_bytes(const device_plan *d)
{
    uint64_t bytes = 0;
    for (uint64_t i = 0; i < d->n_chunks; i++)
        bytes += d->chunks[i].length;
    return bytes;
}

/* The addresses go to the device before any lane's kernel looks at them. */
static fanin_status set_gather_bases(device_reader *r, gathering *g, fanin_error *error)
{
    fanin_status status = find_addresses(r, g->part->device, error);
    gpu_stream *first = g->lanes[0].at.stream;
    if (status == FANIN_OK)
        status = gpu_table_set_bases(g->part->table, first, r->addresses, error);
    if (status == FANIN_OK)
        status = gpu_stream_wait(first, deadline_in_ms(DRAIN_MS), error);
    if (status != FANIN_OK)
        g->lanes[0].state = LANE_COPYING; /* to be drained before the table goes */
    return status;
}

static fanin_status prepare_parts(device_reader *r, fanin_error *error)
{
    const device_plan *d = r->plan;
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < d->n_parts && status == FANIN_OK; i++) {
        status = device_memory_stream(r->r->client->devices->memory, d->parts[i].device,
                                      &r->parts[i].stream, error);
        if (status == FANIN_OK)
            status = come_after(r, r->parts[i].stream, error);
    }
    return status;
}

static fanin_status prepare_lanes(device_reader *r, gathering *g, fanin_error *error)
{
    gather_lane lanes[GATHER_LANES];
    fanin_status status =
        device_memory_lanes(r->r->client->devices->memory, g->part->device,
                            r->plan->chunk_bytes, !r->direct, lanes, error);
    for (int i = 0; i < GATHER_LANES && status == FANIN_OK; i++) {
        lane *l = &g->lanes[i];
        l->at = lanes[i];
        l->reader = r;
        for (int j = 0; j < JOBS_A_CHUNK; j++) {
            l->jobs[j].lane = l;
            l->jobs[j].job.run = run_job;
        }
        status = come_after(r, l->at.stream, error);
    }
    return status;
}

static fanin_status prepare_gathering(device_reader *r, fanin_error *error)
{
    const device_plan *d = r->plan;
    if (d->n_chunks == 0)
        return FANIN_OK;
    r->direct = d->contiguous && r->r->pinned;
    r->digests = can_digest(r);
    bool threads = !r->direct && host_bytes(d) >= THREADS_FROM;
    unsigned most = MAX_THREADS * (unsigned)d->n_gathers;
    r->pool = worker_pool_create(0, threads ? most : 0, -1);
    fanin_status status = r->pool ? FANIN_OK : error_set_memory(error);
    for (size_t i = 0; i < d->n_gathers && status == FANIN_OK; i++) {
        r->gathers[i].part = &d->gathers[i];
        status = prepare_lanes(r, &r->gathers[i], error);
    }
    return status;
}

fanin_status device_reader_start(const path_reading *reading, const device_plan *plan,
                                 const device_source *sources, device_reader **out,
                                 fanin_error *error)
{
    device_reader *r = calloc(1, sizeof *r);
    *out = r;
    if (!r)
        return error_set_memory(error);
    r->r = reading;
    r->plan = plan;
    r->sources = sources;
    r->parts = calloc(plan->n_parts + 1, sizeof *r->parts);
    r->addresses = calloc((size_t)plan->n_bases + 1, sizeof *r->addresses);
    if (!r->parts || !r->addresses)
        return error_set_memory(error);
    fanin_status status = prepare_parts(r, error);
    if (status == FANIN_OK)
        status = prepare_gathering(r, error);
    bool done;
    return status == FANIN_OK ? device_reader_step(r, 0, &done, error) : status;
}

/* FANIN_ERR_TIMEOUT, and nothing written: some lanes are not idle yet. */
static fanin_status ask_lanes(device_reader *r, deadline until, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < r->plan->n_gathers; i++) {
        for (int j = 0; j < GATHER_LANES && status == FANIN_OK; j++)
            status = ask_if_copied(r->gathers[i].lanes[j].at.stream, until, error);
    }
    return status;
}

/* What is on a stream cannot be recalled, so nothing is put behind the caller's work before that
   has ended: a pull whose deadline passes meanwhile leaves nothing behind. */
static fanin_status enter_context(device_reader *r, deadline until, fanin_error *error)
{
    const device_plan *d = r->plan;
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < d->n_parts && status == FANIN_OK; i++)
        status = ask_if_copied(r->parts[i].stream, until, error);
    if (status == FANIN_OK)
        status = ask_lanes(r, until, error);
    if (status != FANIN_OK)
        return status == FANIN_ERR_TIMEOUT ? FANIN_OK : status;
    r->entered = true;
    for (size_t i = 0; i < d->n_parts && status == FANIN_OK; i++)
        status = start_part(r, i, error);
    for (size_t i = 0; i < d->n_gathers && status == FANIN_OK; i++)
        status = set_gather_bases(r, &r->gathers[i], error);
    return status;
}

/* ------------------------------------------------------------------- chunks */

static fanin_status start_chunk(device_reader *r, gathering *g, lane *l,
                                fanin_error *error)
{
    const host_chunk *c = &r->plan->chunks[g->part->first_chunk + g->next_chunk];
    uint8_t *to = r->direct ? r->r->base + c->to : l->at.host + c->lead;
    l->chunk = c;
    l->state = LANE_COPYING;
    l->turn = r->started_chunks++;
    g->next_chunk++;
    fanin_status status =
        gpu_table_run(g->part->table, l->at.stream, c->first_entry, c->n_entries, 0,
                      (uint64_t)(uintptr_t)l->at.device, error);
    if (status == FANIN_OK)
        status = start_chunk_digests(r, l, error);
    if (status == FANIN_OK)
        status = gpu_copy(l->at.stream, to, l->at.device + c->lead, (size_t)c->length,
                          error);
    return status;
}

static void tell_chunk_landed(const device_reader *r, const lane *lane)
{
    const device_plan *d = r->plan;
    const host_chunk *c = lane->chunk;
    if (!r->r->landed)
        return;
    for (uint64_t i = c->first_landing; i < c->first_landing + c->n_landings; i++) {
        const host_landing *l = &d->landings[i];
        const uint64_t *words = digest_at(r, lane, l);
        if (words) {
            digest known = digest_of_words(words[0], words[1]);
            r->r->digested(r->r->cookie, l->to, &known);
        } else if (l->view) {
            landed_view(r->r->landed, r->r->cookie, &d->views[l->view - 1], l->to);
        } else {
            r->r->landed(r->r->cookie, l->to, l->length);
        }
    }
}

static void finish_chunk(device_reader *r, lane *l)
{
    tell_chunk_landed(r, l);
    r->bytes += l->chunk->length;
    r->landed_chunks++;
    l->state = LANE_FREE;
}

/* The chunk is in pinned memory: threads take it to its places, each about as much. */
static void land_chunk(device_reader *r, lane *l)
{
    const host_chunk *c = l->chunk;
    uint64_t jobs = c->n_landings < JOBS_A_CHUNK ? c->n_landings : JOBS_A_CHUNK;
    l->state = LANE_LANDING;
    l->jobs_left = (unsigned)jobs;
    for (uint64_t i = 0; i < jobs; i++) {
        uint64_t first = c->n_landings * i / jobs, end = c->n_landings * (i + 1) / jobs;
        l->jobs[i].first = c->first_landing + first;
        l->jobs[i].n = end - first;
        worker_pool_submit(r->pool, &l->jobs[i].job);
    }
}

static bool collect_chunk(device_reader *r)
{
    bool any = false;
    worker_job *done;
    while ((done = worker_pool_collect(r->pool))) {
        job *j = (job *)done;
        r->scatter_ns += j->ns;
        if (--j->lane->jobs_left == 0)
            finish_chunk(r, j->lane);
        any = true;
    }
    return any;
}

/* A device's chunks end in the order in which they were started: the oldest one is asked for. */
static lane *oldest_of(gathering *g)
{
    lane *oldest = NULL;
    for (int i = 0; i < GATHER_LANES; i++) {
        lane *l = &g->lanes[i];
        if (l->state == LANE_COPYING && (!oldest || l->turn < oldest->turn))
            oldest = l;
    }
    return oldest;
}

/* The one to wait for: of all devices' the oldest. */
static lane *oldest_copying(device_reader *r)
{
    lane *oldest = NULL;
    for (size_t i = 0; i < r->plan->n_gathers; i++) {
        lane *l = oldest_of(&r->gathers[i]);
        if (l && (!oldest || l->turn < oldest->turn))
            oldest = l;
    }
    return oldest;
}

/* What a device has copied, without waiting. */
static fanin_status take_of(device_reader *r, gathering *g, bool *any,
                            fanin_error *error)
{
    lane *l;
    while ((l = oldest_of(g))) {
        fanin_status status = ask_if_copied(l->at.stream, 0, error);
        if (status != FANIN_OK)
            return status == FANIN_ERR_TIMEOUT ? FANIN_OK : status;
        *any = true;
        if (r->direct)
            finish_chunk(r, l);
        else
            land_chunk(r, l);
    }
    return FANIN_OK;
}

static fanin_status take_copied(device_reader *r, deadline until, bool *any,
                                fanin_error *error)
{
    lane *first = until > 0 ? oldest_copying(r) : NULL;
    fanin_status status =
        first ? ask_if_copied(first->at.stream, until, error) : FANIN_OK;
    if (status == FANIN_ERR_TIMEOUT)
        status = FANIN_OK;
    for (size_t i = 0; i < r->plan->n_gathers && status == FANIN_OK; i++)
        status = take_of(r, &r->gathers[i], any, error);
    return status;
}

static fanin_status start_chunks(device_reader *r, gathering *g, bool *any,
                                 fanin_error *error)
{
    fanin_status status = FANIN_OK;
    for (int i = 0; i < GATHER_LANES && status == FANIN_OK; i++) {
        lane *l = &g->lanes[i];
        if (l->state != LANE_FREE || g->next_chunk == g->part->n_chunks)
            continue;
        status = start_chunk(r, g, l, error);
        *any = true;
    }
    return status;
}

/* -------------------------------------------------------------------- steps */

static fanin_status take_chunk_parts(device_reader *r, deadline until, bool *any,
                                     fanin_error *error)
{
    const device_plan *d = r->plan;
    for (size_t i = 0; i < d->n_parts; i++) {
        if (r->parts[i].done)
            continue;
        fanin_status status = ask_if_copied(r->parts[i].stream, until, error);
        if (status != FANIN_OK && status != FANIN_ERR_TIMEOUT)
            return status;
        until = 0; /* one wait is enough */
        if (status != FANIN_OK)
            continue;
        r->parts[i].done = true;
        r->bytes += d->parts[i].bytes;
        *any = true;
    }
    return FANIN_OK;
}

static bool all_done(const device_reader *r)
{
    const device_plan *d = r->plan;
    for (size_t i = 0; i < d->n_parts; i++) {
        if (!r->parts[i].done)
            return false;
    }
    return r->landed_chunks == d->n_chunks;
}

static fanin_status pass(device_reader *r, deadline until, bool *any,
                         fanin_error *error)
{
    const bool gathers = r->plan->n_chunks > r->landed_chunks;
    fanin_status status = r->entered ? FANIN_OK : enter_context(r, until, error);
    if (status != FANIN_OK || !r->entered)
        return status;
    if (gathers && collect_chunk(r))
        *any = true;
    if (gathers)
        status = take_copied(r, until, any, error);
    for (size_t i = 0; i < r->plan->n_gathers && status == FANIN_OK; i++)
        status = start_chunks(r, &r->gathers[i], any, error);
    if (status == FANIN_OK)
        status = take_chunk_parts(r, gathers ? 0 : until, any, error);
    return status;
}

fanin_status device_reader_step(device_reader *r, deadline until, bool *done_out,
                                fanin_error *error)
{
    bool any = false;
    fanin_status status = pass(r, 0, &any, error);
    *done_out = status == FANIN_OK && all_done(r);
    if (status != FANIN_OK || *done_out || any || until == 0)
        return status;
    if (r->entered && r->landed_chunks < r->plan->n_chunks && !oldest_copying(r)) {
        /* All chunks wait for threads: this one copies as well. */
        if (!worker_pool_help(r->pool))
            worker_pool_wait(r->pool);
        until = 0;
    }
    status = pass(r, until, &any, error);
    *done_out = status == FANIN_OK && all_done(r);
    return status;
}

uint64_t device_reader_bytes(const device_reader *r)
{
    return r->bytes;
}

uint64_t device_reader_scatter_ns(const device_reader *r)
{
    return r->scatter_ns;
}

/* ------------------------------------------------------------------- ending */

/* A device that has failed runs nothing any more. */
static bool drain_streams(gpu_stream *stream)
{
    return gpu_stream_wait(stream, deadline_in_ms(DRAIN_MS), NULL) != FANIN_ERR_TIMEOUT;
}

bool device_reader_destroy(device_reader **reader)
{
    device_reader *r = *reader;
    *reader = NULL;
    if (!r)
        return true;
    worker_pool_destroy(&r->pool);
    bool drained = true;
    for (size_t i = 0; r->parts && i < r->plan->n_parts; i++) {
        if (r->parts[i].queued && !r->parts[i].done)
            drained = drain_streams(r->parts[i].stream) && drained;
    }
    for (lane *l; (l = oldest_copying(r)); l->state = LANE_FREE)
        drained = drain_streams(l->at.stream) && drained;
    free(r->parts);
    free(r->addresses);
    free(r);
    return drained;
}
