/* SPDX-License-Identifier: Apache-2.0 */
#include "array.h"
#include "box_place.h"
#include "box_table.h"
#include "catalog.h"
#include "cursor.h"
#include "error_set.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define BOX_BYTES_MIN 3 /* of an explicit box: key, block, place */
#define WORLD_MAX 65536
#define FORMS_KNOWN 32 /* of boxes that came last: what layers have in turn */

/* What explicit boxes may have in common. */
typedef struct form {
    uint64_t position; /* as in form_of */
    size_t size;       /* bytes of words, 0: none */
} form;

typedef struct box_reader {
    cursor in;
    box_table *table;
    place_state places;
    uint64_t all_offsets;
    buffer words;
    form forms[FORMS_KNOWN];
    uint32_t n_forms; /* that there were */
    uint64_t index;   /* of the box at work, for messages */
    uint64_t next;    /* number that follows those of the runs so far */
    work_stop *stop;
    bool broken_off; /* out of memory, or stopped */
} box_reader;

static bool boxes_break_off(box_reader *r)
{
    r->broken_off = true;
    return false;
}

/* -------------------------------------------------------------- columns */

bool box_table_add(box_table *table, uint32_t key, uint32_t region, uint64_t offset)
{
    uint64_t slot = table->count++;
    return number_column_add(&table->key_of, key - slot) &&
           number_column_add(&table->region_of, region) &&
           number_column_add(&table->offset_of, offset >> table->shift);
}

bool box_table_close(box_table *table)
{
    return number_column_close(&table->key_of) &&
           number_column_close(&table->region_of) &&
           number_column_close(&table->offset_of) &&
           number_column_close(&table->form_of);
}

/* ------------------------------------------------------------- decoding */

static bool read_distance(box_reader *r, uint32_t region, uint64_t *offset_out)
{
    int64_t most = (int64_t)(PLACE_END_MAX >> r->places.shift), distance;
    if (!cursor_int(&r->in, -most, most, &distance))
        return false;
    int64_t expected = (int64_t)place_expected(&r->places, region);
    int64_t offset = expected + distance * (INT64_C(1) << r->places.shift);
    if (offset < 0)
        return cursor_fail(&r->in, "a box begins below its region");
    *offset_out = (uint64_t)offset;
    return true;
}

static bool boxes_read_region(box_reader *r, uint32_t *region_out)
{
    int64_t step, last = r->places.region;
    if (!cursor_int(&r->in, -last, LIMIT_BOXES - 1 - last, &step))
        return false;
    *region_out = (uint32_t)(last + step);
    return true;
}

static bool read_strides(box_reader *r, const key_entry *key, const block *b,
                         box_place *out)
{
    for (uint32_t dim = 0; dim < b->n_dims; dim++)
        if (!cursor_int(&r->in, INT64_MIN, INT64_MAX, &out->stride[dim]))
            return false;
    out->packed = false;
    return !place_strides_packed(key, b, out->stride) ||
           cursor_fail(&r->in, "strides of a packed box");
}

/* distance | [region step, distance] | [region step, distance, stride...] */
static bool read_place(box_reader *r, const key_entry *key, const block *b,
                       box_place *out)
{
    cursor *c = &r->in;
    uint32_t parts = 0;
    uint64_t end;
    memset(out, 0, sizeof *out);
    out->region = r->places.region;
    out->packed = true;
    if (cursor_is_array(c)) {
        if (!cursor_array(c, &parts) || !boxes_read_region(r, &out->region))
            return false;
        if (parts == 2 && out->region == r->places.region)
            return cursor_fail(c, "a region is named again");
        if (parts != 2 && (parts != 2 + b->n_dims || b->n_dims == 0))
            return cursor_fail(c, "a place has a wrong number of parts");
        if (parts > 2 && r->table->rule == BOXES_CHUNK)
            return cursor_fail(c, "strides under a chunk rule, whose boxes are packed");
    }
    if (!read_distance(r, out->region, &out->offset))
        return false;
    if (parts > 2 && !read_strides(r, key, b, out))
        return false;
    if (!place_end(key, b, out, &end))
        return cursor_fail(c, "a box does not fit its region or its dtype");
    place_advance(&r->places, out->region, end);
    r->all_offsets |= out->offset;
    if (out->region >= r->table->regions)
        r->table->regions = out->region + 1;
    return true;
}

static bool add_slot(box_reader *r, uint32_t key, const box_place *place)
{
    return box_table_add(r->table, key, place->region, place->offset) ||
           boxes_break_off(r);
}

