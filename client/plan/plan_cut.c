/* SPDX-License-Identifier: Apache-2.0 */
#include "digest.h"

#include "plan/plan_internal.h"
#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------- numbering of equal things */

#define HASH_WORDS 65536 /* hashed without a look at whether it is wanted */

uint32_t intern_next(const intern *t, uint64_t hash, uint64_t *probe)
{
    if (!t->slots)
        return PLAN_NONE;
    for (;;) {
        const intern_slot *slot = &t->slots[(hash + *probe) & t->mask];
        if (slot->id_plus_1 == 0)
            return PLAN_NONE;
        ++*probe;
        if (slot->hash == hash)
            return (uint32_t)(slot->id_plus_1 - 1);
    }
}

static void put_number_at(intern *t, uint64_t hash, uint64_t id_plus_1)
{
    uint64_t i = hash & t->mask;
    while (t->slots[i].id_plus_1 != 0)
        i = (i + 1) & t->mask;
    t->slots[i] = (intern_slot){.hash = hash, .id_plus_1 = id_plus_1};
}

bool intern_add(intern *t, uint64_t hash, uint32_t id)
{
    uint64_t size = t->slots ? t->mask + 1 : 0;
    if (2 * (t->used + 1) > size) {
        intern old = *t;
        size = size ? 2 * size : 64;
        t->slots = calloc(size, sizeof *t->slots);
        if (!t->slots) {
            *t = old;
            return false;
        }
        t->mask = size - 1;
        for (uint64_t i = 0; old.slots && i <= old.mask; i++)
            if (old.slots[i].id_plus_1 != 0)
                put_number_at(t, old.slots[i].hash, old.slots[i].id_plus_1);
        free(old.slots);
    }
    put_number_at(t, hash, (uint64_t)id + 1);
    t->used++;
    return true;
}

void intern_free(intern *t)
{
    free(t->slots);
    *t = (intern){0};
}

uint64_t words_hash(const uint64_t *words, uint64_t count, work_stop *stop)
{
    uint64_t state[2] = {0}, done = 0;
    do {
        uint64_t n = count - done < HASH_WORDS ? count - done : HASH_WORDS;
        digest d = digest_of(words + done, n * sizeof *words);
        memcpy(&state[1], d.bytes, sizeof state[1]);
        if (done > 0) {
            d = digest_of(state, sizeof state);
            memcpy(&state[1], d.bytes, sizeof state[1]);
        }
        state[0] = state[1];
        done += n;
    } while (done < count && !work_stopped_after(stop, WORK_STEPS));
    return state[0];
}

/* ------------------------------------------------------ cutting and views */

/* Bytes from the first element of dimensions @p dim and up to the end of the last one. */
static uint64_t copy_cover(const copy_block *b, uint32_t dim)
{
    uint64_t cover = b->unit;
    for (uint32_t i = dim; i < b->n_dims; i++)
        cover += (b->extent[i] - 1) * (uint64_t)b->from[i];
    return cover;
}

typedef struct cutting {
    const cut_rule *rule;
    cut_fn fn;
    void *cookie;
    uint32_t joined; /* dimensions from here on may be read as one range */
    copy_block part;
} cutting;

uint32_t cut_joined(uint32_t n_dims, const uint64_t *extent, const int64_t *from,
                    uint64_t run, const cut_rule *rule)
{
    uint64_t cover = run;
    uint32_t joined = n_dims;
    for (uint32_t i = n_dims; i-- > 0; joined = i) {
        uint64_t stride = (uint64_t)from[i];
        bool adjacent = run == cover && stride == run;
        uint64_t gap = stride > cover ? stride - cover : 0;
        if (!adjacent && gap > 0 && stride >= rule->min_step &&
            (run >= rule->short_run || gap > rule->max_gap))
            break;
        cover += (extent[i] - 1) * stride;
        if (adjacent)
            run = cover;
    }
    return joined;
}

static bool give(cutting *c, uint32_t dim, uint64_t from, uint64_t to)
{
    copy_block part = {.n_dims = c->part.n_dims - dim,
                       .unit = c->part.unit,
                       .convert = c->part.convert};
    memcpy(part.extent, c->part.extent + dim, part.n_dims * sizeof part.extent[0]);
    memcpy(part.from, c->part.from + dim, part.n_dims * sizeof part.from[0]);
    memcpy(part.to, c->part.to + dim, part.n_dims * sizeof part.to[0]);
    return c->fn(c->cookie, &part, from, to, copy_cover(&part, 0));
}

/* Dimensions before dim are fixed. */
static bool cut_from(cutting *c, uint32_t dim, uint64_t from, uint64_t to)
{
    copy_block *b = &c->part;
    if (dim >= c->joined && copy_cover(b, dim) <= c->rule->max_length)
        return give(c, dim, from, to);
    uint64_t all = b->extent[dim], rows = 1;
    uint64_t inner = copy_cover(b, dim + 1), stride = (uint64_t)b->from[dim];
    if (dim >= c->joined && inner <= c->rule->max_length && stride > 0) {
        rows = 1 + (c->rule->max_length - inner) / stride;
        uint64_t slices = (all - 1) / rows + 1;
        rows = (all - 1) / slices + 1; /* of one size, as far as possible */
    }
    bool going = true;
    for (uint64_t at = 0; at < all && going; at += rows) {
        uint64_t start = from + at * stride, land = to + at * (uint64_t)b->to[dim];
        b->extent[dim] = all - at < rows ? all - at : rows;
        going = b->extent[dim] == 1 ? cut_from(c, dim + 1, start, land)
                                    : give(c, dim, start, land);
    }
    b->extent[dim] = all;
    return going;
}

