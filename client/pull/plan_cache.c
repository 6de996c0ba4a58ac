/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/plan_cache.h"

#include "array.h"
#include "error_set.h"
#include "net/threads.h"
#include "path/path.h"
#include <stdlib.h>
#include <string.h>

/** Destinations in memory whose plans stay: buffers that are filled in turn. */
#define MEMORY 3
/** And a directory. */
#define SLOTS (MEMORY + 1)
/** A plan that brings more has large tables: it does not stay beside a newer one. */
#define LARGE (UINT64_C(4) << 30)

/* ------------------------------------------------------------------ keeping */

/* The memory's that was made for a destination of that layout, or the one that was used longest
   ago. */
static plan_cache *for_memory(plan_cache *plans, const digest *layout)
{
    plan_cache *found = NULL, *oldest = plans;
    uint64_t now = 0;
    for (plan_cache *c = plans; c < plans + MEMORY; c++) {
        if (c->valid && digest_equal(&c->layout, layout))
            found = c;
        if (c->used < oldest->used)
            oldest = c;
        if (c->used > now)
            now = c->used;
    }
    found = found ? found : oldest;
    found->used = now + 1;
    return found;
}

/* All of it but the plan and its sources. */
static void clear_part(plan_part *part)
{
    for (size_t i = 0; i < PATH_READERS; i++) {
        for (size_t j = 0; part->details[i] && j < part->plan.n_sources; j++)
            path_readers[i]->forget(part->details[i][j]);
        if (path_readers[i]->forget_all)
            path_readers[i]->forget_all(part->shared[i]);
        free(part->details[i]);
    }
    free(part->ranges);
    free(part->plan.reader_of);
}

static void free_part(plan_part *part)
{
    if (!part)
        return;
    clear_part(part);
    plan_slice_free(&part->plan.plan);
    free(part);
}

static void drop_parts(plan_cache *cache)
{
    for (size_t i = 0; i < cache->n_parts; i++)
        free_part(cache->parts[i]);
    cache->n_parts = 0;
    cache->part_pieces = 0;
}

static void clear_cache(plan_cache *cache)
{
    drop_parts(cache);
    free(cache->parts);
    free_part(cache->passing);
    plan_index_free(&cache->index);
    clear_part(&cache->whole);
    free(cache->whole.plan.sources);
    free(cache->whole.plan.peer_of);
    plan_free(&cache->whole.plan.plan);
    *cache = (plan_cache){.used = cache->used};
}

static void drop_large(plan_cache *plans, const plan_cache *but)
{
    for (plan_cache *c = plans; c < plans + MEMORY; c++)
        if (c != but && c->valid && c->whole.plan.plan->bytes > LARGE)
            clear_cache(c);
}

plan_cache *plan_cache_of(publication *p, const destination *d)
{
    if (!p->plans)
        p->plans = calloc(SLOTS, sizeof *p->plans);
    if (!p->plans || d->directory)
        return p->plans ? &p->plans[MEMORY] : NULL;
    digest layout = d->layout(d->cookie);
    plan_cache *cache = for_memory(p->plans, &layout);
    drop_large(p->plans, cache);
    return cache;
}

void plan_cache_drop(publication *p)
{
    for (unsigned i = 0; p->plans && i < SLOTS; i++)
        clear_cache(&p->plans[i]);
}

/* ------------------------------------------------------------------- making */

/* What a plan depends on. */
static fanin_status made_from(const fanin_client *client, const publication *p,
                              const bool *use, const destination *d, digest *out,
                              fanin_error *error)
{
    buffer b = {0};
    digest layout = d->layout(d->cookie);
    buffer_append(&b, &layout, sizeof layout);
    buffer_append(&b, &d->dtype, sizeof d->dtype);
    buffer_append(&b, &p->keys->id, sizeof p->keys->id);
    for (size_t i = 0; i < client->n_peers; i++) {
        const shard_table *s = &p->shards[i];
        uint64_t serial = use[i] ? s->serial : 0;
        buffer_append(&b, &serial, sizeof serial);
    }
    /* Of less, two plans would look like one. */
    fanin_status status = b.failed ? error_set_memory(error) : FANIN_OK;
    *out = digest_of(b.data, b.size);
    buffer_free(&b);
    return status;
}

