/* SPDX-License-Identifier: Apache-2.0 */
#include "error_set.h"
#include "plan/plan_internal.h"

#include <stdlib.h>
#include <string.h>

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
static void take_words(geometry *g, cover *c)
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

static fanin_status prove(const cover *c, const geometry *g, uint32_t key,
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
    take_words(&g, c);
    g.n_owners = (uint32_t)n_owners;
    fanin_status status = FANIN_OK;
    if (!find_uniques(&g) || work_stopped(c->stop))
        status = plan_broken_off(c->stop, error);
    if (status == FANIN_OK)
        status = prove(c, &g, key, error);
    if (status == FANIN_OK &&
        (!find_classes(c, &g) || !geometry_add(c, &g, hash, id_out)))
        status = plan_broken_off(c->stop, error);
    if (status != FANIN_OK)
        geometry_free(&g);
    return status;
}
