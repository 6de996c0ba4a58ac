/* SPDX-License-Identifier: Apache-2.0 */
#include "publish/commit.h"
#include "shards/arena.h"

static fanin_status append_arena(shard_catalog *built, const shard_catalog *before,
                                 fanin_error *error)
{
    fanin_status status = FANIN_OK;
    uint32_t n = built->arena_regions = built->regions.count;
    for (uint32_t i = 0; status == FANIN_OK && i < n; i++) {
        const region *first = built->regions.regions[i];
        const gpu_range *in;
        uint64_t distance = arena_distance(built->plan->arenas, first->base, &in);
        status = region_set_append(built->registrar, &built->regions,
                                   before ? &before->regions : NULL,
                                   first->base + distance, first->length, in, error);
    }
    return status;
}

/* The same contents, in arenas. */
static fanin_status build_copied(fanin_server *s, const publication *p,
                                 catalog_contents what, fanin_dtype cast,
                                 shard_catalog **out, fanin_error *error)
{
    const arena_plan *old = p->catalog ? p->catalog->plan : NULL;
    shard_set packed;
    arena_plan *plan = NULL;
    fanin_status status = arena_plan_build(atomic_load(&s->gpu), &p->shards, cast, old,
                                           &packed, &plan, error);
    what.shards = &packed;
    if (status == FANIN_OK) {
        status = shard_catalog_build(&s->registrar, &what, p->catalog, out, error);
        if (status != FANIN_OK)
            arena_plan_free(plan, arena_plan_drop(plan));
    }
    shard_set_free(&packed);
    if (status != FANIN_OK)
        return status;
    (*out)->plan = plan;
    status = append_arena(*out, p->catalog, error);
    if (status != FANIN_OK)
        shard_catalog_release(*out);
    return status;
}

/* Reads by stream copy device memory with a kernel, digests of it are made by another. They are
   loaded here, by the trainer's thread, as the readers of a data thread would wait while it did.
   Devices that cannot run the first serve cuda_ipc still. */
static void prepare_devices(fanin_server *s, const publication *p,
                            const shard_catalog *built)
{
    bool done[GPU_MAX_DEVICES] = {false};
    for (uint32_t i = 0; built->has_device && i < built->regions.count; i++) {
        const fanin_memory in = built->regions.regions[i]->memory;
        fanin_error why = FANIN_ERROR_INIT;
        if (in.kind != FANIN_MEMORY_CUDA || done[in.device])
            continue;
        done[in.device] = true;
        if (gpu_prepare(atomic_load(&s->gpu), in.device, &why) != FANIN_OK)
            log_write(&s->log, FANIN_LOG_WARNING, "no-stream",
                      "%s: CUDA device %d cannot be read by stream: %s%s%s", p->name,
                      (int)in.device, why.message, why.remedy[0] ? "; " : "",
                      why.remedy);
        else if (gpu_prepare_digest(atomic_load(&s->gpu), in.device, &why) != FANIN_OK)
            log_write(&s->log, FANIN_LOG_WARNING, "slow-digests",
                      "%s: memory of CUDA device %d is digested by the CPU: %s",
                      p->name, (int)in.device, why.message);
    }
}

fanin_status make_catalog(fanin_server *s, publication *p, const commit_terms *terms,
                          shard_catalog **out, fanin_error *error)
{
    pthread_mutex_lock(&s->lock);
    bool current = p->catalog && p->catalog->revision == p->revision;
    if (current)
        *out = shard_catalog_retain(p->catalog);
    catalog_contents what = {.shards = &p->shards,
                             .pairs = p->pairs,
                             .n_pairs = (uint32_t)p->n_pairs,
                             .version = current ? 0 : next_even(s),
                             .rank = s->rank,
                             .world_size = s->world_size};
    pthread_mutex_unlock(&s->lock);
    if (current)
        return FANIN_OK;
    fanin_status status =
        terms && terms->mode == MODE_SNAPSHOT
            ? build_copied(s, p, what, terms->cast, out, error)
            : shard_catalog_build(&s->registrar, &what, p->catalog, out, error);
    if (status != FANIN_OK)
        return status;
    (*out)->revision = p->revision;
    prepare_devices(s, p, *out);
    return FANIN_OK;
}
