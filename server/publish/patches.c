/* SPDX-License-Identifier: Apache-2.0 */
#include "publish/patches.h"
#include "core/rules.h"
#include "patch.h"
#include "shards/arena.h"
#include "shards/patch_room.h"

#include <stdlib.h>

#define SHARE 8 /* of the copy's bytes that all patches may take */

/* ------------------------------------- between two arenas on a device */

/* Before the copies into @p arena of a publication that keeps patches: what is between boxes is
   zeroed once, in the order of the part's stream, as it is compared as well. */
static void device_patch_prepare(arena_plan *plan, uint32_t part, unsigned arena)
{
    const arena_part *p = &plan->arenas->parts[part];
    if (!plan->zeroed[arena])
        plan->zeroed[arena] =
            gpu_zero(p->stream, p->base[arena], p->length, NULL) == FANIN_OK;
}

/* What does not come about is not tried again. */
static bool room_is_there(gpu *g, arena_part *p, uint64_t most, fanin_error *why)
{
    if (p->asked_for_room)
        return p->room && p->scratch;
    p->asked_for_room = true;
    if (gpu_prepare_patches(g, p->memory.device, why) == FANIN_OK &&
        gpu_alloc(g, p->memory.device, patch_kernel_scratch(p->length), &p->scratch,
                  why) == FANIN_OK)
        p->room = patch_room_make(g, most, why);
    return p->room && p->scratch;
}

/* Queues the making of the patch from the arena @p before to @p after behind the copies. Of pinned
   memory for @p most bytes, made by the first call, the patch may have what is free. *@p packed:
   its directory, in a block of the part's room that is the caller's then; its changes are behind
   it. *@p made: how many those are when the stream gets there, or PATCH_TOO_LARGE. False: none is
   made; @p why is set the first time that the device or the host refuses what all patches need. */
static bool device_patch_queue(arena_plan *plan, uint32_t part, unsigned before,
                               unsigned after, uint64_t most, uint8_t **packed,
                               const uint64_t **made, fanin_error *why)
{
    static const uint64_t none = PATCH_TOO_LARGE;
    arena_part *p = &plan->arenas->parts[part];
    uint64_t directory = patch_directory_bytes(p->length), length;
    if (!plan->zeroed[0] || !plan->zeroed[1] ||
        !room_is_there(plan->arenas->gpu, p, most, why))
        return false;
    *packed = patch_room_take(p->room, &length);
    if (!*packed || length < directory) {
        if (*packed)
            patch_room_give(p->room, *packed);
        *packed = NULL;
        return false;
    }
    uint16_t *counts = p->scratch;
    patch_parameters job = {
        .before = p->base[before],
        .after = p->base[after],
        .bytes = p->length,
        .most = (length - directory) / PATCH_CHANGE,
        .counts = counts,
        .first = (uint64_t *)(counts + patch_segments(p->length) * PATCH_SHARES),
        .directory = (uint32_t *)*packed,
        .changes = *packed + directory,
        .made = patch_room_made(p->room),
    };
    /* Some of it may be on its way: the block is in use until the stream gets there. */
    bool queued = gpu_patch_run(p->stream, &job, NULL) == FANIN_OK;
    *made = queued ? job.made : &none;
    return true;
}

/* ------------------------------------------------------------------ making */

/* The boxes of patches have numbers behind those of the table. */
static bool may_have_patches(const shard_catalog *c)
{
    return c->plan && c->arena_regions == 1 &&
           c->n_boxes + PATCH_BOXES * PATCHES_MOST < LIMIT_BOXES;
}

static uint64_t copy_bytes(const shard_catalog *c)
{
    return c->regions.regions[0]->length;
}

/* With the writer lock. */
static void tell_why_none(const fanin_server *s, publication *p)
{
    if (!p->told_no_patches)
        log_write(
            &s->log, FANIN_LOG_INFO, "no-patches",
            "%s: readers get whole steps: patches are made of snapshots in memory "
            "of the host alone or of one CUDA device, of less than %d boxes",
            p->name, LIMIT_BOXES - PATCH_BOXES * PATCHES_MOST);
    p->told_no_patches = true;
}

