/* SPDX-License-Identifier: Apache-2.0 */
#include "plan_world.h"
#include "testing.h"

#define SHAPE(...) ((const uint64_t[]){__VA_ARGS__})

static block rows(uint64_t offset, uint64_t extent, uint64_t columns)
{
    return (block){.n_dims = 2, .offset = {offset, 0}, .extent = {extent, columns}};
}

/* Of the test that runs. */
static world w;
static landing l;
static plan *p;

static int tear_down(void **state)
{
    plan_free(&p);
    landing_free(&l);
    world_free(&w);
    l = (landing){0};
    w = (world){0};
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, tear_down)

static void begin(uint32_t ranks)
{
    tear_down(NULL);
    world_init(&w, ranks, 1);
}

/* Rank r has chunk r mod parts of every key. */
static void hold_chunks(uint32_t ranks, uint32_t dim, uint32_t parts,
                        const bool *leave_out)
{
    for (uint32_t r = 0; r < ranks; r++)
        world_hold_chunks(&w, r, dim, parts, r % parts);
    world_seal(&w, leave_out);
}

/* Plans, executes, compares; the plan stays. */
static plan *plan_and_run(void)
{
    fanin_error error = FANIN_ERROR_INIT;
    plan_free(&p);
    if (world_plan(&w, &l, &p, &error) != FANIN_OK)
        fail_msg("%s", error.message);
    world_check_plan(&w, &l, p);
    world_execute(&w, &l, p);
    return p;
}

static fanin_error refused(fanin_status expected)
{
    fanin_error error = FANIN_ERROR_INIT;
    plan *none;
    assert_int_equal(world_plan(&w, &l, &none, &error), expected);
    assert_null(none);
    assert_int_equal(error.status, expected);
    return error;
}

static fanin_error incomplete(void)
{
    landing_whole(&l, &w, 0);
    fanin_error error = refused(FANIN_ERR_INCOMPLETE);
    assert_string_not_equal(error.remedy, "");
    return error;
}

/* ---------------------------------------------------------------- proof */

CASE(missing_ranks_are_named)
{
    static const struct {
        uint64_t rows[2]; /* of two keys */
        uint32_t ranks;   /* the second of four shares is missing */
        const char *key;
        int rank;
        const char *words[2];
    } cases[] = {
        {{3, 10},
         4,
         "key00000",
         1,
         {"key00000: row 1 of 3 (dimension 0) held by no connected rank",
          "rank 1 should hold"}},
        {{1, 10}, 4, "key00001", 1, {"rows 3..5 of 10 (dimension 0)", ""}},
        /* Both holders of a share are gone: neither is *the* rank at fault. */
        {{8, 8}, 8, "key00000", -1, {"rows 2..3 of 8 (dimension 0)", ""}},
    };
    const bool absent[8] = {false, true, false, false, false, true};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        begin(cases[i].ranks);
        for (int k = 0; k < 2; k++)
            world_key(&w, FANIN_DTYPE_F32, 2, SHAPE(cases[i].rows[k], 5));
        hold_chunks(cases[i].ranks, 0, 4, absent);
        fanin_error e = incomplete();
        assert_string_equal(e.key, cases[i].key);
        assert_int_equal(e.rank, cases[i].rank);
        for (int k = 0; k < 2; k++)
            assert_says(e.message, cases[i].words[k]);
    }
}

CASE(different_cuts_conflict)
{
    begin(3);
    world_key(&w, FANIN_DTYPE_F32, 2, SHAPE(10, 4));
    block first = rows(0, 3, 4), second = rows(3, 4, 4), third = rows(5, 5, 4);
    world_hold(&w, 0, 0, &first, 0, 0, LAYOUT_PACKED);
    world_hold(&w, 1, 0, &second, 0, 0, LAYOUT_PACKED);
    world_hold(&w, 2, 0, &third, 0, 0, LAYOUT_PACKED);
    world_seal(&w, NULL);
    fanin_error e = incomplete();
    assert_string_equal(e.key, "key00000");
    assert_int_equal(e.rank, -1);
    assert_non_null(strstr(e.message,
                           "rows 5..6 of 10 (dimension 0) held by ranks 1 and 2 "
                           "differently"));
}

