/* SPDX-License-Identifier: Apache-2.0 */
/* Spans of memory that are read at once; plans that convert F32 on the way. */
#include "convert.h"
#include "plan_world.h"
#include "testing.h"

#define SHAPE(...) ((const uint64_t[]){__VA_ARGS__})

static const span_rule usual = {
    .max_length = 1 << 20, .max_gap = 4096, .direct_from = 64 << 10};

/* Of the test that runs. */
static world w;
static landing l;
static plan *p;
static plan_spans *spans;

static int tear_down(void **state)
{
    plan_spans_free(&spans);
    plan_free(&p);
    landing_free(&l);
    world_free(&w);
    w = (world){0};
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, tear_down)

static void begin(void)
{
    tear_down(NULL);
    world_init(&w, 1, 1);
}

static void plan_whole(void)
{
    world_seal(&w, NULL);
    landing_whole(&l, &w, 0);
    assert_int_equal(world_plan(&w, &l, &p, NULL), FANIN_OK);
}

/* Tensors of 100 bytes, whole, in one rank; gap before each; region of each. */
static void one_rank(uint32_t n_keys, const uint64_t *gaps, const uint32_t *regions)
{
    block all = {.n_dims = 1, .extent = {100}};
    begin();
    for (uint32_t i = 0; i < n_keys; i++)
        world_key(&w, FANIN_DTYPE_U8, 1, all.extent);
    for (uint32_t i = 0; i < n_keys; i++)
        world_hold(&w, 0, i, &all, regions ? regions[i] : 0, gaps ? gaps[i] : 0,
                   LAYOUT_PACKED);
    plan_whole();
}

static plan_spans *spans_of(const span_rule *rule)
{
    region_entry entries[WORLD_REGIONS] = {{0}};
    region_table regions = {.entries = entries, .count = WORLD_REGIONS};
    plan_spans_free(&spans);
    for (uint32_t i = 0; i < WORLD_REGIONS; i++)
        entries[i] = (region_entry){.id = i, .length = w.ranks[0].used[i]};
    assert_int_equal(
        plan_spans_build(p, w.keys, w.sources, 0, &regions, rule, NULL, &spans, NULL),
        FANIN_OK);
    return spans;
}

CASE(gaps_up_to_the_limit_are_crossed)
{
    const uint64_t gaps[] = {8, 64, 65, 1};
    const span_rule rule = {.max_length = 4096, .max_gap = 64, .direct_from = 4096};
    one_rank(4, gaps, NULL);
    spans = spans_of(&rule);
    assert_int_equal(spans->n_spans, 2);
    assert_int_equal(spans->spans[0].offset, 8);
    assert_int_equal(spans->spans[0].length, 264);
    assert_int_equal(spans->spans[1].count, 2);
    assert_false(spans->spans[0].direct);
    world_execute_spans(&w, &l, p, &rule);
}

CASE(length_is_limited)
{
    span_rule rule = {.max_length = 301, .max_gap = 64, .direct_from = 4096};
    const uint64_t gaps[] = {0, 1, 1, 1, 1, 1};
    one_rank(6, gaps, NULL);
    spans = spans_of(&rule);
    assert_int_equal(spans->n_spans, 3);
    assert_int_equal(spans->spans[0].length, 201);
    rule.max_length = 302;
    spans = spans_of(&rule);
    assert_int_equal(spans->n_spans, 2);
    rule.max_length = 30; /* shorter than one piece */
    spans = spans_of(&rule);
    assert_int_equal(spans->n_spans, 6 * 4);
    world_execute_spans(&w, &l, p, &rule);
}

/* Memory that follows on both sides is one piece, read where it lands. */
CASE(contiguous_neighbours_are_one_direct_read)
{
    one_rank(3, NULL, NULL);
    /* landing_whole() leaves bytes between: land as the memory lies instead */
    plan_free(&p);
    for (uint32_t i = 0; i < 3; i++)
        l.to_of_key[i] = 100 * i;
    assert_int_equal(world_plan(&w, &l, &p, NULL), FANIN_OK);
    spans = spans_of(&usual);
    assert_int_equal(spans->n_spans, 1);
    assert_int_equal(spans->n_pieces, 1);
    assert_true(spans->spans[0].direct);
    assert_int_equal(spans->spans[0].length, 300);
}

