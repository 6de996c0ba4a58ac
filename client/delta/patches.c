/* SPDX-License-Identifier: Apache-2.0 */
/* Whether a delta can be read instead of the whole, what is read of it, and whether that is what it
   is to be. */
#include "delta/delta.h"

#include "device/devices.h"
#include "error_set.h"
#include "net/client_rules.h"
#include <stdlib.h>
#include <string.h>

static const char too_large[] =
    "the patches have more than half of the bytes of the whole";

/* FANIN_ERR_PROTOCOL: the source's rank tells of a patch @p lie. */
static fanin_status blame_rank(const delta *d, size_t source, fanin_error *error,
                               const char *lie)
{
    const connection *c = d->client->peers[d->whole->peer_of[source]].control;
    error_place place = connection_place(c, "read");
    place.remedy = "use the same fanin release on both ends, or pull without deltas";
    return error_set(error, FANIN_ERR_PROTOCOL, &place,
                     "rank %u at %s tells of a patch %s", c->peer.rank, c->text, lie);
}

/* --------------------------------------------------------------------- reading */

static void clear_plan(delta *d)
{
    for (size_t i = 0; d->details && i < d->whole->n_sources; i++)
        d->reader->forget(d->details[i]);
    plan_free(&d->read.plan);
    free((void *)d->read.reader_of);
    free((void *)d->details);
    d->read = (path_plan){0};
    d->details = NULL;
}

static bool begin_plan(delta *d)
{
    const path_plan *whole = d->whole;
    size_t n = whole->n_sources;
    d->read = (path_plan){.plan = calloc(1, sizeof(plan)),
                          .sources = whole->sources,
                          .peer_of = whole->peer_of,
                          .reader_of = calloc(n + 1, sizeof *whole->reader_of),
                          .n_sources = n,
                          .once = true};
    d->details = calloc(n + 1, sizeof *d->details);
    if (!d->read.plan || !d->read.reader_of || !d->details)
        return false;
    d->read.plan->ranks = calloc(n + 1, sizeof *d->read.plan->ranks);
    d->read.plan->n_ranks = n;
    for (size_t i = 0; i < n; i++)
        d->sources[i].piece_room = 0;
    return d->read.plan->ranks != NULL;
}

/* Bytes [@p offset, @p offset + @p length) of a box of the source come next, behind what was named
   before in this plan. */
static fanin_status read_range(delta *d, size_t source, uint64_t box, uint64_t offset,
                               uint64_t length, fanin_error *error)
{
    if (!d->read.plan && !begin_plan(d))
        return error_set_memory(error);
    plan_rank *rank = &d->read.plan->ranks[source];
    for (uint64_t step; length > 0; length -= step, offset += step) {
        step = length < PIECE_MAX ? length : PIECE_MAX;
        if (!array_reserve(&rank->pieces, &d->sources[source].piece_room,
                           rank->n_pieces + 1, sizeof *rank->pieces))
            return error_set_memory(error);
        rank->pieces[rank->n_pieces++] = (piece){.box = (uint32_t)box,
                                                 .offset = offset,
                                                 .length = (uint32_t)step,
                                                 .to = d->read.plan->bytes};
        rank->bytes += step;
        d->read.plan->bytes += step;
        d->read.reader_of[source] = d->reader;
    }
    return FANIN_OK;
}

static fanin_status make_lists(delta *d, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    for (size_t i = 0; i < d->whole->n_sources && status == FANIN_OK; i++) {
        if (!d->read.reader_of[i])
            continue;
        read_list *list = d->details[i] = calloc(1, sizeof *list);
        status = list ? read_list_build(d->read.plan, i, NULL, NULL, NULL, list, error)
                      : error_set_memory(error);
    }
    return status;
}