CASE(conflict_inside_of_a_rank_names_it)
{
    begin(3);
    world_key(&w, FANIN_DTYPE_F32, 2, SHAPE(10, 4));
    block first = rows(0, 6, 4), second = rows(5, 5, 4);
    world_hold(&w, 0, 0, &first, 0, 0, LAYOUT_PACKED);
    world_hold(&w, 2, 0, &first, 0, 0, LAYOUT_PACKED);
    world_hold(&w, 2, 0, &second, 0, 0, LAYOUT_PACKED);
    world_seal(&w, NULL);
    fanin_error e = incomplete();
    assert_int_equal(e.rank, 2);
    assert_non_null(
        strstr(e.message, "row 5 of 10 (dimension 0) held by rank 2 twice"));
}

CASE(holes_of_grids_name_both_dimensions)
{
    begin(4);
    world_key(&w, FANIN_DTYPE_U8, 2, SHAPE(8, 16));
    for (uint32_t r = 0; r < 3; r++) {
        block b = {.n_dims = 2, .offset = {r / 2 * 4, r % 2 * 8}, .extent = {4, 8}};
        world_hold(&w, r, 0, &b, 0, 0, LAYOUT_PACKED);
    }
    world_seal(&w, NULL);
    fanin_error e = incomplete();
    assert_int_equal(e.rank, -1);
    assert_non_null(strstr(
        e.message, "rows 4..7 of 8 (dimension 0), columns 8..15 of 16 (dimension 1)"));
}

CASE(tensors_that_nobody_wants_are_proven_too)
{
    begin(1);
    world_key(&w, FANIN_DTYPE_U8, 2, SHAPE(4, 4));
    world_key(&w, FANIN_DTYPE_U8, 0, NULL);
    block all = rows(0, 4, 4);
    world_hold(&w, 0, 0, &all, 0, 0, LAYOUT_PACKED);
    world_seal(&w, NULL);
    landing_add(&l, &w, 0, &all, false);
    fanin_error e = refused(FANIN_ERR_INCOMPLETE);
    assert_string_equal(e.key, "key00001");
    assert_non_null(strstr(e.message, "the whole tensor held by no connected rank"));
}

CASE(empty_shards_and_tensors_need_nobody)
{
    bool use[16];
    begin(16);
    world_key(&w, FANIN_DTYPE_BF16, 2, SHAPE(8, 64));
    world_key(&w, FANIN_DTYPE_BF16, 2, SHAPE(0, 64));
    hold_chunks(16, 0, 16, NULL);
    landing_whole(&l, &w, 0);
    p = plan_and_run();
    for (uint32_t r = 0; r < 16; r++) {
        assert_int_equal(p->ranks[r].n_pieces, r < 8);
        use[r] = r < 8;
    }
    assert_int_equal(p->tensors, 2);
    assert_false(p->has_replicas);
    assert_true(plan_sufficient(w.keys, w.sources, w.n_sources, use, NULL));
    use[7] = false;
    assert_false(plan_sufficient(w.keys, w.sources, w.n_sources, use, NULL));
}

static bool stop_now(void *cookie)
{
    (void)cookie;
    return true;
}

/* One rank holds a tensor in units, in no order. */
static void hold_units(uint32_t n_dims, uint64_t side)
{
    uint64_t shape[FANIN_MAX_DIMS], count = 1;
    for (uint32_t d = 0; d < n_dims; d++) {
        shape[d] = side;
        count *= side;
    }
    begin(1);
    world_key(&w, FANIN_DTYPE_U8, n_dims, shape);
    for (uint64_t i = 0; i < count; i++) {
        block b = {.n_dims = n_dims};
        uint64_t left = i * 40503 % count;
        for (uint32_t d = 0; d < n_dims; d++) {
            b.offset[d] = left % side;
            b.extent[d] = 1;
            left /= side;
        }
        world_hold(&w, 0, 0, &b, 0, 0, LAYOUT_PACKED);
    }
    world_seal(&w, NULL);
}

CASE(a_plan_stops_when_nobody_waits_for_it)
{
    fanin_error error = FANIN_ERROR_INIT;
    work_stop stop = {.fn = stop_now};
    hold_units(2, 128);
    landing_whole(&l, &w, 0);
    plan_rules rules = {.stop = &stop};
    assert_int_equal(plan_build(w.keys, w.sources, w.n_sources, NULL, 0, l.to_of_key,
                                &rules, &p, &error),
                     FANIN_ERR_TIMEOUT);
    assert_null(p);
    assert_true(stop.stopped);
    assert_non_null(strstr(error.message, "while the plan was made"));
    stop.stopped = false;
    bool use[] = {true};
    assert_false(plan_sufficient(w.keys, w.sources, w.n_sources, use, &rules));
    assert_true(plan_sufficient(w.keys, w.sources, w.n_sources, use, NULL));
}

