/* SPDX-License-Identifier: Apache-2.0 */
/* Which plans of a publication stay: those of destinations that are filled in turn, unless they are
   large. Plans are empty here, and made by nobody. */
#include "pull/plan_cache.h"

#include "testing.h"

#define SMALL (UINT64_C(1) << 30)
#define LARGE (UINT64_C(5) << 30)

static digest layout_of(void *cookie)
{
    return digest_of(cookie, 1);
}

/* The place of the plan for the memory of that name. */
static plan_cache *at(publication *p, char name)
{
    const destination d = {.cookie = &name, .layout = layout_of};
    return plan_cache_of(p, &d);
}

/* As plan_cache_make() leaves it; plan_cache_drop() ends it. */
static plan_cache *made(publication *p, char name, uint64_t bytes)
{
    plan_cache *c = at(p, name);
    assert_false(c->valid);
    c->whole.plan.plan = calloc(1, sizeof *c->whole.plan.plan);
    assert_non_null(c->whole.plan.plan);
    c->whole.plan.plan->bytes = bytes;
    c->layout = layout_of(&name);
    c->valid = true;
    return c;
}

static void forget(publication *p)
{
    plan_cache_drop(p);
    free(p->plans);
}

TEST(three_in_turn_stay)
{
    publication p = {0};
    plan_cache *a = made(&p, 'a', SMALL), *b = made(&p, 'b', SMALL),
               *c = made(&p, 'c', SMALL);
    assert_true(a != b && b != c && a != c);
    for (int turn = 0; turn < 3; turn++) {
        assert_ptr_equal(at(&p, 'a'), a);
        assert_ptr_equal(at(&p, 'b'), b);
        assert_ptr_equal(at(&p, 'c'), c);
        assert_true(a->valid && b->valid && c->valid);
    }
    forget(&p);
}

TEST(a_fourth_has_the_place_of_the_one_used_longest_ago)
{
    publication p = {0};
    plan_cache *a = made(&p, 'a', SMALL), *b = made(&p, 'b', SMALL);
    made(&p, 'c', SMALL);
    at(&p, 'a');
    assert_ptr_equal(at(&p, 'd'), b);
    at(&p, 'c');
    assert_ptr_equal(at(&p, 'e'), a);
    forget(&p);
}

TEST(a_directory_has_one_of_its_own)
{
    publication p = {0};
    const destination d = {.directory = true};
    plan_cache *a = made(&p, 'a', SMALL), *directory = plan_cache_of(&p, &d);
    assert_ptr_not_equal(directory, a);
    made(&p, 'b', SMALL);
    made(&p, 'c', LARGE);
    assert_ptr_equal(plan_cache_of(&p, &d), directory);
    assert_true(at(&p, 'c')->valid);
    forget(&p);
}

TEST(a_large_one_leaves_for_any_other)
{
    publication p = {0};
    plan_cache *a = made(&p, 'a', LARGE);
    assert_ptr_equal(at(&p, 'a'), a);
    assert_true(a->valid);
    plan_cache *b = made(&p, 'b', SMALL);
    assert_false(a->valid);
    made(&p, 'c', LARGE);
    assert_true(b->valid && at(&p, 'c')->valid);
    at(&p, 'b');
    assert_true(b->valid);
    assert_false(at(&p, 'c')->valid);
    forget(&p);
}
