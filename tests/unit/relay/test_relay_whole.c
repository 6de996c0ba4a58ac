/* SPDX-License-Identifier: Apache-2.0 */
/** @file What a reader wants, in the parts of a holder of all tensors whole: each element once, in
    its place. */
#include "block.h"
#include "dtype.h"
#include "pull/described.h"
#include "testing.h"
#include "whole.h"

#define TENSORS 4

static key_entry entries[TENSORS] = {
    {.name = "embed", .dtype = FANIN_DTYPE_BF16, .n_dims = 2, .shape = {70, 50}},
    {.name = "experts", .dtype = FANIN_DTYPE_U8, .n_dims = 3, .shape = {7, 5, 130}},
    {.name = "packed", .dtype = FANIN_DTYPE_F6_E2M3, .n_dims = 2, .shape = {6, 24}},
    {.name = "scale", .dtype = FANIN_DTYPE_F32, .n_dims = 0},
};
static const key_table catalog = {
    .entries = entries, .count = TENSORS, .id.bytes = "a catalog"};

typedef struct scene {
    fanin_tensor tensors[TENSORS];
    fanin_box boxes[TENSORS];
    parts parts;
    uint8_t memory[TENSORS][8192];
} scene;

static scene holder, reader;

static void describe(scene *s, size_t i)
{
    const key_entry *e = &entries[i];
    s->boxes[i] = (fanin_box){.address = s->memory[i]};
    memcpy(s->boxes[i].extent, e->shape, sizeof s->boxes[i].extent);
    s->tensors[i] = (fanin_tensor){.struct_size = sizeof(fanin_tensor),
                                   .name = e->name,
                                   .dtype = e->dtype,
                                   .n_dims = e->n_dims,
                                   .boxes = &s->boxes[i],
                                   .n_boxes = 1};
    memcpy(s->tensors[i].shape, e->shape, sizeof s->tensors[i].shape);
}

/* The holder has all; the reader wants all of it, until a test says otherwise. */
static void begin_scene(uint64_t unit)
{
    for (size_t i = 0; i < TENSORS; i++) {
        describe(&holder, i);
        describe(&reader, i);
        for (size_t at = 0; at < sizeof holder.memory[i]; at++)
            holder.memory[i][at] = (uint8_t)(at * 31 + at / 251 + i);
    }
    memset(reader.memory, 0xcc, sizeof reader.memory);
    assert_int_equal(parts_cut(&holder.parts, holder.tensors, TENSORS, unit, NULL),
                     FANIN_OK);
}

static void want(size_t n, uint64_t unit)
{
    assert_int_equal(parts_cut(&reader.parts, reader.tensors, n, unit, NULL), FANIN_OK);
}

static void end_scene(whole *w)
{
    whole_free(w);
    parts_free(&holder.parts);
    parts_free(&reader.parts);
}

static void strides_of(const fanin_tensor *t, const fanin_box *box, uint64_t *extent,
                       int64_t *stride)
{
    const dtype_unit unit = dtype_get_unit(t->dtype);
    memcpy(extent, box->extent, sizeof box->extent);
    if (t->n_dims > 0)
        extent[t->n_dims - 1] /= unit.elements;
    memcpy(stride, box->stride, sizeof box->stride);
    bool packed = true;
    for (uint32_t d = 0; d < t->n_dims; d++)
        packed = packed && stride[d] == 0;
    if (packed)
        block_packed_strides(t->n_dims, extent, unit.bytes, stride);
}

/* As a read of it does: out of the holder's part, which is packed. */
static void copy_piece(const fanin_tensor *piece)
{
    size_t part = strtoul(piece->name, NULL, 16);
    const dtype_unit unit = dtype_get_unit(piece->dtype);
    assert_in_range(part, 0, holder.parts.n - 1);
    const fanin_tensor *own = &holder.parts.own[part];
    uint64_t extent[FANIN_MAX_DIMS];
    int64_t from[FANIN_MAX_DIMS] = {0}, to[FANIN_MAX_DIMS] = {0};
    assert_memory_equal(piece->shape, own->shape, piece->n_dims * sizeof *own->shape);
    strides_of(own, own->boxes, extent, from);
    strides_of(piece, piece->boxes, extent, to);
    const uint8_t *at = own->boxes->address;
    for (uint32_t d = 0; d < piece->n_dims; d++) {
        uint64_t offset = piece->boxes->offset[d];
        assert_true(offset + piece->boxes->extent[d] <= own->shape[d]);
        if (d + 1 == piece->n_dims)
            offset /= unit.elements;
        at += (int64_t)offset * from[d];
    }
    strided all;
    strided_init(&all, piece->n_dims, extent, from, to, unit.bytes);
    strided_copy(&all, piece->boxes->address, at);
}