/* A rank says that it holds more than there is memory for the pieces of. */
CASE(a_box_of_any_size_stops_as_well)
{
    const key_entry key = {.name = (char *)(uintptr_t) "w",
                           .dtype = FANIN_DTYPE_U8,
                           .n_dims = 1,
                           .shape = {UINT64_C(1) << 60}};
    const box_record whole = {.block = {.n_dims = 1, .extent = {key.shape[0]}},
                              .place = {.packed = true}};
    const uint64_t to_of_key[] = {0};
    buffer blob = {0};
    fanin_error error = FANIN_ERROR_INIT;
    key_table *keys;
    box_table *boxes;
    work_stop stop = {.fn = stop_now};
    const plan_rules rules = {.stop = &stop};
    key_table_encode(&blob, &key, 1, NULL, 0);
    assert_ok(key_table_decode(blob.data, blob.size, NULL, &keys, &error), error);
    buffer_free(&blob);
    box_table_encode(&blob, keys->entries, 1, &whole, 1, 0, 1);
    assert_ok(box_table_decode(blob.data, blob.size, keys, NULL, &boxes, &error),
              error);
    buffer_free(&blob);
    const plan_source source = {.boxes = boxes};
    assert_int_equal(
        plan_build(keys, &source, 1, NULL, 0, to_of_key, &rules, &p, &error),
        FANIN_ERR_TIMEOUT);
    assert_null(p);
    box_table_free(&boxes);
    key_table_free(&keys);
}

CASE(too_many_pieces_are_not_want_of_memory)
{
    fanin_error error = FANIN_ERROR_INIT;
    hold_units(8, 4);
    landing_whole(&l, &w, 0);
    assert_int_equal(world_plan(&w, &l, &p, &error), FANIN_ERR_LIMIT);
    assert_non_null(strstr(error.message, "is cut into 65536 different blocks"));
    assert_true(error.key[0]);
}

CASE(nothing_is_planned_from_nothing)
{
    begin(0);
    world_key(&w, FANIN_DTYPE_F64, 1, SHAPE(0));
    world_seal(&w, NULL);
    landing_whole(&l, &w, 0);
    p = plan_and_run();
    assert_int_equal(p->n_ranks, 0);
    assert_true(plan_sufficient(w.keys, w.sources, 0, NULL, NULL));
}

/* --------------------------------------------------------------- choice */

CASE(neighbouring_boxes_stay_together)
{
    begin(8);
    for (int i = 0; i < 100; i++)
        world_key(&w, FANIN_DTYPE_BF16, 2, SHAPE(i % 2 ? 16 : 40, 9));
    hold_chunks(8, 0, 4, NULL);
    landing_whole(&l, &w, 0);
    p = plan_and_run();
    assert_true(p->has_replicas);
    uint64_t box = 10 * 9 * 2;
    for (uint32_t r = 0; r < 8; r++) {
        const plan_rank *rank = &p->ranks[r];
        assert_in_range(rank->bytes, p->bytes / 8 - box, p->bytes / 8 + box);
        for (uint64_t i = 0; i < rank->n_pieces; i++) {
            assert_int_equal(rank->pieces[i].box, rank->pieces[0].box + i);
            assert_int_equal(rank->pieces[i].offset, 0);
            assert_int_equal(rank->pieces[i].view, 0);
        }
    }
}

/* Rank 0 holds everything, 1 and 2 a half each: a third for each of them. */
CASE(unequal_replicas_are_levelled)
{
    begin(3);
    for (uint32_t i = 0; i < 120; i++)
        world_key(&w, FANIN_DTYPE_U8, 2, SHAPE(10, 10));
    block all = rows(0, 10, 10);
    for (uint32_t i = 0; i < 120; i++) {
        world_hold(&w, 0, i, &all, 0, 0, LAYOUT_PACKED);
        world_hold(&w, i < 60 ? 1 : 2, i, &all, 0, 0, LAYOUT_PACKED);
    }
    world_seal(&w, NULL);
    landing_whole(&l, &w, 0);
    p = plan_and_run();
    for (int r = 0; r < 3; r++)
        assert_in_range(p->ranks[r].bytes, 3900, 4100);
}

