/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finds each tensor's geometry. Where all sources follow chunk rules the shape alone tells
 * it, and no box is looked at; otherwise the boxes themselves do.
 */
#include "error_set.h"
#include "plan/plan_internal.h"

#include <stdlib.h>
#include <string.h>

/* A rule that all sources follow, world 0: none. False: some follow no chunk rule. */
static bool sources_rule(const plan_source *sources, size_t n_sources, const bool *use,
                         uint32_t *dim_out, uint32_t *world_out)
{
    uint32_t dim_all = 0, world_all = 0;
    bool first = true;
    for (size_t i = 0; i < n_sources; i++) {
        uint32_t dim, world, index;
        if ((use && !use[i]) || box_table_count(sources[i].boxes) == 0)
            continue; /* what holds nothing contradicts no rule */
        if (box_table_rule(sources[i].boxes, &dim, &world, &index) != BOXES_CHUNK)
            return false;
        if (first) {
            dim_all = dim;
            world_all = world;
        } else if (dim != dim_all || world != world_all) {
            world_all = 0;
        }
        first = false;
    }
    *dim_out = dim_all;
    *world_out = world_all;
    return true;
}

static bool words_reserve(cover *c, uint64_t more)
{
    return array_reserve(&c->words, &c->word_capacity, c->n_words + more,
                         sizeof *c->words);
}

static bool add_owner(cover *c, uint32_t source, const block *b)
{
    if (!words_reserve(c, geometry_step(b->n_dims)))
        return false;
    uint64_t *w = c->words + c->n_words;
    *w++ = source;
    memcpy(w, b->offset, b->n_dims * sizeof *w);
    memcpy(w + b->n_dims, b->extent, b->n_dims * sizeof *w);
    c->n_words += geometry_step(b->n_dims);
    return true;
}

static bool add_shape(cover *c, const key_entry *e)
{
    dtype_unit unit = dtype_get_unit(e->dtype);
    c->n_words = 0;
    if (!words_reserve(c, 2 + FANIN_MAX_DIMS))
        return false;
    c->words[0] = (uint64_t)unit.elements << 32 | unit.bytes;
    c->words[1] = e->n_dims;
    memcpy(c->words + 2, e->shape, e->n_dims * sizeof *e->shape);
    c->n_words = 2 + e->n_dims;
    return true;
}

static bool add_boxes(cover *c, uint32_t key)
{
    block b;
    for (size_t s = 0; s < c->n_sources; s++) {
        const box_table *boxes = c->sources[s].boxes;
        while (c->cursor[s] < c->end[s] && c->next_key[s] == key) {
            box_table_get(boxes, c->cursor[s], NULL, &b, NULL);
            if (work_stopped(c->stop) || !add_owner(c, (uint32_t)s, &b))
                return false;
            if (++c->cursor[s] < c->end[s])
                box_table_get(boxes, c->cursor[s], &c->next_key[s], NULL, NULL);
        }
    }
    return true;
}

static bool add_chunks(cover *c, const key_entry *e)
{
    for (size_t s = 0; s < c->n_sources; s++) {
        uint32_t dim, world, index;
        if (box_table_count(c->sources[s].boxes) == 0)
            continue;
        box_table_rule(c->sources[s].boxes, &dim, &world, &index);
        block b = block_chunk(e->n_dims, e->shape, dim, world, index);
        if (work_stopped(c->stop) ||
            (!block_is_empty(&b) && !add_owner(c, (uint32_t)s, &b)))
            return false;
    }
    return true;
}

/* Whether those words are what tells geometry @p id from others. */
static bool is_geometry(const cover *c, uint32_t id, uint64_t n_id)
{
    const geometry *g = &c->geometries[id];
    return g->n_id == n_id && memcmp(g->words, c->words, n_id * sizeof *g->words) == 0;
}