/* Boxes of run @p i follow. Until then its ordinal is the step from the run before. */
static bool open_run(box_reader *r, uint32_t i)
{
    box_run *run = &r->table->runs[i];
    uint64_t ordinal = run->ordinal + r->next;
    run->slot = (uint32_t)r->table->count;
    run->ordinal = (uint32_t)ordinal;
    return ordinal <= LIMIT_BOXES ||
           cursor_fail(&r->in, "boxes are numbered beyond the limit");
}

static void close_run(box_reader *r, uint32_t i)
{
    const box_run *run = &r->table->runs[i];
    r->next = run->ordinal + (r->table->count - run->slot);
}

static bool read_runs(box_reader *r)
{
    box_table *t = r->table;
    cursor *c = &r->in;
    uint32_t at = 0, gap, n = 1;
    if (t->part && (!cursor_u32(c, LIMIT_KEY_RANGES, &n) || n == 0))
        return cursor_fail(c, "a part of no keys");
    t->runs = calloc(n, sizeof *t->runs);
    if (!t->runs)
        return boxes_break_off(r);
    t->n_runs = n;
    if (!t->part) {
        t->runs[0].keys.count = t->keys->count;
        return true;
    }
    for (uint32_t i = 0; i < n; i++) {
        key_range *keys = &t->runs[i].keys;
        if (!cursor_u32(c, t->keys->count - at, &gap) ||
            !cursor_u32(c, t->keys->count - at - gap, &keys->count) ||
            !cursor_u32(c, LIMIT_BOXES, &t->runs[i].ordinal))
            return false;
        if (keys->count == 0 || (i > 0 && gap == 0))
            return cursor_fail(c, "ranges of keys that are empty or touch");
        keys->first = at + gap;
        at = keys->first + keys->count;
    }
    return true;
}

static bool read_chunk(box_reader *r, uint32_t key)
{
    box_table *t = r->table;
    const key_entry *e = &t->keys->entries[key];
    box_place place;
    if (work_stopped(r->stop))
        return boxes_break_off(r);
    if (e->n_dims <= t->dim)
        return cursor_fail(&r->in, "a chunk rule on a dimension that a key lacks");
    block b;
    block_set_chunk(&b, e->n_dims, e->shape, t->dim, t->world, t->index);
    if (block_is_empty(&b))
        return true;
    r->index = t->count;
    return read_place(r, e, &b, &place) && add_slot(r, key, &place);
}

static bool read_chunks(box_reader *r)
{
    box_table *t = r->table;
    cursor *c = &r->in;
    if (!cursor_u32(c, FANIN_MAX_DIMS - 1, &t->dim) ||
        !cursor_u32(c, WORLD_MAX, &t->world) ||
        !cursor_u32(c, WORLD_MAX - 1, &t->index))
        return false;
    if (t->index >= t->world || t->keys->count == 0)
        return cursor_fail(c, "a chunk rule that makes no sense");
    if (!read_runs(r))
        return false;
    for (uint32_t i = 0; i < t->n_runs; i++) {
        const key_range *keys = &t->runs[i].keys;
        if (!open_run(r, i))
            return false;
        for (uint32_t key = keys->first; key < keys->first + keys->count; key++)
            if (!read_chunk(r, key))
                return false;
        close_run(r, i);
    }
    return true;
}

static bool read_block(box_reader *r, const key_entry *key, block *out)
{
    cursor *c = &r->in;
    uint32_t parts;
    *out = (block){.n_dims = key->n_dims};
    if (!cursor_array(c, &parts))
        return false;
    if (parts != 2 * key->n_dims)
        return cursor_fail(c, "a block has another number of dimensions than its key");
    for (uint32_t dim = 0; dim < key->n_dims; dim++)
        if (!cursor_uint(c, UINT64_MAX, &out->offset[dim]))
            return false;
    for (uint32_t dim = 0; dim < key->n_dims; dim++)
        if (!cursor_uint(c, UINT64_MAX, &out->extent[dim]))
            return false;
    if (block_is_empty(out) || !block_inside(out, key->shape))
        return cursor_fail(c, "a block is empty or reaches beyond its tensor");
    return true;
}

/* Where those words are already; false: not among the last ones. */
static bool find_form(const box_reader *r, const void *words, size_t size,
                      uint64_t *position)
{
    for (uint32_t i = 0; i < FORMS_KNOWN; i++) {
        const form *f = &r->forms[i];
        *position = f->position;
        if (f->size == size &&
            memcmp(r->words.data + f->position / 2 * sizeof(uint64_t), words, size) ==
                0)
            return true;
    }
    return false;
}