static fanin_status list_sources(const fanin_client *client, const publication *p,
                                 const bool *use, path_plan *plan, fanin_error *error)
{
    size_t n = client->n_peers;
    plan->sources = calloc(n, sizeof *plan->sources);
    plan->peer_of = calloc(n, sizeof *plan->peer_of);
    plan->reader_of = calloc(n, sizeof *plan->reader_of);
    if (!plan->sources || !plan->peer_of || !plan->reader_of)
        return error_set_memory(error);
    for (size_t i = 0; i < n; i++) {
        if (!use[i])
            continue;
        plan->sources[plan->n_sources] =
            (plan_source){client->peers[i].control->peer.rank, p->shards[i].boxes};
        plan->peer_of[plan->n_sources++] = i;
    }
    return FANIN_OK;
}

static fanin_status build_whole(path_plan *plan, fanin_client *client,
                                const publication *p, const bool *use,
                                const destination *d, deadline at, fanin_error *error)
{
    const plan_target *targets = NULL;
    const uint64_t *to_of_key = NULL;
    size_t n_targets = 0;
    client_work work;
    client_work_start(&work, client, at);
    plan_rules rules = {.dtype = d->dtype,
                        .seed = d->seed ? d->seed : client->plan_seed,
                        .keys = &p->wanted,
                        .stop = &work.stop};
    fanin_status status =
        d->prepare(d->cookie, p->keys, &targets, &n_targets, &to_of_key, error);
    if (status == FANIN_OK)
        status = list_sources(client, p, use, plan, error);
    if (status == FANIN_OK)
        status = plan_build(p->keys, plan->sources, plan->n_sources, targets, n_targets,
                            to_of_key, &rules, &plan->plan, error);
    return client_work_end(&work, status, error);
}

bool plan_cache_fits(const plan_cache *cache, const fanin_client *client,
                     const publication *p, const bool *use, const destination *d)
{
    digest from;
    return cache->valid && p->keys &&
           made_from(client, p, use, d, &from, NULL) == FANIN_OK &&
           digest_equal(&cache->made_from, &from);
}

fanin_status plan_cache_make(plan_cache *cache, fanin_client *client,
                             const publication *p, const bool *use,
                             const destination *d, deadline at, fanin_error *error)
{
    digest from;
    fanin_status status = made_from(client, p, use, d, &from, error);
    if (status != FANIN_OK)
        return status;
    if (cache->valid && digest_equal(&cache->made_from, &from))
        return FANIN_OK;
    clear_cache(cache);
    status = build_whole(&cache->whole.plan, client, p, use, d, at, error);
    if (status != FANIN_OK) {
        clear_cache(cache);
        return status;
    }
    cache->made_from = cache->whole.plan.id = from;
    cache->layout = d->layout(d->cookie);
    cache->valid = true;
    return FANIN_OK;
}

/* -------------------------------------------------------------------- parts */

static int compare_part(const void *key, const void *element)
{
    const group_run *wanted = key, *there = &(*(plan_part *const *)element)->run;
    if (wanted->first != there->first)
        return wanted->first < there->first ? -1 : 1;
    return wanted->count < there->count ? -1 : wanted->count > there->count;
}

/* Makes @p r, of which nothing is wanted yet if it has no length, hold [start, end) too. */
static void widen_range(memory_range *r, const memory_range *in, uint8_t *start,
                        uint8_t *end)
{
    uint8_t *low = r->length > 0 && r->base < start ? r->base : start;
    uint8_t *high =
        r->length > 0 && r->base + r->length > end ? r->base + r->length : end;
    *r = (memory_range){low, (size_t)(high - low), in->device};
}

/* What of the whole's ranges the part reaches: each from its first to its last byte there. */
static fanin_status clip_ranges(const plan_part *whole, plan_part *part,
                                work_stop *stop, fanin_error *error)
{
    const plan *plan = part->plan.plan;
    memory_range *clipped = calloc(whole->n_ranges + 1, sizeof *clipped);
    if (!clipped)
        return error_set_memory(error);
    part->ranges = clipped;
    for (size_t s = 0; s < plan->n_ranks; s++) {
        for (uint64_t i = 0; i < plan->ranks[s].n_pieces; i++) {
            uint64_t low, high;
            plan_piece_reach(plan, &plan->ranks[s].pieces[i], &low, &high);
            uint8_t *start = (uint8_t *)(uintptr_t)low;
            const memory_range *in =
                memory_range_find(whole->ranges, whole->n_ranges, start);
            if (work_stopped(stop))
                return work_broken_off(stop, "plan", "a part was cut", error);
            if (in)
                widen_range(&clipped[in - whole->ranges], in, start,
                            (uint8_t *)(uintptr_t)high);
        }
    }
    for (size_t i = 0; i < whole->n_ranges; i++) {
        if (clipped[i].length > 0)
            clipped[part->n_ranges++] = clipped[i];
    }
    return FANIN_OK;
}