/* Of 40 boxes rank 0 has all, rank 1 those from shared on. */
static void check_lone(uint32_t shared, uint64_t expected)
{
    begin(2);
    for (uint32_t i = 0; i < 40; i++)
        world_key(&w, FANIN_DTYPE_U8, 2, SHAPE(10, 10));
    block all = rows(0, 10, 10);
    for (uint32_t i = 0; i < 40; i++) {
        world_hold(&w, 0, i, &all, 0, 0, LAYOUT_PACKED);
        if (i >= shared)
            world_hold(&w, 1, i, &all, 0, 0, LAYOUT_PACKED);
    }
    world_seal(&w, NULL);
    landing_whole(&l, &w, 0);
    p = plan_and_run();
    assert_int_equal(p->ranks[0].bytes, expected);
    assert_int_equal(p->ranks[1].bytes, 4000 - expected);
    assert_true(p->has_replicas); /* rank 1 */
}

CASE(lone_boxes_count_as_load)
{
    check_lone(10, 2000);
    check_lone(30, 3000); /* then all that is shared comes from rank 1 */
}

/* -------------------------------------------------------------- landing */

CASE(long_boxes_become_several_pieces)
{
    begin(2);
    world_key(&w, FANIN_DTYPE_F64, 2, SHAPE(1060, 1012));
    world_key(&w, FANIN_DTYPE_F64, 1, SHAPE(PIECE_MAX / 8 + 3));
    for (uint32_t r = 0; r < 2; r++) {
        block part = {
            .n_dims = 2, .offset = {0, r * 1000}, .extent = {1060, r ? 12 : 1000}};
        world_hold(&w, r, 0, &part, 0, 0, LAYOUT_PACKED);
    }
    block line = {.n_dims = 1, .extent = {PIECE_MAX / 8 + 3}};
    world_hold(&w, 1, 1, &line, 0, 0, LAYOUT_PACKED);
    world_seal(&w, NULL);
    landing_whole(&l, &w, 0);
    p = plan_and_run();
    assert_int_equal(p->ranks[0].n_pieces, 3); /* 8.5 MB, by rows */
    assert_int_equal(p->ranks[0].pieces[0].length % 8000, 0);
    assert_int_equal(p->ranks[1].n_pieces, 1 + 2);
    span_rule rule = {.max_length = 1 << 20, .max_gap = 4096, .direct_from = 64 << 10};
    world_execute_spans(&w, &l, p, &rule);
}

CASE(equal_geometries_share_views)
{
    begin(4);
    for (uint32_t i = 0; i < 300; i++)
        world_key(&w, FANIN_DTYPE_BF16, 2, SHAPE(i % 2 ? 8 : 6, 32));
    hold_chunks(4, 1, 4, NULL);
    landing_whole(&l, &w, 0);
    p = plan_and_run();
    assert_int_equal(p->n_views, 2);
    for (int r = 0; r < 4; r++)
        assert_int_equal(p->ranks[r].n_pieces, 300);
}

/* Two tensors of one shape that are cut alike, and whose targets differ in one stride alone. */
CASE(targets_of_other_strides_share_nothing)
{
    static const int64_t strides[][2] = {{32, 4}, {32, 8}, {64, 8}};
    enum { COUNT = 3, ROWS = 16, ROOM = ROWS * 64 };
    begin(2);
    for (uint32_t i = 0; i < COUNT; i++)
        world_key(&w, FANIN_DTYPE_F32, 2, SHAPE(ROWS, 4));
    hold_chunks(2, 0, 2, NULL);
    block all = rows(0, ROWS, 4);
    for (uint32_t i = 0; i < COUNT; i++) {
        l.size = (uint64_t)i * ROOM;
        landing_add(&l, &w, i, &all, false);
        memcpy(l.targets[i].stride, strides[i], sizeof strides[i]);
    }
    l.size = COUNT * ROOM;
    l.bytes = realloc(l.bytes, l.size + 1);
    assert_non_null(l.bytes);
    p = plan_and_run();
}

