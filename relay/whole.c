/* SPDX-License-Identifier: Apache-2.0 */
#include "whole.h"

#include "array.h"
#include "block.h"
#include "dtype.h"
#include <stdlib.h>
#include <string.h>

#define PIECES_MOST ((size_t)1 << 20)
#define COMPARISONS_MOST ((size_t)1 << 22)

/* Where one part of the holder and one of the reader overlap. */
typedef struct piece {
    fanin_tensor tensor; /* first: an array of pieces is one of tensors */
    fanin_box box;
    uint32_t of; /* the holder's part */
} piece;

typedef struct finder {
    const parts *wanted, *all;
    piece *pieces;
    size_t n, capacity, comparisons;
} finder;

/* --------------------------------------------------------------------------- blocks */

static block block_of(const fanin_tensor *t)
{
    block b = {.n_dims = t->n_dims};
    memcpy(b.offset, t->boxes->offset, t->n_dims * sizeof *b.offset);
    memcpy(b.extent, t->boxes->extent, t->n_dims * sizeof *b.extent);
    return b;
}

/* Where a block ends in row-major order is compared with where another begins. */
static int compare_ends(const fanin_tensor *begins, const fanin_tensor *ends)
{
    for (uint32_t d = 0; d < begins->n_dims; d++) {
        uint64_t first = begins->boxes->offset[d];
        uint64_t last = ends->boxes->offset[d] + ends->boxes->extent[d] - 1;
        if (first != last)
            return first < last ? -1 : 1;
    }
    return 0;
}

/* A part of the holder is below the wanted one if it ends before that. Parts are whole rows, or of
   one row, so that they ascend without a gap. */
static int compare_parts(const void *wanted, const void *part)
{
    const fanin_tensor *a = wanted, *b = part;
    int order = strcmp(a->name, b->name);
    return order ? order : compare_ends(a, b);
}

/* --------------------------------------------------------------------------- pieces */

/* Where the overlap @p both lies in the wanted part's memory. False: it cuts packed elements. */
static bool locate_box(const fanin_tensor *wanted, const block *both, fanin_box *out)
{
    const fanin_box *from = wanted->boxes;
    const dtype_unit unit = dtype_get_unit(wanted->dtype);
    const block whole = block_of(wanted);
    block units, part;
    bool packed = true;
    if (!block_in_units(&whole, unit.elements, &units) ||
        !block_in_units(both, unit.elements, &part))
        return false;
    for (uint32_t d = 0; d < wanted->n_dims; d++)
        packed = packed && from->stride[d] == 0;
    memcpy(out->stride, from->stride, sizeof out->stride);
    if (packed)
        block_packed_strides(wanted->n_dims, units.extent, unit.bytes, out->stride);
    int64_t way = 0;
    for (uint32_t d = 0; d < wanted->n_dims; d++)
        way += (int64_t)(part.offset[d] - units.offset[d]) * out->stride[d];
    out->address = (uint8_t *)from->address + way;
    return true;
}

/* If they overlap. @p elements, which are still to be found, become less. */
static bool add_overlap(finder *f, const fanin_tensor *wanted, size_t part,
                        uint64_t *elements)
{
    const fanin_tensor *own = &f->all->own[part];
    const block want = block_of(wanted), has = block_of(&f->all->origin[part]);
    block both;
    uint64_t volume = 0;
    if (!block_intersect(&want, &has, &both))
        return true;
    if (f->n == PIECES_MOST ||
        !array_reserve(&f->pieces, &f->capacity, f->n + 1, sizeof *f->pieces))
        return false;
    piece *p = &f->pieces[f->n++];
    *p = (piece){.tensor = *wanted, .of = (uint32_t)part};
    p->tensor.struct_size = sizeof *p;
    p->tensor.name = own->name;
    memcpy(p->tensor.shape, own->shape, sizeof own->shape);
    for (uint32_t d = 0; d < wanted->n_dims; d++) {
        p->box.offset[d] = both.offset[d] - has.offset[d];
        p->box.extent[d] = both.extent[d];
    }
    (void)block_volume(&both, &volume);
    *elements -= volume;
    return locate_box(wanted, &both, &p->box);
}