/* Whether a patch is made, from the arena *@p before. */
static bool is_wanted(fanin_server *s, commit *c, unsigned *before)
{
    publication *p = c->of;
    if (c->terms.deltas == 0)
        return false;
    pthread_mutex_lock(&s->lock);
    c->wants_patch = s->delta_sessions > 0 || p->expected > 0;
    p->expected -= s->delta_sessions == 0 && p->expected > 0;
    /* What a commit that was withdrawn has copied is nothing to begin with. */
    bool can = c->wants_patch && may_have_patches(c->catalog),
         has_base = p->state == STATE_STABLE && p->catalog == c->catalog &&
                    p->arena != c->arena;
    *before = RULE(RULE_PATCH_BASE) ? p->arena : c->arena;
    pthread_mutex_unlock(&s->lock);
    if (c->wants_patch && !can)
        tell_why_none(s, p);
    return can && has_base;
}

patch_maker *patches_begin(fanin_server *s, commit *c)
{
    unsigned before;
    if (!is_wanted(s, c, &before))
        return NULL;
    return arena_patch_maker(c->catalog->plan, before, copy_bytes(c->catalog) / SHARE);
}

/* NULL: too large, or no memory. */
static patch *build_patch(fanin_server *s, const commit *c, const patch_maker *m)
{
    patch *made = malloc(sizeof *made);
    uint8_t *packed = NULL;
    if (!made)
        return NULL;
    *made = (patch){.from = c->closing, .to = c->generation};
    packed = patch_maker_pack(m, &made->bytes);
    if (packed)
        made->boxes = shard_catalog_of_patch(
            &s->registrar, packed, NULL, patch_directory_bytes(copy_bytes(c->catalog)),
            made->bytes);
    if (made->boxes)
        return made;
    free(packed);
    free(made);
    return NULL;
}

/* Lock held. */
static void announce(fanin_server *s, publication *p, patch *newest)
{
    if (p->patches && p->patches->to != newest->from)
        patches_drop(s, p);
    newest->older = p->patches;
    p->patches = newest;
}

/* It is the commit's. */
static void hand_over(fanin_server *s, commit *c, patch *made)
{
    pthread_mutex_lock(&s->lock);
    if (RULE(RULE_PATCH_ANNOUNCE))
        c->patch = made;
    else if (made)
        announce(s, c->of, made);
    pthread_mutex_unlock(&s->lock);
}

void patches_make(fanin_server *s, commit *c, patch_maker *m, bool copied)
{
    if (!m)
        return;
    patch *made = copied ? build_patch(s, c, m) : NULL;
    patch_maker_close(m);
    hand_over(s, c, made);
}

/* ------------------------------------------------------------------ keeping */

void patches_discard(fanin_server *s, patch *newest)
{
    while (newest) {
        patch *older = newest->older;
        catalog_discard(s, newest->boxes);
        free(newest);
        newest = older;
    }
}

void patches_drop(fanin_server *s, publication *p)
{
    patches_discard(s, p->patches);
    p->patches = NULL;
    p->deltas = 0;
}

/* The oldest make room. */
static void trim(fanin_server *s, patch **link, uint32_t most, uint64_t room)
{
    uint32_t n = 0;
    for (; *link && n < most && (*link)->boxes->bytes <= room; link = &(*link)->older) {
        room -= (*link)->boxes->bytes;
        n++;
    }
    patches_discard(s, *link);
    *link = NULL;
}

/* Of one that a device has made: NULL, it is too large. */
static patch *take_made(fanin_server *s, patch *made)
{
    uint64_t changes = *made->made;
    if (changes == PATCH_TOO_LARGE) {
        patches_discard(s, made);
        return NULL;
    }
    made->made = NULL;
    made->bytes = changes * PATCH_CHANGE;
    shard_catalog_end_patch(made->boxes, made->bytes);
    return made;
}

void patches_take_effect(fanin_server *s, commit *c)
{
    publication *p = c->of;
    patch *made = c->patch;
    c->patch = NULL;
    if (made && made->made)
        made = take_made(s, made);
    s->stats.patches_made += made != NULL;
    s->stats.patches_lacking += c->wants_patch && !made;
    if (made)
        announce(s, p, made);
    else if (RULE(RULE_PATCH_ANNOUNCE))
        patches_drop(s, p);
    p->deltas = c->terms.deltas;
    p->had_deltas = p->had_deltas || p->deltas > 0;
    if (p->patches)
        trim(s, &p->patches, p->deltas, copy_bytes(c->catalog) / SHARE);
}

/* ------------------------------------------------------------ on a device */