CASE(long_pieces_are_direct)
{
    const uint64_t gaps[] = {0, 1, 1, 1};
    span_rule rule = {.max_length = 4096, .max_gap = 64, .direct_from = 100};
    one_rank(4, gaps, NULL);
    spans = spans_of(&rule);
    assert_int_equal(spans->n_spans, 4);
    for (int i = 0; i < 4; i++)
        assert_true(spans->spans[i].direct);
    rule.direct_from = 101;
    spans = spans_of(&rule);
    assert_int_equal(spans->n_spans, 1);
}

CASE(regions_are_never_crossed)
{
    const uint32_t regions[] = {2, 0, 1, 0, 2, 2};
    one_rank(6, NULL, regions);
    spans = spans_of(&usual);
    assert_int_equal(spans->n_spans, 3);
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(spans->spans[i].region, i);
    world_execute_spans(&w, &l, p, &usual);
}

/* As if the second followed the first, where it lies and where it lands. */
CASE(neighbours_in_two_regions_are_two_reads)
{
    const uint32_t regions[] = {0, 1};
    const uint64_t gaps[] = {0, 100};
    one_rank(2, gaps, regions);
    plan_free(&p);
    for (uint32_t i = 0; i < 2; i++)
        l.to_of_key[i] = 100 * i;
    assert_int_equal(world_plan(&w, &l, &p, NULL), FANIN_OK);
    spans = spans_of(&usual);
    assert_int_equal(spans->n_spans, 2);
    assert_int_equal(spans->spans[0].length, 100);
    assert_int_equal(spans->spans[1].region, 1);
    world_execute_spans(&w, &l, p, &usual);
}

CASE(boxes_outside_of_their_region_are_refused)
{
    const uint32_t regions[] = {0, 1};
    one_rank(2, NULL, regions);
    region_entry entries[] = {{.id = 0, .length = 100}, {.id = 1, .length = 99}};
    region_table table = {.entries = entries, .count = 2};
    for (int i = 0; i < 2; i++) {
        fanin_error error = FANIN_ERROR_INIT;
        assert_int_equal(plan_spans_build(p, w.keys, w.sources, 0, &table, &usual, NULL,
                                          &spans, &error),
                         FANIN_ERR_PROTOCOL);
        assert_null(spans);
        assert_int_equal(error.rank, 0);
        assert_string_equal(error.key, "key00001");
        table.count = 1; /* then the region is not there at all */
    }
    table.count = 2;
    entries[1].length = 100;
    assert_int_equal(
        plan_spans_build(p, w.keys, w.sources, 0, &table, &usual, NULL, &spans, NULL),
        FANIN_OK);
}