/* What was there has been read. */
static fanin_status make_staging(delta *d, uint64_t bytes, const char **because,
                                 fanin_error *error)
{
    if (d->devices.n > 0) {
        if (device_memory_patches(d->client->devices->memory, bytes, &d->staging,
                                  NULL) != FANIN_OK)
            *because = "patches for a device find no pinned memory";
        return FANIN_OK;
    }
    free(d->staging);
    d->staging = array_large(bytes, 1);
    return d->staging ? FANIN_OK : error_set_memory(error);
}

/* The plan is whole: makes room for what it brings. *@p because: that is too much. */
static fanin_status end_plan(delta *d, const char **because, fanin_error *error)
{
    if (!d->read.plan && !begin_plan(d))
        return error_set_memory(error);
    d->bytes += d->read.plan->bytes;
    if (d->bytes > d->most) {
        *because = too_large;
        return FANIN_OK;
    }
    fanin_status status = make_staging(d, d->read.plan->bytes + 1, because, error);
    return status == FANIN_OK ? make_lists(d, error) : status;
}

/* -------------------------------------------------------------------- choosing */

static bool is_needed(const path_plan *plan, size_t source)
{
    return plan->plan->ranks[source].n_pieces > 0;
}

/* NULL: they tell of patches, if only of none, and have one path, over data connections, which is
   *reader. */
static const char *find_reader(const delta_scene *s, const path_reader **reader)
{
    for (size_t i = 0; i < s->plan->n_sources; i++) {
        const path_reader *path = path_taken(s->publication, s->plan->peer_of[i])->path;
        if (!is_needed(s->plan, i))
            continue;
        if (!path->is_linked || (*reader && *reader != path))
            return "a rank is read by a path that reads no patches";
        if (s->announced[s->plan->peer_of[i]].patches.generation == 0)
            return "a rank keeps no patches";
        *reader = path;
    }
    return NULL;
}

/* How many of the rank's patches lead there from @p generation; -1: none do. */
static int chain_from(const patch_offers *offers, uint64_t generation)
{
    if (offers->generation == generation)
        return 0;
    for (uint32_t i = 0; i < offers->count; i++) {
        if (offers->patches[i].from == generation)
            return (int)i + 1;
    }
    /* Without the rule: whatever there is. */
    return CLIENT_RULE(CLIENT_RULE_BASE) || offers->count == 0 ? -1 : 1;
}

static const char another_plan[] =
    "the destination holds what another plan has brought";

/* NULL: the source has a chain from what the base holds of it. */
static const char *find_chain(const delta_scene *s, const base_rank *held,
                              size_t source, delta_source *out)
{
    size_t peer = s->plan->peer_of[source];
    const announcement *a = &s->announced[peer];
    const msg_hello_ok *rank = &s->client->peers[peer].control->peer;
    int chain = chain_from(&a->patches, held->generation);
    if (held->generation == 0) /* a replica of it was read */
        return another_plan;
    if (CLIENT_RULE(CLIENT_RULE_BASE)) {
        if (memcmp(held->incarnation, rank->incarnation, sizeof held->incarnation) != 0)
            return "a rank was started again";
        if (held->version != a->version)
            return "the tables of a rank have changed";
    }
    if (chain < 0)
        return "a rank has no patches from the step that the destination holds";
    out->offers = &a->patches;
    out->chain = (uint32_t)chain;
    out->segments = a->patches.directory_bytes / 4;
    return NULL;
}

static const char *find_chains(delta *d, const delta_scene *s, const base_step *base)
{
    const digest none = {0};
    const char *because = base->n == s->plan->n_sources ? NULL : another_plan;
    for (size_t i = 0; i < s->plan->n_sources && !because; i++) {
        if (is_needed(s->plan, i))
            because = find_chain(s, &base->ranks[i], i, &d->sources[i]);
    }
    if (because ||
        (digest_equal(&base->of, &s->name) && !digest_equal(&s->name, &none)))
        return because;
    return another_plan;
}