/* One box, some columns of it wanted: one piece, read in how many ranges of what length? */
static void check_columns(uint64_t columns, uint64_t wanted, uint64_t count,
                          uint64_t length)
{
    begin(1);
    world_key(&w, FANIN_DTYPE_U8, 2, SHAPE(64, columns));
    hold_chunks(1, 0, 1, NULL);
    block b = {.n_dims = 2, .offset = {0, 3}, .extent = {64, wanted}};
    landing_add(&l, &w, 0, &b, false);
    p = plan_and_run();
    assert_int_equal(p->ranks[0].n_pieces, 1);
    assert_int_equal(p->ranks[0].bytes, 64 * wanted);
    const piece *only = &p->ranks[0].pieces[0];
    assert_int_equal(only->offset, 3);
    assert_int_equal(only->length, 63 * columns + wanted);
    piece_ranges ranges = piece_ranges_of(p, only);
    assert_int_equal(ranges.count, count);
    assert_int_equal(ranges.length, length);
    for (uint64_t i = 0; i < count; i++)
        assert_int_equal(piece_range_at(p, only, i), 3 + i * columns);
    assert_true(count == 1 || !ranges.landing); /* packed: one behind the other */
}

CASE(short_runs_are_read_along_with_gaps)
{
    check_columns(1024, 4, 1, 63 * 1024 + 4);
    check_columns(1024, 511, 1, 63 * 1024 + 511);
    check_columns(1024, 512, 64, 512); /* long enough for ranges of their own */
    check_columns(1023, 512, 1, 63 * 1023 + 512); /* a piece has a limit of ranges */
    check_columns(4100, 4, 1, 63 * 4100 + 4);
    check_columns(4101, 4, 64, 4); /* gaps too wide */
}

/* Tensor parallelism's columns of rows: pieces are as many as they would be of whole rows. */
CASE(columns_are_few_pieces)
{
    begin(1);
    world_key(&w, FANIN_DTYPE_U8, 2, SHAPE(8192, 1024));
    hold_chunks(1, 0, 1, NULL);
    block b = {.n_dims = 2, .offset = {0, 512}, .extent = {8192, 512}};
    landing_add(&l, &w, 0, &b, true);
    p = plan_and_run();
    assert_int_equal(p->ranks[0].n_pieces, 2); /* 8 MB */
    assert_int_equal(p->ranks[0].pieces[1].offset, PIECE_MAX + 512);
    assert_int_equal(piece_ranges_of(p, &p->ranks[0].pieces[0]).count, PIECE_RANGES);
    assert_int_equal(p->bytes, 4 << 20);
}

/* Neighbouring short runs joined over a gap stay short: the next gap is crossed too. */
CASE(gaps_are_crossed_in_several_dimensions)
{
    begin(1);
    world_key(&w, FANIN_DTYPE_U8, 3, SHAPE(50, 3, 700));
    hold_chunks(1, 0, 1, NULL);
    block b = {.n_dims = 3, .offset = {0, 0, 9}, .extent = {50, 2, 4}};
    landing_add(&l, &w, 0, &b, false);
    p = plan_and_run();
    assert_int_equal(p->ranks[0].n_pieces, 1);
    assert_int_equal(p->ranks[0].bytes, 50 * 2 * 4);
    assert_int_equal(piece_ranges_of(p, p->ranks[0].pieces).length, 49 * 2100 + 704);
}

CASE(targets_that_make_no_sense_are_refused)
{
    begin(1);
    world_key(&w, FANIN_DTYPE_F4, 2, SHAPE(4, 8));
    hold_chunks(1, 0, 1, NULL);
    block all = rows(0, 4, 8);
    landing_add(&l, &w, 0, &all, false);
    plan_target good = l.targets[0];

    l.targets[0].key = 1;
    refused(FANIN_ERR_ARGUMENT);
    l.targets[0] = good;
    l.targets[0].block.n_dims = 1;
    refused(FANIN_ERR_ARGUMENT);
    l.targets[0] = good;
    l.targets[0].block.offset[0] = UINT64_MAX;
    fanin_error e = refused(FANIN_ERR_ARGUMENT);
    assert_string_equal(e.key, "key00000");
    assert_non_null(strstr(e.message, "outside"));
    l.targets[0] = good;
    l.targets[0].block.extent[1] = 3; /* one byte and a half */
    e = refused(FANIN_ERR_ARGUMENT);
    assert_non_null(strstr(e.message, "whole bytes"));
    l.targets[0] = good;
    p = plan_and_run();
    l.n_targets = 0; /* and no to_of_key */
    refused(FANIN_ERR_ARGUMENT);
}