/* Each unit's tensors are of the parts that it is said to need. */
static void check_users(const whole *w, const described *all)
{
    const unit_map *b = &w->map;
    size_t units = reader.parts.n_units, uses = 0;
    assert_int_equal(b->n_parts, holder.parts.n);
    assert_int_equal(b->unit_first[units], all->count);
    for (size_t u = 0; u < units; u++) {
        for (uint32_t i = b->unit_first[u]; i < b->unit_first[u + 1]; i++) {
            size_t part = strtoul(described_at(all, i)->name, NULL, 16), named = 0;
            for (uint32_t j = b->used_first[part]; j < b->used_first[part + 1]; j++)
                named += b->used_by[j] == u;
            assert_true(named > 0);
            uses++;
        }
    }
    assert_int_equal(b->used_first[b->n_parts], uses);
}

static void bring_all(const whole *w)
{
    gpu_finder finder = {0};
    const described *all;
    const places *where;
    assert_non_null(w->map.destination);
    assert_int_equal(prepared_take(w->map.destination, &finder, &all, &where, NULL),
                     FANIN_OK);
    for (size_t i = 0; i < all->count; i++)
        copy_piece(described_at(all, i));
    check_users(w, all);
    prepared_give(w->map.destination, where);
}

/* The wanted boxes are as in the holder's memory, and nothing else is written. */
static void check_brought(size_t n)
{
    static uint8_t expected[sizeof reader.memory[0]];
    for (size_t i = 0; i < n; i++) {
        const fanin_tensor *t = &reader.tensors[i], *whole = &holder.tensors[i];
        const dtype_unit unit = dtype_get_unit(t->dtype);
        uint64_t extent[FANIN_MAX_DIMS];
        int64_t from[FANIN_MAX_DIMS] = {0}, to[FANIN_MAX_DIMS] = {0};
        memset(expected, 0xcc, sizeof expected);
        strides_of(whole, whole->boxes, extent, from);
        strides_of(t, t->boxes, extent, to);
        const uint8_t *at = holder.memory[i];
        for (uint32_t d = 0; d < t->n_dims; d++)
            at += (int64_t)(t->boxes->offset[d] /
                            (d + 1 == t->n_dims ? unit.elements : 1)) *
                  from[d];
        strided all;
        strided_init(&all, t->n_dims, extent, from, to, unit.bytes);
        strided_copy(&all, expected, at);
        assert_memory_equal(reader.memory[i], expected, sizeof expected);
    }
}

static void check_wanted(size_t n, uint64_t unit)
{
    whole w;
    want(n, unit);
    whole_find(&w, &reader.parts, &catalog, unit);
    assert_true(digest_equal(&w.holding, &holder.parts.holding));
    assert_true(digest_equal(&w.catalog_id, &catalog.id));
    bring_all(&w);
    check_brought(n);
    end_scene(&w);
}

/* Columns of one, rows and columns of another, into memory with gaps. */
static void narrow_boxes(void)
{
    reader.boxes[0].offset[1] = 25;
    reader.boxes[0].extent[1] = 25;
    reader.boxes[1].offset[0] = 2;
    reader.boxes[1].extent[0] = 4;
    reader.boxes[1].offset[2] = 65;
    reader.boxes[1].extent[2] = 65;
    reader.boxes[1].stride[0] = 1024;
    reader.boxes[1].stride[1] = 100;
    reader.boxes[1].stride[2] = 1;
    reader.boxes[2].offset[1] = 12;
    reader.boxes[2].extent[1] = 12;
}

TEST(slices_are_found_in_parts_of_any_size)
{
    for (uint64_t unit = 4; unit < 9000; unit = unit * 3 / 2 + 1) {
        begin_scene(unit);
        narrow_boxes();
        check_wanted(TENSORS, unit);
    }
}

TEST(some_of_the_tensors_are_found)
{
    begin_scene(300);
    check_wanted(2, 300);
}

/* They have one holding with such holders, and read them by number. */
TEST(nothing_is_brought_to_who_wants_all_whole)
{
    whole w;
    begin_scene(300);
    want(TENSORS, 300);
    whole_find(&w, &reader.parts, &catalog, 300);
    assert_null(w.map.destination);
    assert_true(digest_equal(&w.catalog_id, &catalog.id));
    end_scene(&w);
}

static void expect_nothing(uint64_t unit)
{
    whole w;
    want(TENSORS, unit);
    whole_find(&w, &reader.parts, &catalog, unit);
    assert_null(w.map.destination);
    end_scene(&w);
}

TEST(what_the_catalog_has_not_is_not_brought)
{
    begin_scene(300);
    narrow_boxes();
    reader.tensors[1].name = "another";
    expect_nothing(300);
    begin_scene(300);
    narrow_boxes();
    reader.tensors[0].shape[0] = 71;
    expect_nothing(300);
    begin_scene(300);
    reader.tensors[1].n_dims = 2;
    expect_nothing(300);
}
