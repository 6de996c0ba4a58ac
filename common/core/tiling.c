/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether blocks tile a tensor, without looking at pairs of blocks.
 *
 * Along one dimension: sort and walk. In general: the indicator function of a block is
 * the running sum, in every dimension, of +1 and -1 at its 2^k corners (k: dimensions that
 * are cut at all). Functions are equal exactly if these corner weights are, so the blocks
 * tile the tensor exactly if all corner weights of the blocks, minus those of the tensor,
 * cancel. Where they do not, the lexicographically smallest corner left over has no other
 * one before it in every dimension; hence its weight is how often the element there is
 * covered, minus one: negative is a hole, positive an overlap.
 */
#include "block.h"

#include <stdlib.h>

typedef struct corner {
    uint32_t block; /* index into unique, n_unique: the tensor itself */
    uint32_t mask;  /* bit j: the far end in cut dimension j */
} corner;

typedef struct tiling {
    uint32_t n_dims;
    const uint64_t *shape;
    const block *blocks;
    uint32_t *unique; /* indexes of distinct blocks, sorted by offset, then extent */
    size_t n_unique;
    block whole;
    uint32_t cut[FANIN_MAX_DIMS]; /* dimensions that are cut */
    uint32_t n_cut;
    work_stop *stop;
} tiling;

static int compare_words(const uint64_t *a, const uint64_t *b, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (a[i] != b[i])
            return a[i] < b[i] ? -1 : 1;
    return 0;
}

/* Once the work is to stop all are equal, so that sorting ends soon; its result is not used. */
static int compare_blocks(const void *a, const void *b, void *context)
{
    const tiling *t = context;
    if (work_stopped(t->stop))
        return 0;
    const block *x = &t->blocks[*(const uint32_t *)a];
    const block *y = &t->blocks[*(const uint32_t *)b];
    int order = compare_words(x->offset, y->offset, t->n_dims);
    if (order == 0)
        order = compare_words(x->extent, y->extent, t->n_dims);
    return order;
}

static uint64_t corner_at(const tiling *t, const corner *c, uint32_t cut_index)
{
    const block *b =
        c->block == t->n_unique ? &t->whole : &t->blocks[t->unique[c->block]];
    uint32_t dim = t->cut[cut_index];
    return b->offset[dim] + ((c->mask >> cut_index & 1) ? b->extent[dim] : 0);
}

static int compare_corners(const void *a, const void *b, void *context)
{
    const tiling *t = context;
    if (work_stopped(t->stop))
        return 0;
    for (uint32_t i = 0; i < t->n_cut; i++) {
        uint64_t x = corner_at(t, a, i), y = corner_at(t, b, i);
        if (x != y)
            return x < y ? -1 : 1;
    }
    return 0;
}

static bool is_stopped(const tiling *t)
{
    return t->stop && t->stop->stopped;
}

static bool covers(const block *b, const uint64_t *point)
{
    for (uint32_t i = 0; i < b->n_dims; i++)
        if (point[i] < b->offset[i] || point[i] - b->offset[i] >= b->extent[i])
            return false;
    return true;
}

/* The overlap of the first two distinct blocks that hold the element at point. */
static block_tiling report_conflict(const tiling *t, const uint64_t *point,
                                    block *fault, long *a_out, long *b_out)
{
    long found[2] = {-1, -1};
    int n = 0;
    for (size_t i = 0; i < t->n_unique && n < 2; i++) {
        if (work_stopped(t->stop))
            return TILING_STOPPED;
        if (covers(&t->blocks[t->unique[i]], point))
            found[n++] = (long)t->unique[i];
    }
    *a_out = found[0];
    *b_out = found[1];
    if (n == 2)
        block_intersect(&t->blocks[found[0]], &t->blocks[found[1]], fault);
    return TILING_CONFLICT;
}

/* Grows the missing element, last dimension first, up to the next block or the border. */
static block_tiling report_hole(const tiling *t, const uint64_t *point, block *fault)
{
    block hole = {.n_dims = t->n_dims};
    for (uint32_t i = 0; i < t->n_dims; i++) {
        hole.offset[i] = point[i];
        hole.extent[i] = 1;
    }
    for (uint32_t i = t->n_dims; i-- > 0;) {
        hole.extent[i] = t->shape[i] - point[i];
        for (size_t j = 0; j < t->n_unique; j++) {
            const block *b = &t->blocks[t->unique[j]];
            if (work_stopped(t->stop))
                return TILING_STOPPED;
            if (b->offset[i] > point[i] && block_intersect(b, &hole, NULL))
                hole.extent[i] = b->offset[i] - point[i];
        }
    }
    *fault = hole;
    return TILING_HOLE;
}