/* What tells a box besides its key and its place. */
static bool keep_form(box_reader *r, const block *b, const box_place *place)
{
    uint64_t words[3 * FANIN_MAX_DIMS], position;
    size_t n = b->n_dims, size = (place->packed ? 2 : 3) * n * sizeof *words;
    memcpy(words, b->offset, n * sizeof *words);
    memcpy(words + n, b->extent, n * sizeof *words);
    if (!place->packed)
        memcpy(words + 2 * n, place->stride, n * sizeof *words);
    if (!find_form(r, words, size, &position) ||
        (position & 1) != (place->packed ? 0 : 1)) {
        position = r->words.size / sizeof *words * 2 + !place->packed;
        buffer_append(&r->words, words, size);
        r->forms[r->n_forms++ % FORMS_KNOWN] = (form){position, size};
    }
    return (!r->words.failed && number_column_add(&r->table->form_of, position)) ||
           boxes_break_off(r);
}

/* Moves on to the run that has the key. */
static bool find_run(box_reader *r, uint32_t key, uint32_t *run)
{
    const box_table *t = r->table;
    while (key - t->runs[*run].keys.first >= t->runs[*run].keys.count) {
        bool behind = key > t->runs[*run].keys.first;
        if (!behind || *run + 1 == t->n_runs)
            return cursor_fail(&r->in, "a box of a key that is not in the part");
        close_run(r, *run);
        if (!open_run(r, ++*run))
            return false;
    }
    return true;
}

static bool boxes_read_box(box_reader *r, uint32_t *key, uint32_t *run)
{
    box_table *t = r->table;
    cursor *c = &r->in;
    uint32_t step;
    block b;
    box_place place;
    if (work_stopped(r->stop))
        return boxes_break_off(r);
    if (!cursor_u32(c, UINT32_MAX, &step))
        return false;
    if (*key >= t->keys->count || step >= t->keys->count - *key)
        return cursor_fail(c, "a box of a key that is not there");
    *key += step;
    if (!find_run(r, *key, run) || !read_block(r, &t->keys->entries[*key], &b) ||
        !read_place(r, &t->keys->entries[*key], &b, &place))
        return false;
    return keep_form(r, &b, &place) && add_slot(r, *key, &place);
}

static bool read_explicit(box_reader *r)
{
    box_table *t = r->table;
    cursor *c = &r->in;
    uint64_t count;
    uint32_t key = 0, run = 0;
    if (!cursor_uint(c, LIMIT_BOXES, &count) || !read_runs(r) || !open_run(r, 0))
        return false;
    if (count > cursor_left(c) / BOX_BYTES_MIN)
        return cursor_fail(c, "more boxes are announced than bytes are there");
    if (!buffer_reserve(&r->words, sizeof *t->words))
        return boxes_break_off(r);
    for (r->index = 0; r->index < count; r->index++)
        if (!boxes_read_box(r, &key, &run))
            return false;
    for (close_run(r, run); run + 1 < t->n_runs; close_run(r, run))
        if (!open_run(r, ++run))
            return false;
    t->n_words = r->words.size / sizeof *t->words;
    t->words = (uint64_t *)(void *)r->words.data;
    r->words = (buffer){0};
    array_shrink(&t->words, t->n_words + 1, sizeof *t->words);
    return true;
}

static bool read_table(box_reader *r)
{
    uint32_t rule;
    if (!cursor_u32(&r->in, RULE_PART + BOXES_CHUNK, &rule) ||
        !cursor_u32(&r->in, PLACE_SHIFT_MAX, &r->places.shift))
        return false;
    r->table->part = rule >= RULE_PART;
    r->table->shift = r->places.shift;
    r->table->rule = (box_rule)(rule % RULE_PART);
    if (!(r->table->rule == BOXES_CHUNK ? read_chunks(r) : read_explicit(r)))
        return false;
    if (r->places.shift != place_shift(r->all_offsets))
        return cursor_fail(&r->in, "the alignment is not that of the offsets");
    if (cursor_left(&r->in) > 0)
        return cursor_fail(&r->in, "bytes after the table's end");
    return box_table_close(r->table) || boxes_break_off(r);
}

fanin_status box_table_decode(const uint8_t *blob, size_t size, const key_table *keys,
                              work_stop *stop, box_table **out, fanin_error *error)
{
    static const error_place place = {.phase = "catalog"};
    *out = NULL;
    box_table *table = calloc(1, sizeof *table);
    box_reader *r = calloc(1, sizeof *r);
    fanin_status status = FANIN_OK;
    if (!table || !r) {
        status = error_set_memory(error);
    } else {
        table->keys = keys;
        r->table = table;
        r->stop = stop;
        r->in = (cursor){.at = blob, .end = blob + size, .canonical = true};
        if (read_table(r))
            *out = table;
        else if (r->broken_off)
            status = work_broken_off(stop, "catalog", "a box table was read", error);
        else
            status = error_set(error, FANIN_ERR_PROTOCOL, &place,
                               "box table, box %" PRIu64 ": %s", r->index, r->in.why);
        buffer_free(&r->words);
    }
    free(r);
    if (status != FANIN_OK)
        box_table_free(&table);
    return status;
}

