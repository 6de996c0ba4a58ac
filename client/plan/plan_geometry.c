/* SPDX-License-Identifier: Apache-2.0 */
#include "plan/plan_internal.h"

#include "error_set.h"
#include "text.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* -------------------------------------------------------- who serves what */

/*
 * Boxes with the same holders form a class. A class is shared out among its holders as
 * ranges of keys, so that each of them serves neighbouring boxes; the ranges are as long
 * as levels the loads of all sources. Which holder gets the first range is another one for
 * each client: what cannot be shared evenly (a tensor that stands alone) would else fall
 * upon the same rank for all of them.
 */

#define ROUNDS_MAX 16

static uint64_t hash_sources(const uint32_t *sources, uint32_t count)
{
    uint64_t hash = count;
    for (uint32_t i = 0; i < count; i++) {
        hash = (hash ^ sources[i]) * 0x9E3779B97F4A7C15;
        hash ^= hash >> 29;
    }
    return hash;
}

/* The class of boxes that exactly these sources (ascending) hold. */
static bool class_intern(cover *c, const uint32_t *sources, uint32_t count,
                         uint32_t *id_out)
{
    if (count == 1) {
        *id_out = sources[0];
        return true;
    }
    uint64_t hash = hash_sources(sources, count), probe = 0;
    for (uint32_t id; (id = intern_next(&c->class_index, hash, &probe)) != PLAN_NONE;) {
        const holder_class *k = &c->classes[id];
        if (k->count == count && memcmp(&c->class_sources[k->first], sources,
                                        count * sizeof *sources) == 0) {
            *id_out = id;
            return true;
        }
    }
    if (c->n_classes >= PLAN_NONE - 1 ||
        !array_reserve(&c->classes, &c->class_capacity, c->n_classes + 1,
                       sizeof *c->classes) ||
        !array_reserve(&c->class_sources, &c->class_source_capacity,
                       c->n_class_sources + count, sizeof *c->class_sources) ||
        !intern_add(&c->class_index, hash, (uint32_t)c->n_classes))
        return false;
    *id_out = (uint32_t)c->n_classes;
    c->classes[c->n_classes++] =
        (holder_class){.first = c->n_class_sources, .count = count, .key = PLAN_NONE};
    memcpy(&c->class_sources[c->n_class_sources], sources, count * sizeof *sources);
    c->n_class_sources += count;
    return true;
}

/* The holder at a position: positions begin at the class's turn. */
static uint32_t holder_at(const holder_class *k, uint32_t position)
{
    return (position + k->turn) % k->count;
}

typedef struct level {
    uint64_t load;
    uint32_t position;
} level;

static int compare_levels(const void *a, const void *b)
{
    const level *x = a, *y = b;
    if (x->load != y->load)
        return x->load < y->load ? -1 : 1;
    return x->position < y->position ? -1 : x->position > y->position;
}

/* Pours a class's weight onto its sources, the least loaded first. True: shares moved. */
static bool pour(const cover *c, const holder_class *k, uint64_t *loads, level *levels)
{
    uint64_t *shares = &c->bounds[k->first], left = k->weight;
    const uint32_t *sources = &c->class_sources[k->first];
    for (uint32_t i = 0; i < k->count; i++) {
        uint64_t *load = &loads[sources[holder_at(k, i)]];
        *load -= shares[i];
        levels[i] = (level){.load = *load, .position = i};
    }
    qsort(levels, k->count, sizeof *levels, compare_levels);
    uint64_t height = levels[0].load;
    uint32_t wet = 1;
    for (; wet < k->count && levels[wet].load - height <= left / wet; wet++) {
        left -= (levels[wet].load - height) * wet;
        height = levels[wet].load;
    }
    height += left / wet;
    left %= wet;
    bool moved = false;
    for (uint32_t i = 0; i < k->count; i++) {
        uint32_t position = levels[i].position;
        uint64_t share = i < wet ? height - levels[i].load + (i < left) : 0;
        uint64_t before = shares[position];
        uint64_t step = share > before ? share - before : before - share;
        moved = moved || step > k->weight / 256;
        shares[position] = share;
        loads[sources[holder_at(k, position)]] += share;
    }
    return moved;
}

