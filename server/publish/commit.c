/* SPDX-License-Identifier: Apache-2.0 */
/* fanin_server_commit(), from the beginning to the end of one commit: it is checked, becomes the
   publication's pending one, gets its catalog, copies the shards if it is to, waits for nothing
   but streams then, and takes effect when the last of them has got there. */
#include "convert.h"
#include "core/rules.h"
#include "error_set.h"
#include "publish/commit.h"
#include "publish/lease.h"
#include "publish/patches.h"
#include "shards/arena.h"
#include "versioned.h"

#include <inttypes.h>
#include <stdlib.h>

/** What the caller wants. */
typedef struct request {
    commit_terms terms;
    bool wait;
    const fanin_stream *stream; /**< NULL: none */
    gpu *gpu;                   /**< of the stream */
} request;

/* ----------------------------------------------------------------- options */

void fanin_commit_options_init(fanin_commit_options *options, size_t size)
{
    fanin_commit_options defaults = {.stream = {.device = -1}};
    versioned_init(options, size, &defaults, sizeof defaults);
}

static fanin_status bad_option(fanin_error *error, const char *what, const char *remedy)
{
    error_place place = {.phase = "commit", .remedy = remedy};
    return error_set(error, FANIN_ERR_ARGUMENT, &place, "%s", what);
}

/* A struct of an older caller ends earlier: the rest has the defaults. */
static fanin_status read_options(const fanin_commit_options *given,
                                 fanin_commit_options *out, fanin_error *error)
{
    fanin_commit_options_init(out, sizeof *out);
    if (!given)
        return FANIN_OK;
    if (!versioned_read(out, sizeof *out, given, 0))
        return bad_option(error, "struct_size of the commit options is not set",
                          "call fanin_commit_options_init() first");
    if (out->flags & ~(uint32_t)(FANIN_COMMIT_SNAPSHOT | FANIN_COMMIT_WAIT))
        return bad_option(error, "the commit options have an unknown flag", NULL);
    if (out->cast != 0 && !(out->flags & FANIN_COMMIT_SNAPSHOT))
        return bad_option(error, "a commit by reference cannot cast",
                          "give FANIN_COMMIT_SNAPSHOT as well");
    if (out->deltas > PATCHES_MOST)
        return bad_option(error, "at most 16 deltas are kept", NULL);
    if (out->deltas != 0 && !(out->flags & FANIN_COMMIT_SNAPSHOT))
        return bad_option(error, "a commit by reference has no deltas",
                          "give FANIN_COMMIT_SNAPSHOT as well");
    if (out->cast != 0 && convert_between(FANIN_DTYPE_F32, out->cast) <= 0)
        return bad_option(error, "F32 shards can be cast to BF16 or F16 only", NULL);
    return FANIN_OK;
}

static fanin_status check_stream(fanin_server *s, request *q, fanin_error *error)
{
    if (!q->stream)
        return FANIN_OK;
    fanin_status status = gpu_load(&s->log, &q->gpu, error);
    if (status != FANIN_OK)
        return status;
    int devices = gpu_count(q->gpu), device = q->stream->device;
    if (device >= 0 && device < devices)
        return FANIN_OK;
    error_place place = {.phase = "commit"};
    return error_set(error, FANIN_ERR_ARGUMENT, &place,
                     "the stream's device is %d, this process sees %d CUDA devices",
                     device, devices);
}

/* ------------------------------------------------------------------ checks */

static fanin_status absent(const char *name, fanin_error *error)
{
    error_place place = {.phase = "commit",
                         .remedy = "put shards, or call begin_update, first"};
    return error_set(error, FANIN_ERR_ARGUMENT, &place, "there is no publication %s",
                     name);
}

/* Whether it is the time for a commit. Lock held. */
static fanin_status check_time(const publication *p, fanin_error *error)
{
    error_place place = {.phase = "commit",
                         .remedy = "call begin_update before the bytes are written"};
    bool readable = p->state == STATE_DRAINING || p->state == STATE_STABLE;
    bool may_follow = p->mode == MODE_SNAPSHOT && (p->update_open || p->aborted);
    if (!p->present)
        return absent(p->name, error);
    if (p->paused)
        return publication_refuse_paused(p, "commit", error);
    if (readable && !may_follow)
        return error_set(error, FANIN_ERR_STATE, &place, "no update of %s is open",
                         p->name);
    return FANIN_OK;
}

