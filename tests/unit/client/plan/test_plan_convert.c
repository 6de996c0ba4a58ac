/* SPDX-License-Identifier: Apache-2.0 */
/* Plans that convert F32 on the way: what the random model does not single out. */
#include "convert.h"
#include "plan_world.h"
#include "testing.h"

static const uint64_t shape[] = {8, 6};
static const span_rule rule = {.max_length = 4096, .max_gap = 64, .direct_from = 32};

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

/* Two tensors that are cut alike, of one element size; of them, one is converted. */
static void make_alike(void)
{
    world_init(&w, 2, 7);
    world_key(&w, FANIN_DTYPE_F32, 2, shape);
    world_key(&w, FANIN_DTYPE_I32, 2, shape);
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

static void execute(void)
{
    world_execute(&w, &l, p);
    world_execute_spans(&w, &l, p, &rule);
}

CASE(only_f32_is_converted)
{
    make_alike();
    land_whole(FANIN_DTYPE_BF16);
    make_plan();
    /* Contiguous on both sides, and a view nevertheless: it says what becomes of the bytes. */
    assert_int_equal(p->n_views, 1);
    assert_int_equal(p->views[0].n_dims, 0);
    assert_int_equal(p->views[0].run, 4 * 6 * 4);
    assert_int_equal(p->views[0].convert, CONVERT_F32_BF16);
    for (size_t s = 0; s < 2; s++) {
        assert_int_equal(p->ranks[s].n_pieces, 2);
        assert_int_equal(p->ranks[s].pieces[0].view, 1);
        assert_int_equal(p->ranks[s].pieces[0].to, s * 4 * 6 * 2);
        assert_int_equal(p->ranks[s].pieces[1].view, 0);
        assert_int_equal(p->ranks[s].bytes, 2 * 4 * 6 * 4);
    }
    assert_int_equal(p->bytes, 2 * 8 * 6 * 4);
    execute();
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
    assert_int_equal(plan_spans_build(p, w.keys, w.sources, 0, &regions, &rule, NULL,
                                      &spans, &error),
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

/* A slice of columns into rows that lie backwards in the destination: strides are the
   destination's bytes, starts may be odd. */
CASE(strides_are_those_of_the_destination)
{
    make_alike();
    for (int backwards = 0; backwards < 2; backwards++) {
        landing_free(&l);
        landing_init(&l, FANIN_DTYPE_BF16);
        for (uint32_t key = 0; key < 2; key++) {
            block b = {.n_dims = 2, .offset = {1, 2}, .extent = {6, 3}};
            landing_add(&l, &w, key, &b, false);
        }
        /* Rows of 3 elements of 2 bytes, 7 bytes from one to the next. */
        plan_target *t = &l.targets[0];
        uint64_t room = 5 * 7 + 3 * 2;
        t->stride[0] = backwards ? -7 : 7;
        t->stride[1] = 2;
        t->to = backwards ? 5 * 7 + 1 : 1;
        l.targets[1].to = room + 1;
        l.size = l.targets[1].to + 6 * 3 * 4;
        l.bytes = realloc(l.bytes, l.size + 1);
        assert_non_null(l.bytes);
        make_plan();
        assert_true(p->n_views >= 1);
        execute();
    }
}

/* One tensor, wanted rounded and, beside it, as it is. */
CASE(what_is_wanted_as_f32_stays)
{
    block all = {.n_dims = 2, .extent = {8, 6}};
    make_alike();
    landing_init(&l, FANIN_DTYPE_BF16);
    landing_add(&l, &w, 0, &all, false);
    l.as_is = true;
    landing_add(&l, &w, 0, &all, false);
    make_plan();
    uint64_t rounded = 0, as_is = 0;
    for (size_t s = 0; s < 2; s++)
        for (uint64_t i = 0; i < p->ranks[s].n_pieces; i++) {
            uint32_t view = p->ranks[s].pieces[i].view;
            bool converts = view && p->views[view - 1].convert == CONVERT_F32_BF16;
            *(converts ? &rounded : &as_is) += p->ranks[s].pieces[i].length;
        }
    assert_int_equal(rounded, 8 * 6 * 4);
    assert_int_equal(as_is, 8 * 6 * 4);
    execute();
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
