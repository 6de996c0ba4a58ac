/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/plan_internal.h"

#include <stdlib.h>
#include <string.h>

/* Whatever lies between what is wanted: each path finds its own way around that. */
static const cut_rule piece_rule = {
    .max_length = PIECE_MAX, .short_run = UINT64_MAX, .max_gap = UINT64_MAX};

typedef struct filling {
    fill_set *set;
    uint32_t unique;
    uint64_t from,
        to;          /* of the cut block's first element: in the box, in the target (as
                          measured by a copy_block) */
    work_stop *stop; /* a box may be as large as its rank says */
} filling;

static bool add_template(void *cookie, const copy_block *part, uint64_t from,
                         uint64_t to, uint64_t length)
{
    filling *f = cookie;
    fill_set *set = f->set;
    if (work_stopped(f->stop))
        return false;
    piece p = {.box = f->unique, .offset = f->from + from, .length = (uint32_t)length};
    p.to = (uint64_t)copy_landed(part->convert, (int64_t)(f->to + to));
    if (!view_of_block(&set->views, part, &p.view) ||
        !array_reserve(&set->templates, &set->template_capacity, set->n_templates + 1,
                       sizeof *set->templates))
        return false;
    set->templates[set->n_templates++] = p;
    return true;
}

/* What the target wants of one box. */
static bool fill_box(fill_set *set, const geometry *g, uint32_t unique,
                     const block *want, const int64_t *stride, uint32_t convert,
                     work_stop *stop)
{
    block box, part;
    uint64_t box_at[FANIN_MAX_DIMS], box_extent[FANIN_MAX_DIMS],
        want_at[FANIN_MAX_DIMS];
    uint64_t part_at[FANIN_MAX_DIMS], unused[FANIN_MAX_DIMS];
    geometry_block(g, unique, &box);
    if (!block_intersect(&box, want, &part))
        return true;
    copy_block copy = {.unit = g->unit.bytes, .convert = convert};
    block_to_units(&box, g->unit, box_at, box_extent);
    block_to_units(want, g->unit, want_at, unused);
    copy.n_dims = block_to_units(&part, g->unit, part_at, copy.extent);
    block_packed_strides(copy.n_dims, box_extent, g->unit.bytes, copy.from);
    filling f = {.set = set, .unique = unique, .stop = stop};
    for (uint32_t i = 0; i < copy.n_dims; i++) {
        copy.to[i] = stride[i];
        f.from += (part_at[i] - box_at[i]) * (uint64_t)copy.from[i];
        f.to += (part_at[i] - want_at[i]) * (uint64_t)stride[i];
    }
    return cut_block(&copy, &piece_rule, add_template, &f);
}

/* The first unique that reaches beyond @p at on the axis. */
static uint32_t first_beyond(const geometry *g, uint64_t at)
{
    uint32_t low = 0, high = g->n_uniques;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (g->end_max[middle] > at)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static bool fill_boxes(fill_set *set, const geometry *g, const block *want,
                       const int64_t *stride, uint32_t convert, work_stop *stop)
{
    block box;
    uint64_t start = g->n_dims ? want->offset[g->axis] : 0;
    uint64_t end = g->n_dims ? start + want->extent[g->axis] : 1;
    for (uint32_t u = first_beyond(g, start); u < g->n_uniques; u++) {
        geometry_block(g, u, &box);
        if (g->n_dims && box.offset[g->axis] >= end)
            break;
        if (work_stopped(stop) || !fill_box(set, g, u, want, stride, convert, stop))
            return false;
    }
    return true;
}

/* @p stride: bytes between units, NULL: packed. */
static bool fill_make(fill_set *set, const cover *c, uint32_t geometry_id,
                      uint32_t convert, const block *want, const int64_t *stride,
                      uint32_t *id_out)
{
    const geometry *g = &c->geometries[geometry_id];
    uint64_t at[FANIN_MAX_DIMS], extent[FANIN_MAX_DIMS];
    int64_t measure[FANIN_MAX_DIMS];
    fill f = {.geometry = geometry_id, .first = set->n_templates};
    if (!stride) {
        uint32_t n = block_to_units(want, g->unit, at, extent);
        block_packed_strides(n, extent, g->unit.bytes, measure);
    } else {
        for (uint32_t i = 0; i < want->n_dims; i++)
            measure[i] = copy_measure(convert, stride[i]);
    }
    if (set->n >= PLAN_NONE - 1 ||
        !array_reserve(&set->fills, &set->capacity, set->n + 1, sizeof *set->fills))
        return false;
    if (!block_is_empty(want) && !fill_boxes(set, g, want, measure, convert, c->stop))
        return false;
    f.count = set->n_templates - f.first;
    *id_out = (uint32_t)set->n;
    set->fills[set->n++] = f;
    return true;
}

bool fill_whole(fill_set *set, cover *c, uint32_t geometry_id, uint32_t convert,
                uint32_t *id_out)
{
    geometry *g = &c->geometries[geometry_id];
    uint32_t *whole = &g->whole[convert != CONVERT_NONE];
    if (*whole == PLAN_NONE) {
        block all = {.n_dims = g->n_dims};
        memcpy(all.extent, g->shape, g->n_dims * sizeof *g->shape);
        if (!fill_make(set, c, geometry_id, convert, &all, NULL, whole))
            return false;
    }
    *id_out = *whole;
    return true;
}

/* Whether those words are what tells fill @p id from others. */
static bool is_fill(const fill_set *set, uint32_t id, uint32_t geometry_id,
                    const uint64_t *words, uint64_t n)
{
    const fill *f = &set->fills[id];
    return f->geometry == geometry_id &&
           memcmp(set->words + f->words, words, n * sizeof *words) == 0;
}

bool fill_target(fill_set *set, cover *c, uint32_t geometry_id, uint32_t convert,
                 const plan_target *target, uint32_t *id_out)
{
    uint32_t n_dims = target->block.n_dims, id;
    uint64_t words[2 + 3 * FANIN_MAX_DIMS], n = 0, probe = 0;
    bool packed = true;
    words[n++] = geometry_id;
    words[n++] = convert;
    for (uint32_t i = 0; i < n_dims; i++) {
        words[n++] = target->block.offset[i];
        words[n++] = target->block.extent[i];
        words[n++] = (uint64_t)target->stride[i];
        packed = packed && target->stride[i] == 0;
    }
    for (uint32_t i = 0; (*id_out = recent_id(&set->recent, i)) != PLAN_NONE; i++)
        if (is_fill(set, *id_out, geometry_id, words, n))
            return true;
    uint64_t hash = words_hash(words, n, NULL);
    while ((id = intern_next(&set->index, hash, &probe)) != PLAN_NONE) {
        if (!is_fill(set, id, geometry_id, words, n))
            continue;
        recent_add(&set->recent, *id_out = id);
        return true;
    }
    if (!array_reserve(&set->words, &set->word_capacity, set->n_words + n,
                       sizeof *set->words) ||
        !fill_make(set, c, geometry_id, convert, &target->block,
                   packed ? NULL : target->stride, id_out) ||
        !intern_add(&set->index, hash, *id_out))
        return false;
    memcpy(set->words + set->n_words, words, n * sizeof *words);
    set->fills[*id_out].words = set->n_words;
    set->n_words += n;
    recent_add(&set->recent, *id_out);
    return true;
}

void fill_set_free(fill_set *set)
{
    free(set->fills);
    intern_free(&set->index);
    free(set->words);
    free(set->templates);
    view_set_free(&set->views);
    *set = (fill_set){0};
}