/* Sorting is most of it. */
static uint32_t pour_steps(const holder_class *k)
{
    return k->count < WORK_STEPS / 8 ? 8 * k->count : WORK_STEPS;
}

/* Neighbouring seeds, and a class's neighbours under one seed, begin anywhere. */
static void take_turns(cover *c, uint64_t seed)
{
    for (uint64_t i = c->n_sources; i < c->n_classes; i++) {
        holder_class *k = &c->classes[i];
        uint64_t words[] = {seed, i};
        k->turn = (uint32_t)(words_hash(words, 2, NULL) >> 32) % k->count;
    }
}

bool classes_balance(cover *c, uint64_t seed)
{
    uint64_t *loads = calloc(c->n_sources + 1, sizeof *loads);
    level *levels = malloc((c->n_sources + 1) * sizeof *levels);
    c->bounds = calloc(c->n_class_sources + 1, sizeof *c->bounds);
    bool ok = loads && levels && c->bounds, moved = true;
    take_turns(c, seed);
    for (size_t s = 0; s < c->n_sources && ok; s++)
        loads[s] = c->classes[s].weight;
    for (int round = 0; round < ROUNDS_MAX && moved && ok; round++) {
        moved = false;
        for (uint64_t i = c->n_sources; i < c->n_classes && ok; i++) {
            ok = !work_stopped_after(c->stop, pour_steps(&c->classes[i]));
            moved = pour(c, &c->classes[i], loads, levels) || moved;
        }
    }
    for (uint64_t i = c->n_sources; i < c->n_classes && ok; i++) {
        uint64_t *bounds = &c->bounds[c->classes[i].first];
        for (uint32_t j = 1; j < c->classes[i].count; j++)
            bounds[j] += bounds[j - 1];
    }
    free(loads);
    free(levels);
    return ok;
}

uint32_t class_holder(const cover *c, holder_class *k, uint32_t key, bool split)
{
    if (k->key != key || split) {
        k->key = key;
        while (k->position + 1 < k->count &&
               k->given >= c->bounds[k->first + k->position])
            k->position++;
    }
    return holder_at(k, k->position);
}

/* -------------------------------------------- what is wrong with a tensor */

/* "rows 3..5 of 10 (dimension 0), column 7 of 16 (dimension 1)" */
static void add_range(text *t, const geometry *g, const block *b)
{
    static const char *const one[] = {"row", "column", "index"};
    static const char *const many[] = {"rows", "columns", "indexes"};
    const char *separator = "";
    for (uint32_t i = 0; i < g->n_dims; i++) {
        uint32_t word = i < 2 ? i : 2;
        if (b->extent[i] == g->shape[i])
            continue;
        text_add(t, "%s%s %" PRIu64, separator,
                 b->extent[i] == 1 ? one[word] : many[word], b->offset[i]);
        if (b->extent[i] > 1)
            text_add(t, "..%" PRIu64, b->offset[i] + b->extent[i] - 1);
        text_add(t, " of %" PRIu64 " (dimension %u)", g->shape[i], i);
        separator = ", ";
    }
    if (*separator == '\0')
        text_add(t, "the whole tensor");
}

/* Under one chunk rule it is known who should hold what is missing. */
static void add_expected(text *t, const cover *c, const geometry *g, const block *hole,
                         error_place *place)
{
    if (!c->by_shape || c->world == 0 || g->n_dims <= c->dim)
        return;
    uint64_t chunk = (g->shape[c->dim] - 1) / c->world + 1;
    uint64_t from = hole->offset[c->dim] / chunk;
    uint64_t to = (hole->offset[c->dim] + hole->extent[c->dim] - 1) / chunk;
    bool replicas = false;
    for (size_t i = 0; i < c->n_sources; i++)
        replicas = replicas || c->sources[i].rank >= c->world;
    if (from != to)
        text_add(t, "; it is what ranks %" PRIu64 " to %" PRIu64 " should hold", from,
                 to);
    else
        text_add(t, "; it is what rank %" PRIu64 " should hold", from);
    if (replicas)
        text_add(t, ", or a replica");
    else if (from == to)
        place->rank_plus_1 = (int32_t)from + 1;
}