bool cut_block(const copy_block *b, const cut_rule *rule, cut_fn fn, void *cookie)
{
    cutting c = {.rule = rule, .fn = fn, .cookie = cookie};
    c.part.unit = b->unit;
    c.part.convert = b->convert;
    for (uint32_t i = 0; i < b->n_dims; i++) {
        if (b->extent[i] == 1)
            continue;
        c.part.extent[c.part.n_dims] = b->extent[i];
        c.part.from[c.part.n_dims] = b->from[i];
        c.part.to[c.part.n_dims] = b->to[i];
        c.part.n_dims++;
    }
    c.joined = cut_joined(c.part.n_dims, c.part.extent, c.part.from, c.part.unit, rule);
    return cut_from(&c, 0, 0, 0);
}

static bool view_equal(const strided *a, const strided *b)
{
    size_t n = a->n_dims * sizeof a->extent[0];
    return a->n_dims == b->n_dims && a->run == b->run && a->convert == b->convert &&
           memcmp(a->extent, b->extent, n) == 0 && memcmp(a->from, b->from, n) == 0 &&
           memcmp(a->to, b->to, n) == 0;
}

static uint64_t view_hash(const strided *s)
{
    uint64_t words[3 + 3 * FANIN_MAX_DIMS], n = 0;
    words[n++] = s->n_dims;
    words[n++] = s->run;
    words[n++] = s->convert;
    for (uint32_t i = 0; i < s->n_dims; i++) {
        words[n++] = s->extent[i];
        words[n++] = (uint64_t)s->from[i];
        words[n++] = (uint64_t)s->to[i];
    }
    return words_hash(words, n, NULL);
}

bool view_intern(view_set *set, const strided *s, uint32_t *view_out)
{
    uint64_t hash = view_hash(s), probe = 0;
    for (uint32_t id; (id = intern_next(&set->index, hash, &probe)) != PLAN_NONE;) {
        if (view_equal(&set->views[id], s)) {
            *view_out = id + 1;
            return true;
        }
    }
    if (set->n >= PLAN_NONE - 1 ||
        !array_reserve(&set->views, &set->capacity, set->n + 1, sizeof *set->views) ||
        !intern_add(&set->index, hash, (uint32_t)set->n))
        return false;
    set->views[set->n++] = *s;
    *view_out = (uint32_t)set->n;
    return true;
}

bool view_of_block(view_set *set, const copy_block *part, uint32_t *view_out)
{
    strided s;
    *view_out = 0;
    strided_init(&s, part->n_dims, part->extent, part->from, part->to, part->unit);
    if (s.n_dims == 0 && part->convert == CONVERT_NONE)
        return true;
    s.convert = part->convert;
    for (uint32_t i = 0; i < s.n_dims; i++)
        s.to[i] = copy_landed(part->convert, s.to[i]);
    return view_intern(set, &s, view_out);
}

void view_set_free(view_set *set)
{
    free(set->views);
    intern_free(&set->index);
    *set = (view_set){0};
}

uint32_t block_to_units(const block *b, dtype_unit unit, uint64_t *offset,
                        uint64_t *extent)
{
    if (b->n_dims == 0) {
        offset[0] = 0;
        extent[0] = 1;
        return 1;
    }
    memcpy(offset, b->offset, b->n_dims * sizeof *offset);
    memcpy(extent, b->extent, b->n_dims * sizeof *extent);
    offset[b->n_dims - 1] /= unit.elements;
    extent[b->n_dims - 1] /= unit.elements;
    return b->n_dims;
}

void landed_view(landed_fn landed, void *cookie, const strided *view, uint64_t to)
{
    uint64_t runs = strided_runs(view), pending = 0, start = 0;
    uint64_t run = convert_bytes(view->convert, view->run);
    for (uint64_t i = 0; i < runs; i++) {
        int64_t offset;
        strided_run(view, i, NULL, &offset);
        uint64_t at = to + (uint64_t)offset;
        if (pending > 0 && at == start + pending) {
            pending += run;
            continue;
        }
        if (pending > 0)
            landed(cookie, start, pending);
        start = at;
        pending = run;
    }
    if (pending > 0)
        landed(cookie, start, pending);
}

/* --------------------------------------------------- targets to templates */

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
static bool fill_target_box(fill_set *set, const geometry *g, uint32_t unique,
                            const block *want, const int64_t *stride, uint32_t convert,
                            work_stop *stop)
{
    block box, part;
    uint64_t box_at[FANIN_MAX_DIMS] = {0}, box_extent[FANIN_MAX_DIMS];
    uint64_t want_at[FANIN_MAX_DIMS] = {0}, part_at[FANIN_MAX_DIMS] = {0};
    uint64_t unused[FANIN_MAX_DIMS];
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
        if (work_stopped(stop) ||
            !fill_target_box(set, g, u, want, stride, convert, stop))
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
