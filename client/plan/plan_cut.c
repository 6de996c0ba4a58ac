/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/plan_internal.h"

#include <stdlib.h>
#include <string.h>

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

bool block_on_units(const block *b, dtype_unit unit)
{
    if (b->n_dims == 0)
        return unit.elements == 1;
    return b->offset[b->n_dims - 1] % unit.elements == 0 &&
           b->extent[b->n_dims - 1] % unit.elements == 0;
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