/* Whether it goes with the commits before. Lock held. */
static fanin_status check_terms(const publication *p, const commit_terms *terms,
                                fanin_error *error)
{
    error_place place = {.phase = "commit"};
    bool known = p->mode != MODE_UNKNOWN;
    if (p->has_step && terms->step <= p->step && !terms->fills) {
        place.remedy = "steps must grow, also after a publication was removed";
        return error_set(error, FANIN_ERR_ARGUMENT, &place,
                         "step %" PRIu64 " of %s is not above the last one, %" PRIu64,
                         terms->step, p->name, p->step);
    }
    if (known && p->mode != terms->mode) {
        place.remedy = "commit it always in the same way, or remove it first";
        return error_set(error, FANIN_ERR_STATE, &place,
                         p->mode == MODE_SNAPSHOT
                             ? "%s was published as snapshots, not by reference"
                             : "%s was published by reference, not as snapshots",
                         p->name);
    }
    if (known && p->cast != terms->cast) {
        place.remedy = "give the same cast at every commit, or remove it first";
        return error_set(error, FANIN_ERR_ARGUMENT, &place,
                         "%s was published with another cast", p->name);
    }
    return FANIN_OK;
}

/* ----------------------------------------------------------------- pending */

/* Checks and begins; with the writer lock if that is so. */
static fanin_status begin(fanin_server *s, publication *p, const request *q,
                          commit **out, fanin_error *error)
{
    fanin_status status = commit_enter(s, p, error);
    if (status != FANIN_OK)
        return status;
    status = check_time(p, error);
    if (status == FANIN_OK)
        status = check_terms(p, &q->terms, error);
    if (status == FANIN_OK)
        status = commit_make(s, p, &q->terms, out, error);
    pthread_mutex_unlock(&s->lock);
    if (status != FANIN_OK)
        pthread_mutex_unlock(&p->writer);
    return status;
}

static fanin_status overtaken(const commit *c, fanin_error *error)
{
    error_place place = {.phase = "commit"};
    return error_set(error, FANIN_ERR_STATE, &place,
                     "another update of %s began before step %" PRIu64
                     " was committed, or it was aborted or removed",
                     c->of->name, c->terms.step);
}

static fanin_status device_failed(const commit *c, fanin_error *error)
{
    error_place place = {.phase = "commit",
                         .remedy = "the trainer's log says what has failed"};
    return error_set(error, FANIN_ERR_TRANSPORT, &place,
                     "step %" PRIu64 " of %s: a CUDA device has failed", c->terms.step,
                     c->of->name);
}

/* ----------------------------------------------------------------- catalog */

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
        if (gpu_prepare(atomic_load(&s->gpu), in.device, GPU_COPY, &why) != FANIN_OK)
            log_write(&s->log, FANIN_LOG_WARNING, "no-stream",
                      "%s: CUDA device %d cannot be read by stream: %s%s%s", p->name,
                      (int)in.device, why.message, why.remedy[0] ? "; " : "",
                      why.remedy);
        else if (gpu_prepare(atomic_load(&s->gpu), in.device, GPU_DIGEST, &why) !=
                 FANIN_OK)
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

static fanin_status give_catalog(fanin_server *s, commit *c, fanin_error *error)
{
    shard_catalog *made = NULL;
    fanin_status status = make_catalog(s, c->of, &c->terms, &made, error);
    if (status != FANIN_OK)
        return status;
    pthread_mutex_lock(&s->lock);
    c->catalog = made;
    pthread_mutex_unlock(&s->lock);
    return FANIN_OK;
}

/* ------------------------------------------------------------------- arena */

/* Until no lease is in the way of the arena to fill, or is to be waited for; nobody can get one any
   more. Lock held, given up while waiting: for at most the lease time. */
static void wait_for_holders(fanin_server *s, publication *p, const commit *c,
                             bool published)
{
    drain d;
    if (!RULE(RULE_ARENA_WAIT))
        return;
    drain_begin(
        p, &d,
        deadline_in_ms(RULE(RULE_ARENA_DEADLINE) ? s->lease_ms : COMMIT_WAIT_MS));
    d.ignores_expiry = !RULE(RULE_ARENA_DEADLINE);
    (void)drain_finish(s, p, &d, published ? 0 : p->epoch, c);
}

/* The arena to fill gets a generation that nobody has leases of. Waits for sends, the lock given up
   meanwhile. */
static void advance_arena(fanin_server *s, publication *p, commit *c, bool published)
{
    c->generation = next_even(s);
    if (!RULE(RULE_ARENA_RAISE))
        return;
    p->previous = 0;
    if (published)
        p->epoch = c->closing = c->generation;
    lease_void_outdated(s, p);
    publication_wait_for_reads(s, p);
}