/* Finds all of it in parts of the holder. False: it is not all there, or too much to look for. */
static bool cover_part(finder *f, const fanin_tensor *wanted)
{
    const parts *all = f->all;
    const block want = block_of(wanted);
    uint64_t missing = 0;
    size_t at = array_search(wanted, all->origin, all->n, sizeof *all->origin,
                             compare_parts, NULL);
    if (at == all->n || strcmp(all->origin[at].name, wanted->name) != 0 ||
        all->origin[at].n_dims != wanted->n_dims ||
        memcmp(all->origin[at].shape, wanted->shape,
               wanted->n_dims * sizeof *wanted->shape) != 0 ||
        !block_volume(&want, &missing))
        return false;
    for (; missing > 0; at++) {
        const fanin_tensor *part = &all->origin[at];
        if (at == all->n || strcmp(part->name, wanted->name) != 0 ||
            compare_ends(part, wanted) > 0 || f->comparisons++ == COMPARISONS_MOST ||
            !add_overlap(f, wanted, at, &missing))
            return false;
    }
    return true;
}

/* ---------------------------------------------------------------------------- whole */

static bool describe_users(const finder *f, unit_map *out)
{
    const parts *p = f->wanted;
    out->used_first = calloc(f->all->n + 2, sizeof *out->used_first);
    out->used_by = calloc(f->n, sizeof *out->used_by);
    if (!out->used_first || !out->used_by)
        return false;
    uint32_t *next = out->used_first + 1; /* ends as where the next one begins */
    for (size_t i = 0; i < f->n; i++)
        next[f->pieces[i].of + 1]++;
    for (size_t i = 0; i < f->all->n; i++)
        next[i + 1] += next[i];
    for (size_t u = 0; u < p->n_units; u++) {
        for (uint32_t i = out->unit_first[u]; i < out->unit_first[u + 1]; i++)
            out->used_by[next[f->pieces[i].of]++] = (uint32_t)u;
    }
    return true;
}

static bool find_units(finder *f, unit_map *out)
{
    const parts *p = f->wanted;
    out->n_parts = f->all->n;
    out->unit_first = calloc(p->n_units + 1, sizeof *out->unit_first);
    if (!out->unit_first)
        return false;
    for (size_t u = 0; u < p->n_units; u++) {
        for (uint32_t i = p->unit_first[u]; i < p->unit_first[u + 1]; i++) {
            if (!cover_part(f, &p->origin[i]))
                return false;
        }
        out->unit_first[u + 1] = (uint32_t)f->n;
    }
    for (size_t i = 0; i < f->n; i++)
        f->pieces[i].tensor.boxes = &f->pieces[i].box;
    return describe_users(f, out) &&
           fanin_destination_create(&f->pieces->tensor, f->n, &out->destination,
                                    NULL) == FANIN_OK;
}

/* As a holder does that has all tensors whole. There is nothing to free after false. */
static bool cut_whole(const key_table *keys, uint64_t unit_bytes, parts *out)
{
    static uint8_t nowhere;
    fanin_tensor *tensors = calloc(keys->count + 1, sizeof *tensors);
    fanin_box *boxes = calloc(keys->count + 1, sizeof *boxes);
    bool good = tensors && boxes;
    for (uint32_t i = 0; good && i < keys->count; i++) {
        const key_entry *e = &keys->entries[i];
        memcpy(boxes[i].extent, e->shape, sizeof boxes[i].extent);
        boxes[i].address = &nowhere;
        tensors[i] = (fanin_tensor){.struct_size = sizeof *tensors,
                                    .name = e->name,
                                    .dtype = e->dtype,
                                    .n_dims = e->n_dims,
                                    .boxes = &boxes[i],
                                    .n_boxes = 1};
        memcpy(tensors[i].shape, e->shape, sizeof tensors[i].shape);
    }
    good = good && parts_cut(out, tensors, keys->count, unit_bytes, NULL) == FANIN_OK;
    free(tensors);
    free(boxes);
    return good;
}

void whole_find(whole *out, const parts *wanted, const key_table *keys,
                uint64_t unit_bytes)
{
    parts all;
    *out = (whole){.catalog_id = keys->id};
    if (!cut_whole(keys, unit_bytes, &all))
        return;
    out->holding = all.holding;
    finder f = {.wanted = wanted, .all = &all};
    if (digest_equal(&all.holding, &wanted->holding) || !find_units(&f, &out->map))
        whole_free(out);
    out->catalog_id = keys->id; /* which is not looked through again */
    free(f.pieces);
    parts_free(&all);
}

void whole_free(whole *w)
{
    unit_map *b = &w->map;
    fanin_destination_free(&b->destination);
    free(b->unit_first);
    free(b->used_first);
    free(b->used_by);
    *w = (whole){0};
}