/* A rank that holds both blocks, else the first holder of each. */
static void find_holders(const geometry *g, long a, long b, uint32_t *x, uint32_t *y)
{
    uint32_t i = g->first[a], j = g->first[b];
    *x = g->holders[i].source;
    *y = g->holders[j].source;
    while (i < g->first[a + 1] && j < g->first[b + 1]) {
        uint32_t s = g->holders[i].source, t = g->holders[j].source;
        if (s == t) {
            *x = *y = s;
            return;
        }
        i += s < t;
        j += t < s;
    }
}

static void add_holder_list(text *t, const cover *c, const geometry *g, long a, long b,
                            error_place *place)
{
    uint32_t x, y;
    find_holders(g, a, b, &x, &y);
    x = c->sources[x].rank;
    y = c->sources[y].rank;
    if (x == y) {
        text_add(t, " held by rank %u twice, in different blocks", x);
        place->rank_plus_1 = (int32_t)x + 1;
    } else {
        text_add(t, " held by ranks %u and %u differently", x < y ? x : y,
                 x < y ? y : x);
    }
}

/* FANIN_ERR_LIMIT: a proof would take more corners than are compared. */
static fanin_status report_size(const cover *c, const geometry *g, uint32_t key,
                                fanin_error *error)
{
    error_place place = {.phase = "plan",
                         .key = c->keys->entries[key].name,
                         .remedy = "cut the tensor in fewer dimensions, or into larger "
                                   "blocks"};
    return error_set(
        error, FANIN_ERR_LIMIT, &place,
        "%.256s is cut into %u different blocks in several dimensions: more "
        "than are compared (their corners must be fewer than %zu)",
        place.key, g->n_uniques, TILING_CORNERS_MAX);
}

/* What is wrong with a tensor, as FANIN_ERR_INCOMPLETE. a, b:
    uniques in conflict, -1: nobody holds fault. */
static fanin_status report_tiling(const cover *c, const geometry *g, uint32_t key,
                                  const block *fault, long a, long b,
                                  fanin_error *error)
{
    error_place place = {.phase = "plan", .key = c->keys->entries[key].name};
    char what[512];
    text t = text_in(what, sizeof what);
    text_add(&t, "%.256s: ", place.key);
    add_range(&t, g, fault);
    if (a < 0 || b < 0) {
        text_add(&t, " held by no connected rank");
        add_expected(&t, c, g, fault, &place);
        place.remedy = "give the addresses of all ranks, or publish the missing shard";
    } else {
        add_holder_list(&t, c, g, a, b, &place);
        place.remedy =
            "let the ranks publish blocks that are disjoint or equal; compare "
            "their device meshes and placements";
    }
    return error_set(error, FANIN_ERR_INCOMPLETE, &place, "%s", what);
}

/* ------------------------------------------------------------- geometries */

static const uint64_t *owner_words(const geometry *g, uint32_t owner)
{
    return g->words + 2 + g->n_dims + geometry_step(g->n_dims) * owner;
}

static void owner_block(const geometry *g, uint32_t owner, block *out)
{
    const uint64_t *w = owner_words(g, owner) + 1;
    out->n_dims = g->n_dims;
    memcpy(out->offset, w, g->n_dims * sizeof *w);
    memcpy(out->extent, w + g->n_dims, g->n_dims * sizeof *w);
}

void geometry_block(const geometry *g, uint32_t u, block *out)
{
    owner_block(g, g->sample[u], out);
}