/* The directories, each behind the one before. */
static fanin_status plan_directories(delta *d, const char **because, fanin_error *error)
{
    for (size_t i = 0; i < d->whole->n_sources; i++) {
        const delta_source *s = &d->sources[i];
        uint64_t length = s->chain > 0 ? s->offers->directory_bytes : 0;
        if (length > d->most) {
            *because = too_large;
            return FANIN_OK;
        }
        if (s->chain > 0 &&
            (length == 0 || length % 4 != 0 || s->offers->first_box > LIMIT_BOXES ||
             s->offers->first_box + PATCH_BOXES * s->chain > LIMIT_BOXES))
            return blame_rank(d, i, error, "whose boxes or sizes cannot be");
        for (uint32_t k = 0; k < s->chain; k++) {
            fanin_status status = read_range(
                d, i, s->offers->first_box + PATCH_BOXES * k, 0, length, error);
            if (status != FANIN_OK)
                return status;
        }
    }
    return end_plan(d, because, error);
}

/* NULL: those of the destination's devices can apply patches. */
static const char *find_devices(delta *d)
{
    for (size_t i = 0; i < d->n_ranges; i++)
        device_set_add(&d->devices, d->ranges[i].device);
    if (d->devices.n > 0 && !devices_memory(d->client))
        return "there is no memory to apply patches on a device";
    for (size_t i = 0; i < d->devices.n; i++) {
        if (gpu_prepare(d->client->devices->g, d->devices.device[i], GPU_PATCH_APPLY,
                        NULL) != FANIN_OK)
            return "a device of the destination cannot apply patches";
    }
    return NULL;
}

static fanin_status look_for_patches(delta *d, const delta_scene *s,
                                     const base_step *base, const char **because,
                                     fanin_error *error)
{
    d->sources = calloc(s->plan->n_sources + 1, sizeof *d->sources);
    if (!d->sources)
        return error_set_memory(error);
    *because = find_chains(d, s, base);
    if (!*because)
        *because = find_devices(d);
    return *because ? FANIN_OK : plan_directories(d, because, error);
}

fanin_status delta_choose(const delta_scene *s, const base_step *base, delta **out,
                          const char **because, fanin_error *error)
{
    const path_reader *reader = NULL;
    *out = NULL;
    *because = find_reader(s, &reader);
    if (!*because && !base)
        *because = "it is not known which step the destination holds";
    if (*because)
        return FANIN_OK;
    delta *d = calloc(1, sizeof *d);
    if (!d)
        return error_set_memory(error);
    *d = (delta){.client = s->client,
                 .whole = s->plan,
                 .ranges = s->ranges,
                 .n_ranges = s->n_ranges,
                 .base_step = base->step,
                 .most = s->plan->plan->bytes / 2,
                 .reader = reader};
    fanin_status status = look_for_patches(d, s, base, because, error);
    if (status == FANIN_OK && !*because)
        *out = d;
    else
        delta_free(&d);
    return status;
}

/* ----------------------------------------------------------------- directories */

/* Which segments the plan's pieces touch. */
static fanin_status mark_needed(delta *d, size_t source, fanin_error *error)
{
    delta_source *s = &d->sources[source];
    const plan_rank *rank = &d->whole->plan->ranks[source];
    const box_table *boxes = d->whole->sources[source].boxes;
    box_place place = {0};
    for (uint64_t i = 0; i < rank->n_pieces; i++) {
        const piece *p = &rank->pieces[i];
        if (i == 0 || p->box != rank->pieces[i - 1].box)
            box_table_get(boxes, p->box, NULL, NULL, &place);
        uint64_t from = place.offset + p->offset, end = from + p->length;
        if (place.region != 0 || !place.packed || end > s->segments * PATCH_SEGMENT)
            return blame_rank(d, source, error, "that its boxes do not lie in");
        for (uint64_t k = from / PATCH_SEGMENT; k * PATCH_SEGMENT < end; k++)
            s->needed[k] = true;
    }
    return FANIN_OK;
}