/* Chooses the arena to fill, and makes sure that nobody reads it any more. */
static fanin_status take_arena(fanin_server *s, publication *p, commit *c,
                               fanin_error *error)
{
    pthread_mutex_lock(&s->lock);
    bool shared = p->state == STATE_STABLE &&
                  p->catalog->plan->arenas == c->catalog->plan->arenas;
    bool published = shared && !RULE(RULE_ARENA_CHOICE);
    c->arena = shared && !published ? 1 - p->arena : p->arena;
    p->filling = c->catalog->plan->arenas;
    p->filling_arena = c->arena;
    wait_for_holders(s, p, c, published);
    bool over = p->pending != c;
    if (!over)
        advance_arena(s, p, c, published);
    pthread_mutex_unlock(&s->lock);
    return over ? overtaken(c, error) : FANIN_OK;
}

/* ------------------------------------------------------------------ copies */

/* Queues the device parts. Their streams tell the commit when they have got there. */
static fanin_status queue_copies(fanin_server *s, const request *q, commit *c,
                                 fanin_error *error)
{
    fanin_status status = FANIN_OK;
    const arena_plan *plan = c->catalog->plan;
    const arena_set *arenas = plan->arenas;
    for (uint32_t i = 0; status == FANIN_OK && i < arenas->n_parts; i++) {
        gpu_stream *stream = arenas->parts[i].stream;
        if (!stream)
            continue;
        patches_prepare(c, i);
        status = arena_copy_part(plan, i, c->arena, q->stream, error);
        if (status != FANIN_OK)
            break;
        /* Before a patch is made and our thread is told: the caller's work waits for neither. */
        if (q->stream)
            status = gpu_stream_before(stream, q->stream, error);
        patches_queue(s, c, i);
        commit_expect(c);
        fanin_status told = gpu_stream_notify(stream, commit_arrive, c,
                                              status == FANIN_OK ? error : NULL);
        if (told != FANIN_OK) {
            /* Nobody will tell us when the shards are not read any more. */
            (void)gpu_stream_wait(stream, deadline_in_ms(COMMIT_WAIT_MS), NULL);
            commit_arrive(c, false);
        }
        status = status == FANIN_OK ? told : status;
    }
    return status;
}

static fanin_status expect_caller(const request *q, commit *c, fanin_error *error)
{
    commit_expect(c);
    fanin_status status = gpu_notify(q->gpu, q->stream, commit_arrive, c, error);
    if (status != FANIN_OK)
        commit_arrive(c, false);
    return status;
}

/* Until all streams that were asked have got there. */
static fanin_status wait_for_streams(fanin_server *s, commit *c, fanin_error *error)
{
    fanin_status status = commit_await(c, 1, true, deadline_in_ms(COMMIT_WAIT_MS));
    error_place place = {.phase = "commit",
                         .remedy = "find out what its stream waits for"};
    if (status != FANIN_OK)
        return error_set(error, status, &place,
                         "the stream of step %" PRIu64
                         " of %s has had unfinished work for %d s",
                         c->terms.step, c->of->name, COMMIT_WAIT_MS / 1000);
    pthread_mutex_lock(&s->lock);
    bool over = c->of->pending != c;
    pthread_mutex_unlock(&s->lock);
    if (over)
        return overtaken(c, error);
    return commit_has_failed(c) ? device_failed(c, error) : FANIN_OK;
}

static fanin_status copy_host(fanin_server *s, commit *c, fanin_error *error)
{
    uint64_t bad;
    patch_maker *patch = patches_begin(s, c);
    arena_copy_host(c->catalog->plan, c->arena, patch, &bad);
    patches_make(s, c, patch, bad == 0);
    if (bad == 0)
        return FANIN_OK;
    shard_unreadable(shard_set_holder(&c->of->shards, bad), s->rank, error);
    log_write(&s->log, FANIN_LOG_ERROR, "read-failed", "step %" PRIu64 " of %s: %s",
              c->terms.step, c->of->name, error->message);
    return FANIN_ERR_TRANSPORT;
}

/* Memory of the host is copied here and now, when the stream that may write it is done. */
static fanin_status copy(fanin_server *s, const request *q, commit *c,
                         fanin_error *error)
{
    const arena_plan *plan = c->catalog->plan;
    bool host = plan->n_batches > 0;
    ON_FILL();
    fanin_status status = queue_copies(s, q, c, error);
    if (status == FANIN_OK && q->stream && host)
        status = expect_caller(q, c, error);
    if (status == FANIN_OK && host && !q->stream)
        status = copy_host(s, c, error);
    if (status == FANIN_OK && (host || !q->stream))
        status = wait_for_streams(s, c, error);
    if (status == FANIN_OK && host && q->stream)
        status = copy_host(s, c, error);
    return status;
}

