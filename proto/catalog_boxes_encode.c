/* SPDX-License-Identifier: Apache-2.0 */
#include "box_place.h"
#include "box_table.h"
#include "catalog.h"
#include "pack.h"

#include <stdlib.h>

typedef struct box_list {
    const key_entry *keys;
    uint32_t n_keys;
    const box_record *boxes;
    uint64_t n_boxes;
} box_list;

typedef struct chunk_rule {
    uint32_t dim, world, index;
} chunk_rule;

static bool is_packed(const box_list *list, const box_record *box)
{
    return box->place.packed ||
           place_strides_packed(&list->keys[box->key], &box->block, box->place.stride);
}

static bool boxes_encode_follows(const box_list *list, const chunk_rule *rule)
{
    uint64_t next = 0;
    for (uint32_t key = 0; key < list->n_keys; key++) {
        const key_entry *e = &list->keys[key];
        block chunk =
            block_chunk(e->n_dims, e->shape, rule->dim, rule->world, rule->index);
        if (block_is_empty(&chunk))
            continue;
        if (next == list->n_boxes)
            return false;
        const box_record *box = &list->boxes[next++];
        if (box->key != key || !block_equal(&box->block, &chunk) ||
            !is_packed(list, box))
            return false;
    }
    return next == list->n_boxes;
}

/* Most parts first: ranks that hold only small tensors, or none, then agree with the
   others on the finest cut that describes all of them. */
static bool find_rule(const box_list *list, uint32_t rank, uint32_t world_size,
                      chunk_rule *out)
{
    uint32_t dims = list->n_keys ? FANIN_MAX_DIMS : 0;
    for (uint32_t key = 0; key < list->n_keys; key++)
        if (list->keys[key].n_dims < dims)
            dims = list->keys[key].n_dims;
    for (uint32_t dim = 0; dim < dims; dim++)
        for (uint32_t world = world_size; world > 0; world--) {
            chunk_rule rule = {dim, world, rank % world};
            if (world_size % world == 0 && boxes_encode_follows(list, &rule)) {
                *out = rule;
                return true;
            }
        }
    return false;
}

static void pack_place(buffer *out, place_state *s, const box_list *list,
                       const box_record *box)
{
    const box_place *place = &box->place;
    uint32_t n_dims = box->block.n_dims;
    bool packed = is_packed(list, box), same = place->region == s->region;
    int64_t distance =
        (int64_t)(place->offset - place_expected(s, place->region)) / (1 << s->shift);
    if (!packed || !same) {
        pack_array(out, packed ? 2 : 2 + n_dims);
        pack_int(out, (int64_t)place->region - (int64_t)s->region);
    }
    pack_int(out, distance);
    for (uint32_t dim = 0; dim < n_dims && !packed; dim++)
        pack_int(out, place->stride[dim]);
    uint64_t end = place->offset;
    place_end(&list->keys[box->key], &box->block, place, &end);
    place_advance(s, place->region, end);
}

static void boxes_encode_pack_block(buffer *out, const block *b)
{
    pack_array(out, 2 * b->n_dims);
    for (uint32_t dim = 0; dim < b->n_dims; dim++)
        pack_uint(out, b->offset[dim]);
    for (uint32_t dim = 0; dim < b->n_dims; dim++)
        pack_uint(out, b->extent[dim]);
}

void box_table_encode(buffer *out, const key_entry *keys, uint32_t n_keys,
                      const box_record *boxes, uint64_t n_boxes, uint32_t rank,
                      uint32_t world_size)
{
    box_list list = {keys, n_keys, boxes, n_boxes};
    chunk_rule rule;
    bool chunks = find_rule(&list, rank, world_size, &rule);
    place_state *state = calloc(1, sizeof *state);
    if (!state) {
        out->failed = true;
        return;
    }
    uint64_t offsets = 0;
    for (uint64_t i = 0; i < n_boxes; i++)
        offsets |= boxes[i].place.offset;
    state->shift = place_shift(offsets);

    pack_uint(out, chunks ? BOXES_CHUNK : BOXES_EXPLICIT);
    pack_uint(out, state->shift);
    if (chunks) {
        pack_uint(out, rule.dim);
        pack_uint(out, rule.world);
        pack_uint(out, rule.index);
    } else {
        pack_uint(out, n_boxes);
    }
    uint32_t last_key = 0;
    for (uint64_t i = 0; i < n_boxes; i++) {
        if (!chunks) {
            pack_uint(out, boxes[i].key - last_key);
            boxes_encode_pack_block(out, &boxes[i].block);
            last_key = boxes[i].key;
        }
        pack_place(out, state, &list, &boxes[i]);
    }
    free(state);
}

/* -------------------------------------------------------------------- a part */

static void get_record(const box_table *table, uint64_t ordinal, box_record *out)
{
    box_table_get(table, ordinal, &out->key, &out->block, &out->place);
}

/* The boxes of a part, and the alignment of their offsets. */
static uint64_t survey(const box_table *table, const key_set *wanted,
                       uint32_t *shift_out)
{
    uint64_t boxes = 0, offsets = 0, n;
    for (size_t i = 0; i < wanted->n; i++) {
        uint64_t first = box_table_of_keys(table, wanted->ranges[i], &n);
        for (uint64_t ordinal = first; ordinal < first + n; ordinal++) {
            box_record box;
            get_record(table, ordinal, &box);
            offsets |= box.place.offset;
        }
        boxes += n;
    }
    *shift_out = place_shift(offsets);
    return boxes;
}

static void pack_runs(buffer *out, const box_table *table, const key_set *wanted)
{
    uint64_t at = 0, next = 0, n;
    pack_uint(out, wanted->n);
    for (size_t i = 0; i < wanted->n; i++) {
        const key_range *keys = &wanted->ranges[i];
        uint64_t first = box_table_of_keys(table, *keys, &n);
        pack_uint(out, keys->first - at);
        pack_uint(out, keys->count);
        pack_uint(out, first - next);
        at = (uint64_t)keys->first + keys->count;
        next = first + n;
    }
}

void box_table_encode_part(buffer *out, const box_table *table, const key_set *wanted)
{
    box_list list = {.keys = table->keys->entries, .n_keys = table->keys->count};
    bool chunks = table->rule == BOXES_CHUNK;
    uint32_t last_key = 0;
    place_state *state = calloc(1, sizeof *state);
    if (!state) {
        out->failed = true;
        return;
    }
    uint64_t boxes = survey(table, wanted, &state->shift), n;
    pack_uint(out, (uint32_t)table->rule + RULE_PART);
    pack_uint(out, state->shift);
    if (chunks) {
        pack_uint(out, table->dim);
        pack_uint(out, table->world);
        pack_uint(out, table->index);
    } else {
        pack_uint(out, boxes);
    }
    pack_runs(out, table, wanted);
    for (size_t i = 0; i < wanted->n; i++) {
        uint64_t first = box_table_of_keys(table, wanted->ranges[i], &n);
        for (uint64_t ordinal = first; ordinal < first + n; ordinal++) {
            box_record box;
            get_record(table, ordinal, &box);
            if (!chunks) {
                pack_uint(out, box.key - last_key);
                boxes_encode_pack_block(out, &box.block);
                last_key = box.key;
            }
            pack_place(out, state, &list, &box);
        }
    }
    free(state);
}