/* Sorts and drops replicas; finds the dimensions in which any block is not full. */
static bool tiling_prepare(tiling *t, size_t count)
{
    t->unique = malloc((count ? count : 1) * sizeof *t->unique);
    if (!t->unique)
        return false;
    bool sorted = true;
    for (size_t i = 0; i < count; i++) {
        t->unique[i] = (uint32_t)i;
        if (sorted && i > 0)
            sorted = compare_blocks(&t->unique[i - 1], &t->unique[i], t) <= 0;
    }
    if (!sorted)
        qsort_r(t->unique, count, sizeof *t->unique, compare_blocks, t);
    for (size_t i = 0; i < count; i++)
        if (i == 0 ||
            compare_blocks(&t->unique[t->n_unique - 1], &t->unique[i], t) != 0)
            t->unique[t->n_unique++] = t->unique[i];
    for (uint32_t dim = 0; dim < t->n_dims; dim++) {
        bool full = true;
        for (size_t i = 0; i < t->n_unique && full && !work_stopped(t->stop); i++)
            full = t->blocks[t->unique[i]].extent[dim] == t->shape[dim];
        if (!full)
            t->cut[t->n_cut++] = dim;
    }
    return true;
}

/* At most one dimension is cut, so the sorted blocks must follow one another. */
static block_tiling tile_line(const tiling *t, block *fault, long *a_out, long *b_out)
{
    uint32_t dim = t->n_cut ? t->cut[0] : 0;
    uint64_t point[FANIN_MAX_DIMS] = {0}, end = t->n_dims ? t->shape[dim] : 1;
    uint64_t reached = 0;
    for (size_t i = 0; i < t->n_unique; i++) {
        const block *b = &t->blocks[t->unique[i]];
        if (work_stopped(t->stop))
            return TILING_STOPPED;
        uint64_t start = t->n_dims ? b->offset[dim] : 0;
        point[dim] = start < reached ? start : reached;
        if (start < reached)
            return report_conflict(t, point, fault, a_out, b_out);
        if (start > reached)
            return report_hole(t, point, fault);
        reached = start + (t->n_dims ? b->extent[dim] : 1);
    }
    point[dim] = reached;
    return reached == end ? TILING_EXACT : report_hole(t, point, fault);
}

static block_tiling tile_corners(const tiling *t, block *fault, long *a_out,
                                 long *b_out)
{
    if (t->n_unique >= TILING_CORNERS_MAX >> t->n_cut)
        return TILING_LIMIT;
    size_t n = (t->n_unique + 1) << t->n_cut;
    corner *corners = malloc(n * sizeof *corners);
    if (!corners)
        return TILING_MEMORY;
    for (size_t i = 0; i < n && !work_stopped(t->stop); i++)
        corners[i] = (corner){.block = (uint32_t)(i >> t->n_cut),
                              .mask = (uint32_t)(i & ((1u << t->n_cut) - 1))};
    qsort_r(corners, n, sizeof *corners, compare_corners, (void *)t);
    block_tiling result = is_stopped(t) ? TILING_STOPPED : TILING_EXACT;
    size_t next;
    for (size_t i = 0; i < n && result == TILING_EXACT; i = next) {
        int64_t weight = 0;
        for (next = i; next < n; next++) {
            const corner *c = &corners[next];
            if (next > i && compare_corners(&corners[i], c, (void *)t) != 0)
                break;
            bool negative = __builtin_parity(c->mask) != (c->block == t->n_unique);
            weight += negative ? -1 : 1;
        }
        if (weight == 0)
            continue;
        uint64_t point[FANIN_MAX_DIMS] = {0};
        for (uint32_t j = 0; j < t->n_cut; j++)
            point[t->cut[j]] = corner_at(t, &corners[i], j);
        result = weight < 0 ? report_hole(t, point, fault)
                            : report_conflict(t, point, fault, a_out, b_out);
    }
    free(corners);
    return is_stopped(t) ? TILING_STOPPED : result;
}

block_tiling block_tiles(uint32_t n_dims, const uint64_t *shape, const block *blocks,
                         size_t count, work_stop *stop, block *fault_out, long *a_out,
                         long *b_out)
{
    block fault = {.n_dims = n_dims};
    long a = -1, b = -1;
    block_tiling result = TILING_EXACT;
    tiling t = {.n_dims = n_dims, .shape = shape, .blocks = blocks, .stop = stop};
    t.whole.n_dims = n_dims;
    for (uint32_t i = 0; i < n_dims; i++)
        t.whole.extent[i] = shape[i];

    for (size_t i = 0; i < count && result == TILING_EXACT; i++) {
        if (work_stopped(stop)) {
            result = TILING_STOPPED;
            break;
        }
        if (blocks[i].n_dims == n_dims && !block_is_empty(&blocks[i]) &&
            block_inside(&blocks[i], shape))
            continue;
        fault = blocks[i];
        a = b = (long)i;
        result = TILING_CONFLICT;
    }
    if (result == TILING_EXACT && !block_is_empty(&t.whole)) {
        if (count >= UINT32_MAX || !tiling_prepare(&t, count))
            result = TILING_MEMORY;
        else if (is_stopped(&t))
            result = TILING_STOPPED;
        else if (t.n_cut <= 1)
            result = tile_line(&t, &fault, &a, &b);
        else
            result = tile_corners(&t, &fault, &a, &b);
    }
    free(t.unique);
    if (fault_out)
        *fault_out = fault;
    if (a_out)
        *a_out = a;
    if (b_out)
        *b_out = b;
    return result;
}