static fanin_status cover_key(cover *c, uint32_t key, fanin_error *error)
{
    const key_entry *e = &c->keys->entries[key];
    if (!add_shape(c, e) || (!c->by_shape && !add_boxes(c, key)))
        return plan_broken_off(c->stop, error);
    uint64_t n_id = c->n_words, probe = 0;
    uint32_t id, *out = &c->of_key[key];
    for (uint32_t i = 0; (*out = recent_id(&c->recent, i)) != PLAN_NONE; i++)
        if (is_geometry(c, *out, n_id))
            return FANIN_OK;
    uint64_t hash = words_hash(c->words, n_id, c->stop);
    while ((id = intern_next(&c->index, hash, &probe)) != PLAN_NONE) {
        if (!is_geometry(c, id, n_id))
            continue;
        recent_add(&c->recent, *out = id);
        return FANIN_OK;
    }
    if (work_stopped(c->stop) || (c->by_shape && !add_chunks(c, e)))
        return plan_broken_off(c->stop, error);
    fanin_status status = geometry_make(c, key, n_id, hash, out, error);
    if (status == FANIN_OK)
        recent_add(&c->recent, *out);
    return status;
}

/* Ordinals are counted, not looked up: right only if all boxes were met, in key order. */
static fanin_status check_counts(const cover *c, fanin_error *error)
{
    for (size_t s = 0; s < c->n_sources; s++) {
        if (c->cursor[s] == c->end[s])
            continue;
        error_place place = {.phase = "plan",
                             .rank_plus_1 = (int32_t)c->sources[s].rank + 1};
        return error_set(error, FANIN_ERR_INTERNAL, &place,
                         "the boxes of rank %u are not in the order of the keys",
                         c->sources[s].rank);
    }
    return FANIN_OK;
}

void cover_seek(cover *c, const key_range *keys)
{
    for (size_t s = 0; s < c->n_sources; s++) {
        const box_table *boxes = c->sources[s].boxes;
        uint64_t count;
        c->cursor[s] = box_table_of_keys(boxes, *keys, &count);
        c->end[s] = c->cursor[s] + count;
        if (count > 0)
            box_table_get(boxes, c->cursor[s], &c->next_key[s], NULL, NULL);
    }
}

static fanin_status cover_start(cover *c, fanin_error *error)
{
    size_t n = c->n_sources;
    c->of_key = calloc((size_t)c->keys->count + 1, sizeof *c->of_key);
    c->cursor = calloc(n + 1, sizeof *c->cursor);
    c->end = calloc(n + 1, sizeof *c->end);
    c->next_key = calloc(n + 1, sizeof *c->next_key);
    c->sole = calloc(n + 1, sizeof *c->sole);
    if (!c->of_key || !c->cursor || !c->end || !c->next_key || !c->sole ||
        !array_reserve(&c->classes, &c->class_capacity, n, sizeof *c->classes) ||
        !array_reserve(&c->class_sources, &c->class_source_capacity, n,
                       sizeof *c->class_sources))
        return error_set_memory(error);
    for (size_t s = 0; s < n; s++) {
        uint64_t count = box_table_count(c->sources[s].boxes);
        error_place place = {.phase = "plan",
                             .rank_plus_1 = (int32_t)c->sources[s].rank + 1};
        if (count > UINT32_MAX)
            return error_set(error, FANIN_ERR_LIMIT, &place,
                             "rank %u has more than %u boxes", c->sources[s].rank,
                             UINT32_MAX);
        c->class_sources[s] = (uint32_t)s;
        c->classes[s] = (holder_class){.first = s, .count = 1, .key = PLAN_NONE};
    }
    c->n_classes = c->n_class_sources = n;
    return FANIN_OK;
}

static fanin_status cover_range(cover *c, const key_range *keys, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    if (!c->by_shape)
        cover_seek(c, keys);
    for (uint32_t i = 0; i < keys->count && status == FANIN_OK; i++) {
        uint32_t key = keys->first + i;
        status = work_stopped(c->stop) ? plan_broken_off(c->stop, error)
                                       : cover_key(c, key, error);
        if (status == FANIN_OK && c->by_shape)
            c->geometries[c->of_key[key]].keys++;
    }
    return status == FANIN_OK && !c->by_shape ? check_counts(c, error) : status;
}

/* By shape no box was looked at: they must be as many as the shapes say. */
static fanin_status check_shapes(cover *c, fanin_error *error)
{
    for (uint64_t i = 0; i < c->n_geometries; i++)
        for (uint32_t j = 0; j < c->geometries[i].n_owners; j++)
            c->cursor[c->geometries[i].sources[j]] += c->geometries[i].keys;
    for (size_t i = 0; i < c->proven.n; i++)
        for (size_t s = 0; s < c->n_sources; s++) {
            uint64_t count;
            (void)box_table_of_keys(c->sources[s].boxes, c->proven.ranges[i], &count);
            c->end[s] += count;
        }
    return check_counts(c, error);
}