/* One allocation for all but the words. */
static bool geometry_alloc(geometry *g, uint64_t n_owners)
{
    size_t wide = n_owners * (sizeof(uint64_t) + sizeof(holder));
    char *at = malloc(wide + (4 * n_owners + 1) * sizeof(uint32_t));
    g->storage = at;
    if (!at)
        return false;
    g->end_max = (uint64_t *)(void *)at;
    g->holders = (holder *)(void *)(g->end_max + n_owners);
    g->first = (uint32_t *)(void *)(at + wide);
    g->sample = g->first + n_owners + 1;
    g->class_of = g->sample + n_owners;
    g->sources = g->class_of + n_owners;
    return true;
}

void geometry_free(geometry *g)
{
    free(g->words);
    free(g->storage);
}

/* The words are many where a tensor is cut into many boxes: they change hands. */
static void take_cover_words(geometry *g, cover *c)
{
    array_shrink(&c->words, c->n_words, sizeof *c->words);
    g->words = c->words;
    c->words = NULL;
    c->n_words = c->word_capacity = 0;
}

static int compare_owners(const void *a, const void *b, void *context)
{
    const geometry *g = context;
    if (work_stopped(g->stop))
        return 0; /* sorting ends soon, and its result is not used */
    uint32_t i = *(const uint32_t *)a, j = *(const uint32_t *)b;
    const uint64_t *x = owner_words(g, i) + 1, *y = owner_words(g, j) + 1;
    if (g->n_dims > 0 && x[g->axis] != y[g->axis])
        return x[g->axis] < y[g->axis] ? -1 : 1;
    for (uint32_t k = 0; k < 2 * g->n_dims; k++)
        if (x[k] != y[k])
            return x[k] < y[k] ? -1 : 1;
    return i < j ? -1 : i > j;
}

static bool same_block(const geometry *g, uint32_t i, uint32_t j)
{
    return memcmp(owner_words(g, i) + 1, owner_words(g, j) + 1,
                  2 * g->n_dims * sizeof(uint64_t)) == 0;
}

/* Owners in the order of their blocks; *locals_out: place among the source's own. */
static uint32_t *sort_owners(geometry *g, uint32_t **locals_out)
{
    uint32_t *order = malloc((2 * (size_t)g->n_owners + 1) * sizeof *order);
    if (!order)
        return NULL;
    uint32_t *locals = *locals_out = order + g->n_owners;
    bool sorted = true;
    for (uint32_t i = 0; i < g->n_owners; i++) {
        if (work_stopped(g->stop)) {
            free(order);
            return NULL;
        }
        order[i] = i;
        g->sources[i] = (uint32_t)owner_words(g, i)[0];
        bool again = i > 0 && g->sources[i] == g->sources[i - 1];
        locals[i] = again ? locals[i - 1] + 1 : 0;
        uint64_t parts = 0;
        for (uint32_t d = 0; i == 0 && d < g->n_dims; d++) {
            uint64_t extent = owner_words(g, 0)[1 + g->n_dims + d];
            if (g->shape[d] / extent <= parts)
                continue;
            parts = g->shape[d] / extent;
            g->axis = d;
        }
        sorted = sorted && (i == 0 || compare_owners(&order[i - 1], &order[i], g) < 0);
    }
    if (!sorted)
        qsort_r(order, g->n_owners, sizeof *order, compare_owners, g);
    return order;
}

static bool find_uniques(geometry *g)
{
    uint32_t *locals, n_holders = 0;
    uint32_t *order = sort_owners(g, &locals);
    if (!order)
        return false;
    for (uint32_t i = 0; i < g->n_owners && !work_stopped(g->stop); i++) {
        uint32_t owner = order[i], source = g->sources[owner];
        if (i == 0 || !same_block(g, order[i - 1], owner)) {
            uint32_t u = g->n_uniques++;
            const uint64_t *w = owner_words(g, owner) + 1;
            uint64_t end = g->n_dims ? w[g->axis] + w[g->n_dims + g->axis] : 1;
            g->end_max[u] = u > 0 && g->end_max[u - 1] > end ? g->end_max[u - 1] : end;
            g->sample[u] = owner;
            g->first[u] = n_holders;
        } else if (g->holders[n_holders - 1].source == source) {
            continue; /* a rank that holds the same twice is one holder */
        }
        g->holders[n_holders++] = (holder){.source = source, .local = locals[owner]};
    }
    g->first[g->n_uniques] = n_holders;
    free(order);
    return true;
}