/* Strides that leave the region below, above, or wrap around. */
CASE(strided_boxes_are_checked_too)
{
    static const struct {
        uint64_t offset;
        int64_t stride;
        uint64_t length;
        bool good;
    } cases[] = {
        {0, 4, 13, true},
        {0, 4, 12, false},
        {12, -4, 13, true},
        {12, -4, 12, false},
        {1000, INT64_MAX / 4, 2000, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        block all = {.n_dims = 1, .extent = {4}};
        fanin_error error = FANIN_ERROR_INIT;
        begin();
        world_key(&w, FANIN_DTYPE_U8, 1, SHAPE(4));
        world_hold(&w, 0, 0, &all, 0, 0, LAYOUT_PACKED);
        box_record *box = &w.ranks[0].records[0];
        buffer blob = {0};
        world_seal(&w, NULL);
        box->place.packed = false;
        box->place.offset = cases[i].offset;
        box->place.stride[0] = cases[i].stride;
        box_table_encode(&blob, w.keys->entries, 1, box, 1, 0, 1);
        box_table_free(&w.ranks[0].boxes);
        fanin_status status = box_table_decode(blob.data, blob.size, w.keys, NULL,
                                               &w.ranks[0].boxes, &error);
        buffer_free(&blob);
        if (status == FANIN_OK) { /* tables refuse the wildest themselves */
            w.sources[0].boxes = w.ranks[0].boxes;
            region_entry entry = {.length = cases[i].length};
            region_table table = {.entries = &entry, .count = 1};
            landing_whole(&l, &w, 0);
            assert_int_equal(world_plan(&w, &l, &p, NULL), FANIN_OK);
            status = plan_spans_build(p, w.keys, w.sources, 0, &table, &usual, NULL,
                                      &spans, &error);
            assert_int_equal(status, cases[i].good ? FANIN_OK : FANIN_ERR_PROTOCOL);
        }
        assert_int_equal(status == FANIN_OK, cases[i].good);
    }
}

/* A transposed matrix is one read and one view, not an element a piece. */
CASE(transposed_memory_is_one_view)
{
    block all = {.n_dims = 2, .extent = {50, 30}};
    begin();
    world_key(&w, FANIN_DTYPE_BF16, 2, all.extent);
    world_hold(&w, 0, 0, &all, 0, 0, LAYOUT_PACKED);
    w.ranks[0].records[0].place = (box_place){.packed = false, .stride = {2, 100}};
    plan_whole();
    spans = spans_of(&usual);
    assert_int_equal(spans->n_spans, 1);
    assert_int_equal(spans->n_pieces, 1);
    assert_int_equal(spans->spans[0].length, 3000);
    world_execute_spans(&w, &l, p, &usual);
}

/* Rows with room between them: read along if it is small enough. */
CASE(gaps_inside_of_boxes_obey_the_rule)
{
    block all = {.n_dims = 2, .extent = {10, 100}};
    span_rule rule = {.max_length = 1 << 20, .max_gap = 28, .direct_from = 1 << 20};
    begin();
    world_key(&w, FANIN_DTYPE_U8, 2, all.extent);
    world_hold(&w, 0, 0, &all, 0, 280, LAYOUT_PACKED);
    w.ranks[0].records[0].place = (box_place){.packed = false, .stride = {128, 1}};
    plan_whole();
    spans = spans_of(&rule);
    assert_int_equal(spans->n_spans, 1);
    assert_int_equal(spans->n_pieces, 1);
    rule.max_gap = 27;
    spans = spans_of(&rule);
    assert_int_equal(spans->n_spans, 10);
    assert_true(spans->spans[9].direct);
    rule = (span_rule){.max_length = 1 << 20, .max_gap = 28, .direct_from = 100};
    spans = spans_of(&rule);
    assert_int_equal(spans->n_spans, 10);
    world_execute_spans(&w, &l, p, &rule);
}

/* Columns of rows: a get a row where the gaps are wide, one view for who walks it; and where rows
   have room between them, too. */
CASE(columns_are_cut_as_the_reader_wants)
{
    const span_rule walker = {.max_length = 1 << 20, .walks_views = true};
    for (int padded = 0; padded < 2; padded++) {
        block all = {.n_dims = 2, .extent = {10, 1000}};
        block some = {.n_dims = 2, .offset = {0, 100}, .extent = {10, 600}};
        span_rule rule = {.max_length = 1 << 20, .max_gap = 399, .direct_from = 4096};
        begin();
        world_key(&w, FANIN_DTYPE_U8, 2, all.extent);
        world_hold(&w, 0, 0, &all, 0, padded ? 280 : 0, LAYOUT_PACKED);
        if (padded)
            w.ranks[0].records[0].place =
                (box_place){.packed = false, .stride = {1028, 1}};
        world_seal(&w, NULL);
        landing_add(&l, &w, 0, &some, true);
        assert_int_equal(world_plan(&w, &l, &p, NULL), FANIN_OK);
        spans = spans_of(&rule);
        assert_int_equal(spans->n_spans, 10);
        assert_int_equal(spans->spans[9].length, 600);
        world_execute_spans(&w, &l, p, &rule);
        rule.max_gap = 428;
        spans = spans_of(&rule);
        assert_int_equal(spans->n_spans, 1);
        world_execute_spans(&w, &l, p, &rule);
        spans = spans_of(&walker);
        assert_int_equal(spans->n_spans, 1);
        assert_int_equal(spans->n_pieces, 1);
        assert_int_equal(strided_bytes(&spans->views[spans->pieces[0].view - 1]), 6000);
        world_execute_spans(&w, &l, p, &walker);
    }
}

CASE(senseless_calls_are_refused)
{
    region_table none = {0};
    const span_rule tiny = {.max_length = 15};
    one_rank(1, NULL, NULL);
    assert_int_equal(
        plan_spans_build(p, w.keys, w.sources, 1, &none, &usual, NULL, &spans, NULL),
        FANIN_ERR_ARGUMENT);
    assert_null(spans);
    assert_int_equal(
        plan_spans_build(p, w.keys, w.sources, 0, &none, &tiny, NULL, &spans, NULL),
        FANIN_ERR_ARGUMENT);
}

/* ------------------------------------------------------------- conversion on the way */

static const uint64_t alike_shape[] = {8, 6};
static const span_rule alike_rule = {
    .max_length = 4096, .max_gap = 64, .direct_from = 32};

/* Two tensors that are cut alike, of one element size; of them, one is converted. */
static void make_alike(void)
{
    world_init(&w, 2, 7);
    world_key(&w, FANIN_DTYPE_F32, 2, alike_shape);
    world_key(&w, FANIN_DTYPE_I32, 2, alike_shape);
    for (uint32_t r = 0; r < 2; r++)
        world_hold_chunks(&w, r, 0, 2, r);
    world_seal(&w, NULL);
}

static void make_plan(void)
{
    fanin_error error = FANIN_ERROR_INIT;
    plan_free(&p);
    if (world_plan(&w, &l, &p, &error) != FANIN_OK)
        fail_msg("%s", error.message);
    world_check_plan(&w, &l, p);
}

static void land_whole(fanin_dtype dtype)
{
    landing_free(&l);
    landing_whole(&l, &w, dtype);
}

/* What is converted must never be fetched straight into its place. */
CASE(converted_spans_are_not_direct)
{
    fanin_error error = FANIN_ERROR_INIT;
    make_alike();
    land_whole(FANIN_DTYPE_F16);
    make_plan();
    region_entry entries[WORLD_REGIONS] = {{0}};
    region_table regions = {.entries = entries, .count = WORLD_REGIONS};
    for (uint32_t i = 0; i < WORLD_REGIONS; i++)
        entries[i] = (region_entry){.id = i, .length = w.ranks[0].used[i]};
    assert_int_equal(plan_spans_build(p, w.keys, w.sources, 0, &regions, &alike_rule,
                                      NULL, &spans, &error),
                     FANIN_OK);
    uint64_t direct = 0, converted = 0;
    for (uint64_t i = 0; i < spans->n_spans; i++) {
        const span *s = &spans->spans[i];
        direct += s->direct;
        for (uint64_t k = s->first; k < s->first + s->count; k++) {
            uint32_t view = spans->pieces[k].view;
            if (view && spans->views[view - 1].convert == CONVERT_F32_F16) {
                converted++;
                assert_false(s->direct);
            }
        }
    }
    assert_int_equal(direct, 1); /* the other tensor */
    assert_int_equal(converted, 1);
}

CASE(nothing_changes_without_a_dtype)
{
    make_alike();
    land_whole(0);
    make_plan();
    assert_int_equal(p->n_views, 0);
    world_execute(&w, &l, p);
    land_whole(FANIN_DTYPE_F32);
    make_plan();
    assert_int_equal(p->n_views, 0);
}

CASE(other_dtypes_are_refused)
{
    make_alike();
    static const fanin_dtype unknown[] = {FANIN_DTYPE_F64, FANIN_DTYPE_I32,
                                          FANIN_DTYPE_F8_E4M3, 9999};
    land_whole(0);
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
        fanin_error error = FANIN_ERROR_INIT;
        plan *none;
        l.dtype = unknown[i];
        assert_int_equal(world_plan(&w, &l, &none, &error), FANIN_ERR_ARGUMENT);
        assert_null(none);
        assert_non_null(strstr(error.message, "F32"));
    }
}
