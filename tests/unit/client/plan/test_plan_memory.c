/* SPDX-License-Identifier: Apache-2.0 */
/* Each allocation of the planner fails once: FANIN_ERR_MEMORY, nothing leaks (run under
   AddressSanitizer or valgrind for that). Linked with --wrap. */
#include "failing_memory.h"
#include "plan_world.h"
#include "testing.h"

/* HSDP on columns, so that there are classes, views and several pieces; one tensor more
   makes the tables explicit. */
static void make_world(world *w, bool explicit)
{
    const uint64_t shape[] = {20, 16};
    world_init(w, 8, 1);
    for (int i = 0; i < 5; i++)
        world_key(w, FANIN_DTYPE_BF16, 2, shape);
    if (explicit)
        world_key(w, FANIN_DTYPE_BF16, 0, NULL);
    for (uint32_t r = 0; r < 8; r++)
        for (uint32_t key = 0; key < w->n_keys; key++) {
            block b = {.n_dims = 2, .offset = {0, r % 4 * 4}, .extent = {20, 4}};
            if (w->entries[key].n_dims == 0)
                b = (block){0};
            world_hold(w, r, key, &b, r % 2, 0, key % 2 ? LAYOUT_PACKED : LAYOUT_ROWS);
        }
    world_seal(w, NULL);
}

static void add_slices(world *w, landing *l)
{
    *l = (landing){0};
    for (uint32_t key = 0; key < 5; key++) {
        block b = {.n_dims = 2, .offset = {key, 3}, .extent = {7, 9}};
        landing_add(l, w, key, &b, true);
    }
}

static void check_plans(const world *w, landing *l)
{
    long calls = 0;
    fanin_status status = FANIN_ERR_MEMORY;
    plan *p = NULL;
    for (; status != FANIN_OK; calls++) {
        fanin_error error = FANIN_ERROR_INIT;
        assert_true(calls < 1000);
        failing_memory_start(calls, false);
        status = world_plan(w, l, &p, &error);
        bool failed = failing_memory_stop();
        if (status != FANIN_OK) {
            assert_true(failed);
            assert_int_equal(status, FANIN_ERR_MEMORY);
            assert_int_equal(error.status, FANIN_ERR_MEMORY);
            assert_null(p);
        }
    }
    assert_true(calls > 10);
    world_execute(w, l, p);

    region_entry entries[WORLD_REGIONS] = {{.length = 1 << 20}, {.length = 1 << 20}};
    region_table regions = {.entries = entries, .count = 2};
    span_rule rule = {.max_length = 100, .max_gap = 4, .direct_from = 8};
    plan_spans *spans = NULL;
    status = FANIN_ERR_MEMORY;
    for (calls = 0; status != FANIN_OK; calls++) {
        assert_true(calls < 1000);
        failing_memory_start(calls, false);
        status = plan_spans_build(p, w->keys, w->sources, 0, &regions, &rule, NULL,
                                  &spans, NULL);
        failing_memory_stop();
        assert_true(status == FANIN_OK || (status == FANIN_ERR_MEMORY && !spans));
    }
    assert_true(calls > 4);
    plan_spans_free(&spans);
    plan_free(&p);
    landing_free(l);
}

TEST(every_allocation_may_fail)
{
    for (int explicit = 0; explicit < 2; explicit ++) {
        world w;
        landing l;
        make_world(&w, explicit);
        landing_whole(&l, &w, 0);
        check_plans(&w, &l);
        add_slices(&w, &l);
        check_plans(&w, &l);
        bool use[8];
        memset(use, true, sizeof use);
        bool enough = false;
        for (long calls = 0; !enough; calls++) {
            assert_true(calls < 1000);
            failing_memory_start(calls, false);
            enough = plan_sufficient(w.keys, w.sources, 8, use, NULL);
            failing_memory_stop();
        }
        world_free(&w);
    }
}