/* Lock held. What the largest of the kept ones takes, and a quarter. */
static uint64_t probable_bytes(const publication *p)
{
    uint64_t most = 0;
    for (const patch *one = p->patches; one; one = one->older)
        most = one->boxes->bytes > most ? one->boxes->bytes : most;
    return most + most / 4;
}

/* How large a patch becomes is known too late for it: the oldest go until one that is about as
   large as they are finds room. */
static void leave_room_for_next(fanin_server *s, publication *p, patch_room *room)
{
    bool again = room != NULL;
    while (again) {
        patch **link = &p->patches;
        pthread_mutex_lock(&s->lock);
        again = p->patches && patch_room_longest(room) < probable_bytes(p);
        while (again && (*link)->older)
            link = &(*link)->older;
        if (again) {
            patches_discard(s, *link);
            *link = NULL;
        }
        pthread_mutex_unlock(&s->lock);
        if (again)
            garbage_collect(s);
    }
}

/* What commits that were withdrawn have made gives its room back. Kernels that still write there
   run before those that are queued now. */
static void discard_withdrawn(fanin_server *s, const commit *c)
{
    pthread_mutex_lock(&s->lock);
    for (commit *other = s->commits; other; other = other->next) {
        if (other == c || other->of != c->of)
            continue;
        patches_discard(s, other->patch);
        other->patch = NULL;
    }
    bool any = s->garbage;
    pthread_mutex_unlock(&s->lock);
    if (any)
        garbage_collect(s);
}

void patches_prepare(commit *c, uint32_t part)
{
    if (c->terms.deltas > 0 && may_have_patches(c->catalog))
        device_patch_prepare(c->catalog->plan, part, c->arena);
}

/* Once, as it is asked for once. */
static void tell_no_room(const fanin_server *s, const publication *p,
                         const fanin_error *why)
{
    if (why->status != FANIN_OK)
        log_write(&s->log, FANIN_LOG_WARNING, "no-patches",
                  "%s: readers get whole steps: %s; patches take an eighth of the "
                  "snapshot's bytes in pinned host memory: allow the trainer that much "
                  "memory, or commit without deltas",
                  p->name, why->message);
}

/* NULL: no room, or no memory. */
static patch *queue_patch(fanin_server *s, commit *c, uint32_t part, unsigned before)
{
    const arena_part *p = &c->catalog->plan->arenas->parts[part];
    uint64_t directory = patch_directory_bytes(p->length), most = p->length / SHARE;
    uint8_t *packed = NULL;
    fanin_error why = FANIN_ERROR_INIT;
    patch *made = malloc(sizeof *made);
    if (!made)
        return NULL;
    *made = (patch){.from = c->closing, .to = c->generation};
    discard_withdrawn(s, c);
    leave_room_for_next(s, c->of, p->room);
    if (device_patch_queue(c->catalog->plan, part, before, c->arena, most, &packed,
                           &made->made, &why))
        made->boxes =
            shard_catalog_of_patch(&s->registrar, packed, p->room, directory, 0);
    else
        tell_no_room(s, c->of, &why);
    if (made->boxes)
        return made;
    if (packed) /* kernels that write there run before those of the next patch */
        patch_room_give(p->room, packed);
    free(made);
    return NULL;
}

void patches_queue(fanin_server *s, commit *c, uint32_t part)
{
    unsigned before;
    patch *made = NULL;
    if (is_wanted(s, c, &before))
        made = queue_patch(s, c, part, before);
    if (made)
        hand_over(s, c, made);
}

/* ------------------------------------------------------------------ telling */

void patches_tell(const publication *p, patch_offers *out)
{
    const patch *newest = p->patches;
    *out = (patch_offers){0};
    if (p->deltas == 0 || !may_have_patches(p->catalog))
        return;
    out->generation = p->epoch;
    if (newest && !RULE(RULE_PATCH_ANNOUNCE))
        out->generation = newest->to;
    else if (newest && newest->to != p->epoch)
        newest = NULL;
    out->directory_bytes = patch_directory_bytes(copy_bytes(p->catalog));
    out->first_box = p->catalog->n_boxes;
    for (; newest && out->count < PATCHES_MOST; newest = newest->older)
        out->patches[out->count++] = (struct patch_offer){newest->from, newest->bytes};
}

shard_catalog *patches_find(const publication *p, uint64_t to, uint64_t k)
{
    const patch *one = p->patches;
    while (one && one->to != to)
        one = one->older;
    for (; one && k > 0; k--)
        one = one->older;
    return one ? one->boxes : NULL;
}