static fanin_status make_part(plan_cache *cache, plan_part *part, const group_run *runs,
                              size_t n_runs, work_stop *stop, fanin_error *error)
{
    const path_plan *whole = &cache->whole.plan;
    part->plan = (path_plan){.sources = whole->sources,
                             .peer_of = whole->peer_of,
                             .n_sources = whole->n_sources};
    part->plan.reader_of = calloc(whole->n_sources + 1, sizeof *part->plan.reader_of);
    if (!part->plan.reader_of)
        return error_set_memory(error);
    fanin_status status = plan_slice_build(whole->plan, &cache->index, runs, n_runs,
                                           stop, &part->plan.plan, error);
    return status == FANIN_OK ? clip_ranges(&cache->whole, part, stop, error) : status;
}

static uint64_t count_pieces(const plan *plan)
{
    uint64_t n = 0;
    for (size_t i = 0; i < plan->n_ranks; i++)
        n += plan->ranks[i].n_pieces;
    return n;
}

/* Those of one cut of the whole stay; who cuts it anew each time gets no larger memory by that. */
static fanin_status keep_part(plan_cache *cache, plan_part *part, fanin_error *error)
{
    uint64_t pieces = count_pieces(part->plan.plan);
    if (cache->part_pieces + pieces > 2 * count_pieces(cache->whole.plan.plan))
        drop_parts(cache);
    if (!array_reserve(&cache->parts, &cache->part_capacity, cache->n_parts + 1,
                       sizeof *cache->parts))
        return error_set_memory(error);
    size_t at = array_search(&part->run, cache->parts, cache->n_parts,
                             sizeof *cache->parts, compare_part, NULL);
    memmove(&cache->parts[at + 1], &cache->parts[at],
            (cache->n_parts - at) * sizeof *cache->parts);
    cache->parts[at] = part;
    cache->n_parts++;
    cache->part_pieces += pieces;
    return FANIN_OK;
}

fanin_status plan_cache_part(plan_cache *cache, const group_run *runs, size_t n_runs,
                             bool keep, size_t total, work_stop *stop, plan_part **out,
                             fanin_error *error)
{
    bool found = false;
    size_t at = 0;
    free_part(cache->passing);
    cache->passing = NULL;
    if (keep)
        at = array_search(runs, cache->parts, cache->n_parts, sizeof *cache->parts,
                          compare_part, &found);
    if (found) {
        *out = cache->parts[at];
        return FANIN_OK;
    }
    fanin_status status = FANIN_OK;
    if (!cache->index.places)
        status =
            plan_index_build(cache->whole.plan.plan, total, stop, &cache->index, error);
    if (status != FANIN_OK)
        return status;
    plan_part *part = calloc(1, sizeof *part);
    if (!part)
        return error_set_memory(error);
    status = make_part(cache, part, runs, n_runs, stop, error);
    part->plan.once = !keep;
    if (status == FANIN_OK && keep) {
        part->run = runs[0];
        status = keep_part(cache, part, error);
    } else if (status == FANIN_OK) {
        cache->passing = part;
    }
    if (status != FANIN_OK)
        free_part(part);
    else
        *out = part;
    return status;
}

/* ------------------------------------------------------------------- ranges */

fanin_status plan_cache_ranges(plan_cache *cache, const destination *d,
                               const memory_range **ranges, size_t *n,
                               fanin_error *error)
{
    plan_part *whole = &cache->whole;
    if (!whole->ranges || !d->lasting_ranges) {
        fanin_status status = d->ranges(d->cookie, ranges, n, error);
        if (status != FANIN_OK || !d->lasting_ranges)
            return status;
        whole->ranges = malloc((*n + 1) * sizeof *whole->ranges);
        if (!whole->ranges)
            return error_set_memory(error);
        if (*n > 0)
            memcpy(whole->ranges, *ranges, *n * sizeof *whole->ranges);
        whole->n_ranges = *n;
    }
    *ranges = whole->ranges;
    *n = whole->n_ranges;
    return FANIN_OK;
}

/* ------------------------------------------------------------------ details */

/* Pieces from which threads cut them: one takes some 80 ns. */
#define THREADS_FROM 16384

/* What one reader reads its sources by. */
typedef struct detailing {
    const path_planning *how;
    const path_reader *reader;
    void **details; /* one a source */
} detailing;

