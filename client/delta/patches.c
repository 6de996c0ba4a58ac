/* SPDX-License-Identifier: Apache-2.0 */
/* What is read of patches, and whether it is what it is to be. */
#include "delta/delta_internal.h"

#include "device/devices.h"
#include "error_set.h"
#include <stdlib.h>

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

fanin_status delta_read_range(delta *d, size_t source, uint64_t box, uint64_t offset,
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

fanin_status delta_end_plan(delta *d, const char **because, fanin_error *error)
{
    if (!d->read.plan && !begin_plan(d))
        return error_set_memory(error);
    d->bytes += d->read.plan->bytes;
    if (d->bytes > d->most) {
        *because = delta_too_large;
        return FANIN_OK;
    }
    fanin_status status = make_staging(d, d->read.plan->bytes + 1, because, error);
    return status == FANIN_OK ? make_lists(d, error) : status;
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
            return delta_blame(d, source, error, "that its boxes do not lie in");
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
            return delta_blame(d, source, error,
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
        status = delta_read_range(d, source, box, PATCH_CHANGE * first[i],
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
    return status == FANIN_OK ? delta_end_plan(d, because, error) : status;
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
                    return delta_blame(d, i, error, "whose places do not ascend");
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