/* ------------------------------------------------------------------ effect */

/* With the publication's writer lock. */
static fanin_status carry_out(fanin_server *s, const request *q, commit *c,
                              fanin_error *error)
{
    fanin_status status = give_catalog(s, c, error);
    if (status == FANIN_OK && c->terms.mode == MODE_SNAPSHOT) {
        status = take_arena(s, c->of, c, error);
        return status == FANIN_OK ? copy(s, q, c, error) : status;
    }
    return status == FANIN_OK && q->stream ? expect_caller(q, c, error) : status;
}

/* What became of it; it takes effect now if it can. */
static fanin_status outcome_of(fanin_server *s, commit *c, fanin_error *error)
{
    pthread_mutex_lock(&s->lock);
    if (c->of->pending == c)
        commit_settle(s, c->of);
    commit_outcome outcome = c->outcome;
    pthread_mutex_unlock(&s->lock);
    if (outcome == COMMIT_WITHDRAWN)
        return overtaken(c, error);
    return outcome == COMMIT_FAILED ? device_failed(c, error) : FANIN_OK;
}

/* The call has done all it had to, with what @p status says. Takes the lock. */
static fanin_status end_call(fanin_server *s, commit *c, fanin_status status,
                             fanin_error *error)
{
    if (status != FANIN_OK) {
        pthread_mutex_lock(&s->lock);
        commit_fail(c);
        pthread_mutex_unlock(&s->lock);
    }
    commit_arrive(c, false);
    return status == FANIN_OK ? outcome_of(s, c, error) : status;
}

static fanin_status wait_for_effect(fanin_server *s, commit *c, fanin_error *error)
{
    fanin_status status = commit_await(c, 0, true, deadline_in_ms(COMMIT_WAIT_MS));
    if (status == FANIN_OK)
        return outcome_of(s, c, error);
    error_place place = {.phase = "commit",
                         .remedy = "find out what its stream waits for; the commit "
                                   "takes effect when that work is done"};
    return error_set(error, status, &place,
                     "step %" PRIu64 " of %s has not taken effect for %d s",
                     c->terms.step, c->of->name, COMMIT_WAIT_MS / 1000);
}

static fanin_status run(fanin_server *s, publication *p, const request *q,
                        fanin_error *error)
{
    commit *c = NULL;
    fanin_status status = begin(s, p, q, &c, error);
    if (status != FANIN_OK)
        return status;
    status = carry_out(s, q, c, error);
    status = end_call(s, c, status, error);
    pthread_mutex_unlock(&p->writer);
    if (status == FANIN_OK && q->wait)
        status = wait_for_effect(s, c, error);
    commit_release(c);
    return status;
}

static fanin_status publish(fanin_server *s, const char *name, request *q,
                            fanin_error *error)
{
    publication *p = publication_look_up(s, name);
    if (!p)
        return absent(name, error);
    uint64_t began = clock_ns();
    fanin_status status = check_stream(s, q, error);
    if (status == FANIN_OK)
        status = run(s, p, q, error);
    publication_span(s, TRACE_COMMIT, began, name, q->terms.step, status);
    return status;
}

fanin_status fanin_server_commit(fanin_server *server, const char *name, uint64_t step,
                                 const fanin_commit_options *options,
                                 fanin_error *error)
{
    fanin_status status = publication_call_check(server, name, error);
    fanin_commit_options o;
    if (status == FANIN_OK)
        status = read_options(options, &o, error);
    if (status != FANIN_OK)
        return status;
    request q = {
        .terms = {.step = step,
                  .mode =
                      o.flags & FANIN_COMMIT_SNAPSHOT ? MODE_SNAPSHOT : MODE_REFERENCE,
                  .cast = o.cast,
                  .deltas = o.deltas,
                  .on_stream = o.stream.handle != NULL},
        .wait = o.flags & FANIN_COMMIT_WAIT,
        .stream = o.stream.handle ? &o.stream : NULL,
    };
    return publish(server, name, &q, error);
}

fanin_status commit_plainly(fanin_server *s, const char *name,
                            const commit_terms *terms, fanin_error *error)
{
    request q = {.terms = *terms};
    return publish(s, name, &q, error);
}
