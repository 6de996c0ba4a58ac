/* SPDX-License-Identifier: Apache-2.0 */
#include "pull/pull.h"

#include "error_set.h"
#include "net/client_rules.h"
#include <inttypes.h>
#include <stdlib.h>

/* -------------------------------------------------------------------- choosing */

/* Why there is nothing that patches could be applied to; NULL: there may be. */
static const char *whole_because(const pull *p)
{
    if (p->unequal)
        return "what patches had led to was not what the ranks held";
    return p->identity.dtype != 0 ? "tensors arrive as another dtype" : NULL;
}

/* Leases that are held stay: the whole is read under them. */
static void read_whole(pull *p, const char *because)
{
    delta_free(&p->delta);
    p->result->info.base_step = 0;
    p->result->info.whole_because = because;
    p->progress = (read_progress){.whole = &p->cache->whole.plan,
                                  .total = p->cache->whole.plan.plan->bytes};
    p->state = PULL_ROOM;
}

fanin_status pull_choose(pull *p, fanin_error *error)
{
    const delta_scene scene = {.client = p->client,
                               .publication = p->publication,
                               .plan = &p->cache->whole.plan,
                               .name = *pull_base_name(p),
                               .announced = p->announced,
                               .ranges = p->goal.ranges,
                               .n_ranges = p->goal.n_ranges};
    const char *because = whole_because(p);
    const destination *d = p->destination;
    base_step *held = because ? NULL : delta_base_copy(d->base, &p->drops);
    fanin_status status = FANIN_OK;
    if (!because && !held)
        because = d->baseless;
    if (!because)
        status = delta_choose(&scene, held, &p->delta, &because, error);
    free(held);
    if (status != FANIN_OK)
        return status;
    if (!p->delta) {
        read_whole(p, because);
        return FANIN_OK;
    }
    p->result->info.base_step = p->delta->base_step;
    p->result->info.path = p->delta->reader->number; /* nothing may have changed */
    p->result->info.whole_because = NULL;
    plan_detail_readers(scene.plan, p->publication);
    p->state = d->recall ? PULL_RECALL : PULL_STREAMS;
    return FANIN_OK;
}

fanin_status pull_recall(pull *p, fanin_error *error)
{
    const char *because = NULL;
    fanin_status status =
        p->destination->recall(p->destination->cookie, &because, error);
    if (status == FANIN_OK && because)
        read_whole(p, because);
    else if (status == FANIN_OK)
        p->state = PULL_STREAMS;
    return status;
}

void pull_patches_begun(pull *p)
{
    const path_plan *plan = &p->cache->whole.plan;
    p->state = PULL_PATCHES;
    for (size_t i = 0; i < plan->n_sources; i++) {
        size_t peer = plan->peer_of[i];
        if (p->needed[peer] &&
            p->leases[peer].epoch != p->announced[peer].patches.generation) {
            read_whole(p, "a rank leased another copy than the one that it announced");
            return;
        }
    }
}

/* Changed bytes from which threads check and apply them: a word takes some 2 ns. */
#define THREADS_FROM ((uint64_t)1 << 18)
/* More than threads: pieces have more changes or fewer. */
#define PARTS 64

static fanin_status run_parts(pull *p, workers_fn fn, fanin_error *error)
{
    bool worth = p->delta->read.plan->bytes >= THREADS_FROM;
    return workers_run(p->client, UINT64_MAX, PARTS, worth, fn, p, error);
}

/* --------------------------------------------------------------------- reading */

static fanin_status read_patches(pull *p, fanin_error *error)
{
    delta *d = p->delta;
    plan_part part = {.plan = d->read};
    uint64_t bytes = d->read.plan->bytes;
    for (size_t i = 0; i < PATH_READERS; i++)
        part.details[i] = path_readers[i] == d->reader ? d->details : NULL;
    p->progress.whole = &d->read;
    p->progress.total = p->progress.done + bytes;
    fanin_status status = pull_read_aside(p, &part, d->staging, error);
    if (status == FANIN_OK)
        p->result->info.patch_bytes += bytes;
    return status;
}

static fanin_status check_patch_part(void *cookie, size_t part, work_stop *stop,
                                     fanin_error *error)
{
    const pull *p = cookie;
    (void)stop;
    return delta_check(p->delta, part, PARTS, error);
}

fanin_status pull_patches(pull *p, fanin_error *error)
{
    const char *because = NULL;
    fanin_status status = read_patches(p, error);
    if (status == FANIN_OK)
        status = delta_plan_changes(p->delta, &because, error);
    if (status == FANIN_OK && because) {
        read_whole(p, because);
        return FANIN_OK;
    }
    if (status == FANIN_OK)
        status = read_patches(p, error);
    if (status == FANIN_OK)
        status = run_parts(p, check_patch_part, error);
    if (status == FANIN_OK && !CLIENT_RULE(CLIENT_RULE_APPLY))
        status = pull_apply(p, error);
    if (status == FANIN_OK)
        pull_read_follows(p);
    return status;
}

/* -------------------------------------------------------------------- applying */

/* So much of each source. It is not stopped: a moment late is better than torn. */
static fanin_status apply_part(void *cookie, size_t part, work_stop *stop,
                               fanin_error *error)
{
    const pull *p = cookie;
    const plan *whole = p->delta->whole->plan;
    (void)stop;
    (void)error;
    for (size_t i = 0; i < whole->n_ranks; i++) {
        uint64_t n = whole->ranks[i].n_pieces;
        if (p->delta->sources[i].chain > 0)
            delta_apply(p->delta, i, n * part / PARTS, n * (part + 1) / PARTS, p->base);
    }
    return FANIN_OK;
}

fanin_status pull_apply(pull *p, fanin_error *error)
{
    fanin_status status =
        delta_await_stream(p->delta, &p->options->stream, p->at, error);
    if (status != FANIN_OK)
        return status;
    uint64_t drops = p->drops;
    pull_writes(p);
    bool holds = p->drops == drops + 1; /* else somebody has said that it was written */
    if (holds)
        status = run_parts(p, apply_part, error);
    if (status == FANIN_OK && holds)
        status = delta_apply_devices(p->delta, p->base, error);
    if (status == FANIN_ERR_TIMEOUT)
        p->destination->leak = true;
    if (status != FANIN_OK)
        return status;
    if (holds && p->destination->patched) /* its work goes on beside the comparison */
        p->destination->patched(p->destination->cookie);
    p->result->info.restarts += !holds;
    p->state = !holds ? PULL_START : p->kept ? PULL_COMPARE : PULL_PUBLISH;
    return status;
}

fanin_status pull_compare(pull *p, fanin_error *error)
{
    fanin_error why = FANIN_ERROR_INIT;
    bool equal = false;
    fanin_status status = verify_kept(p->kept, &equal, &why);
    if (status != FANIN_OK)
        return error_copy(error, &why);
    p->result->info.verified = equal;
    p->state = equal ? PULL_PUBLISH : PULL_START;
    if (equal)
        return FANIN_OK;
    p->unequal = true;
    p->result->info.restarts++;
    if (p->destination->restart)
        p->destination->restart(p->destination->cookie);
    log_write(&p->client->log, FANIN_LOG_WARNING, "delta-unequal",
              "%s step %" PRIu64 " by patches since step %" PRIu64
              ": %s; the whole is read",
              p->publication->name, p->identity.step, p->delta->base_step, why.message);
    return FANIN_OK;
}

void pull_patches_forget(pull *p)
{
    delta_free(&p->delta);
    verify_forget(&p->kept);
}
