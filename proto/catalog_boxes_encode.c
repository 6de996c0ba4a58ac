/* SPDX-License-Identifier: Apache-2.0 */
#include "array.h"
#include "box_place.h"
#include "box_table.h"
#include "catalog.h"
#include "error_set.h"
#include "pack.h"

#include <stdlib.h>
#include <string.h>

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

/* ------------------------------------------------------------- catalog boxes part */

/* Parts of box tables: what they are of, and two made one. */

static uint64_t keys_end(const box_run *run)
{
    return (uint64_t)run->keys.first + run->keys.count;
}

bool box_table_keys(const box_table *table, key_set *out)
{
    *out = (key_set){0};
    for (uint32_t i = 0; i < table->n_runs; i++)
        if (!key_set_add(out, table->runs[i].keys.first, table->runs[i].keys.count)) {
            key_set_free(out);
            return false;
        }
    return true;
}

bool box_table_has(const box_table *table, const key_set *keys)
{
    uint32_t run = 0;
    for (size_t i = 0; i < keys->n; i++) {
        const key_range *r = &keys->ranges[i];
        while (run < table->n_runs && keys_end(&table->runs[run]) <= r->first)
            run++;
        if (run == table->n_runs || table->runs[run].keys.first > r->first ||
            keys_end(&table->runs[run]) < (uint64_t)r->first + r->count)
            return false;
    }
    return true;
}

bool box_table_is_whole(const box_table *table)
{
    return !table->part;
}

/* Slots of one run, and what explicit boxes have besides, go behind those that are there. */
static bool take_run(box_table *to, const box_table *from, uint32_t index,
                     uint64_t words_moved)
{
    const box_run *run = &from->runs[index];
    box_run *last = to->n_runs > 0 ? &to->runs[to->n_runs - 1] : NULL;
    if (last && keys_end(last) == run->keys.first) {
        last->keys.count += run->keys.count;
    } else {
        to->runs[to->n_runs] = *run;
        to->runs[to->n_runs++].slot = (uint32_t)to->count;
    }
    bool ok = true;
    for (uint64_t slot = run->slot; slot < box_run_end(from, index) && ok; slot++) {
        uint64_t offset = number_column_get(&from->offset_of, slot) << from->shift;
        ok = box_table_add(to, box_table_key(from, slot),
                           (uint32_t)number_column_get(&from->region_of, slot), offset);
        if (ok && from->rule == BOXES_EXPLICIT)
            ok = number_column_add(&to->form_of,
                                   number_column_get(&from->form_of, slot) +
                                       2 * words_moved);
    }
    return ok;
}

/* Numbers ascend with the keys, and leave nothing out between neighbouring keys. */
static bool boxes_part_follows(const box_table *to, const box_table *from,
                               uint32_t index)
{
    const box_run *run = &from->runs[index];
    if (to->n_runs == 0)
        return true;
    const box_run *last = &to->runs[to->n_runs - 1];
    uint64_t next = last->ordinal + (to->count - last->slot);
    if (run->keys.first < keys_end(last))
        return false;
    return run->keys.first == keys_end(last) ? run->ordinal == next
                                             : run->ordinal >= next;
}

/* FANIN_ERR_PROTOCOL: they contradict each other; FANIN_ERR_MEMORY. */
static fanin_status take_runs(box_table *to, const box_table *a, const box_table *b)
{
    uint32_t i = 0, j = 0;
    while (i < a->n_runs || j < b->n_runs) {
        bool of_a = j == b->n_runs ||
                    (i < a->n_runs && a->runs[i].keys.first < b->runs[j].keys.first);
        const box_table *from = of_a ? a : b;
        uint32_t *index = of_a ? &i : &j;
        if (!boxes_part_follows(to, from, *index))
            return FANIN_ERR_PROTOCOL;
        if (!take_run(to, from, *index, of_a ? 0 : a->n_words))
            return FANIN_ERR_MEMORY;
        ++*index;
    }
    return box_table_close(to) ? FANIN_OK : FANIN_ERR_MEMORY;
}

/* Of both, without boxes yet. NULL: no memory. */
static box_table *boxes_part_make_room(const box_table *a, const box_table *b)
{
    box_table *t = calloc(1, sizeof *t);
    if (!t)
        return NULL;
    t->keys = a->keys;
    t->rule = a->rule;
    t->dim = a->dim;
    t->world = a->world;
    t->index = a->index;
    t->part = true;
    t->regions = a->regions > b->regions ? a->regions : b->regions;
    t->shift = a->shift < b->shift ? a->shift : b->shift;
    t->n_words = a->n_words + b->n_words;
    t->runs = calloc((size_t)a->n_runs + b->n_runs, sizeof *t->runs);
    if (t->rule == BOXES_EXPLICIT)
        t->words = malloc((t->n_words + 1) * sizeof *t->words);
    if (!t->runs || (t->rule == BOXES_EXPLICIT && !t->words))
        box_table_free(&t);
    return t;
}

static bool are_alike(const box_table *a, const box_table *b)
{
    return a->part && b->part && a->rule == b->rule && a->dim == b->dim &&
           a->world == b->world && a->index == b->index;
}

fanin_status box_table_join(box_table **table, box_table *more, fanin_error *error)
{
    static const error_place place = {.phase = "catalog"};
    box_table *a = *table, *b = more, *both = NULL;
    fanin_status status = FANIN_ERR_PROTOCOL;
    if (are_alike(a, b)) {
        both = boxes_part_make_room(a, b);
        status = both ? take_runs(both, a, b) : FANIN_ERR_MEMORY;
    }
    if (status == FANIN_ERR_MEMORY)
        error_set_memory(error);
    else if (status != FANIN_OK)
        error_set(error, status, &place, "parts of a box table contradict each other");
    if (status == FANIN_OK && both->words) {
        memcpy(both->words, a->words, a->n_words * sizeof *both->words);
        memcpy(both->words + a->n_words, b->words, b->n_words * sizeof *both->words);
    }
    box_table_free(&a);
    box_table_free(&b);
    if (status != FANIN_OK)
        box_table_free(&both);
    if (both)
        array_shrink(&both->runs, both->n_runs, sizeof *both->runs);
    *table = both;
    return status;
}
