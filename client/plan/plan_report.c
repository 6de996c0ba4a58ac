/* SPDX-License-Identifier: Apache-2.0 */
#include "error_set.h"
#include "plan/plan_internal.h"
#include "text.h"

#include <inttypes.h>

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

static void add_holders(text *t, const cover *c, const geometry *g, long a, long b,
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

fanin_status report_size(const cover *c, const geometry *g, uint32_t key,
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

fanin_status report_tiling(const cover *c, const geometry *g, uint32_t key,
                           const block *fault, long a, long b, fanin_error *error)
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
        add_holders(&t, c, g, a, b, &place);
        place.remedy =
            "let the ranks publish blocks that are disjoint or equal; compare "
            "their device meshes and placements";
    }
    return error_set(error, FANIN_ERR_INCOMPLETE, &place, "%s", what);
}