static fanin_status prove_tiling(const cover *c, const geometry *g, uint32_t key,
                                 fanin_error *error)
{
    block fault, *blocks = malloc(((size_t)g->n_uniques + 1) * sizeof *blocks);
    long a = -1, b = -1;
    if (!blocks)
        return error_set_memory(error);
    for (uint32_t u = 0; u < g->n_uniques && !work_stopped(c->stop); u++)
        geometry_block(g, u, &blocks[u]);
    block_tiling tiling =
        block_tiles(g->n_dims, g->shape, blocks, g->n_uniques, c->stop, &fault, &a, &b);
    free(blocks);
    if (tiling == TILING_EXACT)
        return FANIN_OK;
    if (tiling == TILING_LIMIT)
        return report_size(c, g, key, error);
    if (tiling == TILING_MEMORY || tiling == TILING_STOPPED)
        return plan_broken_off(c->stop, error);
    return report_tiling(c, g, key, &fault, a, b, error);
}

static bool find_classes(cover *c, geometry *g)
{
    uint32_t *sources = malloc((c->n_sources + 1) * sizeof *sources);
    bool ok = sources != NULL;
    for (uint32_t u = 0; u < g->n_uniques && ok; u++) {
        uint32_t count = g->first[u + 1] - g->first[u];
        for (uint32_t i = 0; i < count; i++)
            sources[i] = g->holders[g->first[u] + i].source;
        if (count == 1)
            c->sole[sources[0]] = true;
        ok = !work_stopped(c->stop) && class_intern(c, sources, count, &g->class_of[u]);
    }
    free(sources);
    return ok;
}

static bool geometry_add(cover *c, const geometry *g, uint64_t hash, uint32_t *id_out)
{
    if (c->n_geometries >= PLAN_NONE - 1 ||
        !array_reserve(&c->geometries, &c->geometry_capacity, c->n_geometries + 1,
                       sizeof *c->geometries) ||
        !intern_add(&c->index, hash, (uint32_t)c->n_geometries))
        return false;
    *id_out = (uint32_t)c->n_geometries;
    c->geometries[c->n_geometries++] = *g;
    return true;
}

fanin_status geometry_make(cover *c, uint32_t key, uint64_t n_id, uint64_t hash,
                           uint32_t *id_out, fanin_error *error)
{
    const key_entry *e = &c->keys->entries[key];
    geometry g = {.unit = dtype_get_unit(e->dtype),
                  .n_dims = e->n_dims,
                  .whole = {PLAN_NONE, PLAN_NONE},
                  .n_id = n_id,
                  .stop = c->stop};
    uint64_t n_owners = (c->n_words - 2 - e->n_dims) / geometry_step(e->n_dims);
    memcpy(g.shape, e->shape, e->n_dims * sizeof *e->shape);
    if (n_owners >= PLAN_NONE || !geometry_alloc(&g, n_owners))
        return error_set_memory(error);
    take_cover_words(&g, c);
    g.n_owners = (uint32_t)n_owners;
    fanin_status status = FANIN_OK;
    if (!find_uniques(&g) || work_stopped(c->stop))
        status = plan_broken_off(c->stop, error);
    if (status == FANIN_OK)
        status = prove_tiling(c, &g, key, error);
    if (status == FANIN_OK &&
        (!find_classes(c, &g) || !geometry_add(c, &g, hash, id_out)))
        status = plan_broken_off(c->stop, error);
    if (status != FANIN_OK)
        geometry_free(&g);
    return status;
}