static fanin_status detail_source(void *cookie, size_t source, work_stop *stop,
                                  fanin_error *error)
{
    const detailing *d = cookie;
    path_planning how = *d->how;
    how.stop = stop;
    return d->reader->plan(&how, source, &d->details[source], error);
}

/* The sources that lack it, each a part of a crew. */
static fanin_status detail_sources(detailing *d, deadline at, fanin_error *error)
{
    const path_plan *p = d->how->plan;
    uint64_t pieces = 0;
    size_t lacking = 0;
    for (size_t i = 0; i < p->n_sources; i++) {
        bool lacks = p->reader_of[i] == d->reader && !d->details[i];
        lacking += lacks;
        pieces += lacks ? p->plan->ranks[i].n_pieces : 0;
    }
    if (lacking == 0)
        return FANIN_OK;
    workers *c = workers_open(d->how->client, at, p->n_sources,
                              lacking > 1 && pieces >= THREADS_FROM, detail_source, d);
    if (!c)
        return error_set_memory(error);
    for (size_t i = 0; i < p->n_sources; i++) {
        if (p->reader_of[i] == d->reader && !d->details[i])
            workers_begin(c, i);
    }
    fanin_status status = workers_finish(c, NULL, error);
    workers_close(&c);
    return status;
}

static fanin_status detail_of(plan_part *part, size_t reader, const path_planning *how,
                              deadline at, fanin_error *error)
{
    const path_reader *r = path_readers[reader];
    const path_plan *p = &part->plan;
    bool any = false;
    for (size_t i = 0; i < p->n_sources; i++)
        any = any || p->reader_of[i] == r;
    if (!any)
        return FANIN_OK;
    if (!part->details[reader])
        part->details[reader] = calloc(p->n_sources, sizeof *part->details[reader]);
    detailing d = {.how = how, .reader = r, .details = part->details[reader]};
    fanin_status status =
        d.details ? detail_sources(&d, at, error) : error_set_memory(error);
    if (status == FANIN_OK && r->plan_all)
        status = r->plan_all(how, d.details, &part->shared[reader], error);
    return status;
}

static fanin_status detail_all(plan_part *part, fanin_client *client, publication *p,
                               path_goal *goal, deadline at, fanin_error *error)
{
    client_work work;
    client_work_start(&work, client, at);
    path_planning how = {.client = client,
                         .publication = p,
                         .plan = &part->plan,
                         .goal = goal,
                         .stop = &work.stop};
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < PATH_READERS && status == FANIN_OK; i++)
        status = detail_of(part, i, &how, at, error);
    return client_work_end(&work, status, error);
}

void plan_detail_readers(const path_plan *plan, const publication *p)
{
    for (size_t i = 0; i < plan->n_sources; i++)
        plan->reader_of[i] = plan->plan->ranks[i].n_pieces > 0
                                 ? path_taken(p, plan->peer_of[i])->path
                                 : NULL;
}

fanin_status plan_detail_make(plan_part *part, fanin_client *client, publication *p,
                              path_goal *goal, deadline at, fanin_error *error)
{
    plan_detail_readers(&part->plan, p);
    return detail_all(part, client, p, goal, at, error);
}

fanin_status plan_detail_ahead(plan_part *part, fanin_client *client, publication *p,
                               path_goal *goal, const path_reader *reader,
                               const bool *mask, deadline at, fanin_error *error)
{
    const path_plan *plan = &part->plan;
    for (size_t i = 0; i < plan->n_sources; i++) {
        bool is_its = plan->plan->ranks[i].n_pieces > 0 && mask[plan->peer_of[i]];
        plan->reader_of[i] = is_its ? reader : NULL;
    }
    return detail_all(part, client, p, goal, at, error);
}

/* ------------------------------------------------------------- publications */

/* An adapter's are a megabyte or so, over eight ranks. */
#define KEPT_MOST 64

static void drop_publication(fanin_client *client, publication **at)
{
    plan_cache_drop(*at);
    free((*at)->plans);
    (*at)->plans = NULL;
    path_states_free(client, *at);
    tables_free(at);
}

publication *kept_of(fanin_client *client, const char *name)
{
    publication *p = tables_of(client, name), **at = &client->publications;
    for (unsigned i = 0; i < KEPT_MOST && *at; i++)
        at = &(*at)->next;
    while (*at) {
        path_unmap(client, *at);
        drop_publication(client, at);
    }
    return p;
}

void kept_free(fanin_client *client)
{
    while (client->publications)
        drop_publication(client, &client->publications);
    path_states_close(client);
}