fanin_status cover_build(cover *c, const key_table *keys, const plan_source *sources,
                         size_t n_sources, const plan_rules *rules, fanin_error *error)
{
    *c = (cover){.keys = keys,
                 .sources = sources,
                 .n_sources = n_sources,
                 .whole = {0, keys->count},
                 .stop = rules->stop};
    c->proven = rules->keys ? *rules->keys
                            : (key_set){.ranges = &c->whole, .n = keys->count > 0};
    if (n_sources >= PLAN_NONE)
        return error_set(error, FANIN_ERR_ARGUMENT, NULL, "too many ranks");
    c->by_shape = sources_rule(sources, n_sources, NULL, &c->dim, &c->world);
    fanin_status status = cover_start(c, error);
    for (size_t i = 0; i < c->proven.n && status == FANIN_OK; i++)
        status = cover_range(c, &c->proven.ranges[i], error);
    return status == FANIN_OK && c->by_shape ? check_shapes(c, error) : status;
}

void cover_free(cover *c)
{
    for (uint64_t i = 0; i < c->n_geometries; i++)
        geometry_free(&c->geometries[i]);
    free(c->geometries);
    intern_free(&c->index);
    intern_free(&c->class_index);
    free(c->of_key);
    free(c->classes);
    free(c->class_sources);
    free(c->bounds);
    free(c->sole);
    free(c->words);
    free(c->cursor);
    free(c->end);
    free(c->next_key);
    *c = (cover){0};
}

/* Whether the first chunks, of as many as there are in the rule, are all that those keys have. */
static bool chunks_enough(const key_table *keys, const key_range *range, uint32_t dim,
                          uint32_t world, uint32_t chunks)
{
    for (uint32_t i = 0; i < range->count; i++) {
        const key_entry *e = &keys->entries[range->first + i];
        if (e->bytes == 0)
            continue;
        if (e->n_dims <= dim)
            return false;
        uint64_t chunk = (e->shape[dim] - 1) / world + 1;
        if ((e->shape[dim] - 1) / chunk >= chunks)
            return false;
    }
    return true;
}

/* All follow one chunk rule: chunks before the first that nobody holds are enough for a
   tensor that has no more. */
static bool chunks_sufficient(const key_table *keys, const plan_source *sources,
                              size_t n_sources, const bool *use, uint32_t dim,
                              uint32_t world, const key_set *proven)
{
    bool *held = calloc(world, sizeof *held);
    if (!held)
        return false;
    for (size_t s = 0; s < n_sources; s++) {
        uint32_t index;
        if (!use[s] || box_table_count(sources[s].boxes) == 0)
            continue;
        box_table_rule(sources[s].boxes, NULL, NULL, &index);
        if (index < world)
            held[index] = true;
    }
    uint32_t missing = 0;
    while (missing < world && held[missing])
        missing++;
    free(held);
    const key_range whole = {0, keys->count};
    bool enough =
        missing == world || proven || chunks_enough(keys, &whole, dim, world, missing);
    for (size_t i = 0; proven && missing < world && enough && i < proven->n; i++)
        enough = chunks_enough(keys, &proven->ranges[i], dim, world, missing);
    return enough;
}

bool plan_sufficient(const key_table *keys, const plan_source *sources,
                     size_t n_sources, const bool *use, const plan_rules *rules)
{
    static const plan_rules none;
    uint32_t dim, world;
    rules = rules ? rules : &none;
    if (sources_rule(sources, n_sources, use, &dim, &world) && world > 0)
        return chunks_sufficient(keys, sources, n_sources, use, dim, world,
                                 rules->keys);
    plan_source *used = malloc((n_sources + 1) * sizeof *used);
    size_t n_used = 0;
    if (!used)
        return false;
    for (size_t i = 0; i < n_sources; i++)
        if (use[i])
            used[n_used++] = sources[i];
    cover c;
    bool enough = cover_build(&c, keys, used, n_used, rules, NULL) == FANIN_OK;
    cover_free(&c);
    free(used);
    return enough;
}