void box_table_free(box_table **table)
{
    if (!table || !*table)
        return;
    free((*table)->runs);
    number_column_free(&(*table)->key_of);
    number_column_free(&(*table)->region_of);
    number_column_free(&(*table)->offset_of);
    number_column_free(&(*table)->form_of);
    free((*table)->words);
    free(*table);
    *table = NULL;
}

/* ------------------------------------------------------------- access */

uint64_t box_table_count(const box_table *table)
{
    return table->count;
}

box_rule box_table_rule(const box_table *table, uint32_t *dim_out, uint32_t *world_out,
                        uint32_t *index_out)
{
    if (dim_out)
        *dim_out = table->dim;
    if (world_out)
        *world_out = table->world;
    if (index_out)
        *index_out = table->index;
    return table->rule;
}

static void get_block(const box_table *table, uint64_t slot, const key_entry *key,
                      block *out)
{
    if (table->rule == BOXES_CHUNK) {
        block_set_chunk(out, key->n_dims, key->shape, table->dim, table->world,
                        table->index);
        return;
    }
    const uint64_t *words = table->words + number_column_get(&table->form_of, slot) / 2;
    *out = (block){.n_dims = key->n_dims};
    for (uint32_t dim = 0; dim < key->n_dims; dim++) {
        out->offset[dim] = words[dim];
        out->extent[dim] = words[key->n_dims + dim];
    }
}

static void get_place(const box_table *table, uint64_t slot, const key_entry *key,
                      box_place *out)
{
    *out = (box_place){.region = (uint32_t)number_column_get(&table->region_of, slot),
                       .offset = number_column_get(&table->offset_of, slot)
                                 << table->shift,
                       .packed = true};
    if (table->rule == BOXES_CHUNK)
        return;
    uint64_t position = number_column_get(&table->form_of, slot);
    if (position % 2 == 0)
        return;
    const uint64_t *words = table->words + position / 2;
    out->packed = false;
    for (uint32_t dim = 0; dim < key->n_dims; dim++)
        out->stride[dim] = (int64_t)words[2 * key->n_dims + dim];
}

/* The run that has the box; a whole table has one. */
static const box_run *boxes_run_of(const box_table *table, uint64_t ordinal)
{
    uint32_t low = 0, high = table->n_runs;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (table->runs[middle].ordinal <= ordinal)
            low = middle;
        else
            high = middle;
    }
    return &table->runs[low];
}

void box_table_get(const box_table *table, uint64_t ordinal, uint32_t *key_out,
                   block *block_out, box_place *place_out)
{
    const box_run *run = boxes_run_of(table, ordinal);
    uint64_t at = run->slot + (ordinal - run->ordinal);
    uint32_t number = box_table_key(table, at);
    const key_entry *key = &table->keys->entries[number];
    if (key_out)
        *key_out = number;
    if (block_out)
        get_block(table, at, key, block_out);
    if (place_out)
        get_place(table, at, key, place_out);
}

/* The first slot whose key is not below @p key. */
static uint64_t slot_of_key(const box_table *table, uint64_t key)
{
    uint64_t low = 0, high = table->count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (box_table_key(table, middle) < key)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The run that has all of those keys; NULL: none, so that they are not all known. */
static const box_run *run_of_keys(const box_table *table, key_range keys)
{
    uint32_t low = 0, high = table->n_runs;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (table->runs[middle].keys.first <= keys.first)
            low = middle;
        else
            high = middle;
    }
    const box_run *run = &table->runs[low];
    bool there = low < table->n_runs && keys.first >= run->keys.first &&
                 (uint64_t)keys.first + keys.count <=
                     (uint64_t)run->keys.first + run->keys.count;
    return there ? run : NULL;
}

uint64_t box_table_of_keys(const box_table *table, key_range keys, uint64_t *count_out)
{
    const box_run *run = run_of_keys(table, keys);
    uint64_t first = 0, end = 0;
    if (run) {
        first = slot_of_key(table, keys.first);
        end = slot_of_key(table, (uint64_t)keys.first + keys.count);
    }
    if (count_out)
        *count_out = end - first;
    return run ? run->ordinal + (first - run->slot) : 0;
}

uint64_t box_table_of_key(const box_table *table, uint32_t key, uint64_t *count_out)
{
    return box_table_of_keys(table, (key_range){key, 1}, count_out);
}

uint32_t box_table_regions(const box_table *table)
{
    return table->regions;
}