/* What is here of the source's directories, the first of which landed at @p landed. */
static fanin_status read_directories(delta *d, size_t source, const uint8_t *landed,
                                     fanin_error *error)
{
    delta_source *s = &d->sources[source];
    uint64_t n = s->segments;
    s->first = array_large(s->chain * (n + 1), sizeof *s->first);
    s->at = array_large(s->chain * n, sizeof *s->at);
    s->needed = calloc(n, sizeof *s->needed);
    if (!s->first || !s->at || !s->needed)
        return error_set_memory(error);
    for (uint32_t k = 0; k < s->chain; k++) {
        if (!patch_directory_read(landed + k * s->offers->directory_bytes,
                                  n * PATCH_SEGMENT, s->offers->patches[k].bytes,
                                  s->first + k * (n + 1)))
            return blame_rank(d, source, error,
                              "whose directory does not fit its changes");
    }
    return mark_needed(d, source, error);
}

/* Of one patch: needed segments that lie one behind the other are one range. */
static fanin_status read_changes(delta *d, size_t source, uint32_t patch,
                                 fanin_error *error)
{
    const delta_source *s = &d->sources[source];
    const uint64_t *first = s->first + patch * (s->segments + 1);
    uint64_t *at = s->at + patch * s->segments;
    uint64_t box = s->offers->first_box + PATCH_BOXES * patch + 1, end = 0;
    fanin_status status = FANIN_OK;
    for (uint64_t i = 0; i < s->segments && status == FANIN_OK; i = end) {
        uint64_t to = d->read.plan ? d->read.plan->bytes : 0;
        for (end = i; end < s->segments && s->needed[end]; end++)
            at[end] = first[end] < first[end + 1]
                          ? to + PATCH_CHANGE * (first[end] - first[i])
                          : DELTA_NONE;
        status = read_range(d, source, box, PATCH_CHANGE * first[i],
                            PATCH_CHANGE * (first[end] - first[i]), error);
        for (; end < s->segments && !s->needed[end]; end++)
            at[end] = DELTA_NONE;
    }
    return status;
}

fanin_status delta_plan_changes(delta *d, const char **because, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    const uint8_t *landed = d->staging;
    clear_plan(d);
    for (size_t i = 0; i < d->whole->n_sources && status == FANIN_OK; i++) {
        const delta_source *s = &d->sources[i];
        if (s->chain == 0)
            continue;
        status = read_directories(d, i, landed, error);
        landed += s->chain * s->offers->directory_bytes;
        for (uint32_t k = 0; k < s->chain && status == FANIN_OK; k++)
            status = read_changes(d, i, k, error);
    }
    return status == FANIN_OK ? end_plan(d, because, error) : status;
}

/* --------------------------------------------------------------------- changes */

fanin_status delta_check(const delta *d, size_t part, size_t parts, fanin_error *error)
{
    for (size_t i = 0; i < d->whole->n_sources; i++) {
        const delta_source *s = &d->sources[i];
        for (uint32_t k = 0; k < s->chain; k++) {
            const uint64_t *first = s->first + k * (s->segments + 1);
            const uint64_t *at = s->at + k * s->segments;
            uint64_t end = s->segments * (part + 1) / parts;
            for (uint64_t j = s->segments * part / parts; j < end; j++) {
                if (at[j] != DELTA_NONE &&
                    !patch_segment_is_sound(d->staging + at[j], first[j + 1] - first[j],
                                            PATCH_SEGMENT))
                    return blame_rank(d, i, error, "whose places do not ascend");
            }
        }
    }
    return FANIN_OK;
}

void delta_free(delta **d)
{
    if (!*d)
        return;
    clear_plan(*d);
    for (size_t i = 0; (*d)->sources && i < (*d)->whole->n_sources; i++) {
        free((*d)->sources[i].first);
        free((*d)->sources[i].at);
        free((*d)->sources[i].needed);
    }
    free((*d)->sources);
    if ((*d)->devices.n == 0)
        free((*d)->staging);
    free(*d);
    *d = NULL;
}
