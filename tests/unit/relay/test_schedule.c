/* SPDX-License-Identifier: Apache-2.0 */
/** @file The scheduler on a clock of the test's: who is asked for what, and who is late. */
#include "schedule.h"
#include "testing.h"

#define UNITS 64
#define READERS 9
#define MS UINT64_C(1000000)
#define S (1000 * MS)

typedef struct scene {
    uint64_t sizes[UNITS], now;
    member self, other, third;
    unit_run asked[READERS]; /* of each source, the last time */
    schedule *schedule;
} scene;

static int set_up(void **state)
{
    scene *x = calloc(1, sizeof *x);
    for (size_t i = 0; i < UNITS; i++)
        x->sizes[i] = 1000;
    memset(x->self.id, 1, sizeof x->self.id);
    memset(x->other.id, 2, sizeof x->other.id);
    memset(x->third.id, 3, sizeof x->third.id);
    x->now = 1000 * S;
    x->schedule = schedule_create(x->sizes, UNITS, &x->self, x->now);
    assert_non_null(x->schedule);
    *state = x;
    return 0;
}

static int tear_down(void **state)
{
    scene *x = *state;
    schedule_free(x->schedule);
    free(x);
    return 0;
}

static size_t next_unit(scene *x, size_t source)
{
    unit_run *run = &x->asked[source];
    uint64_t wake;
    if (schedule_next(x->schedule, source, 1, run, 1, x->now, &wake) == 0)
        return UNITS;
    assert_int_equal(run->count, 1);
    return run->first;
}

static void prove(schedule *s, size_t source, const unit_run *run, uint64_t now)
{
    schedule_read(s, source, run, 1, now);
    schedule_confirmed(s, source, run, 1, now);
}

/* What it was asked for the last time. */
static void bring(scene *x, size_t source)
{
    prove(x->schedule, source, &x->asked[source], x->now);
}

/* How many units the source brings until it is asked for nothing, each in @p ns. */
static size_t drain(scene *x, size_t source, uint64_t ns)
{
    size_t n = 0;
    while (next_unit(x, source) < UNITS) {
        x->now += ns;
        bring(x, source);
        n++;
    }
    return n;
}

TEST_WITH(who_is_alone_reads_runs_of_the_trainer, set_up, tear_down)
{
    scene *x = *state;
    unit_run runs[4];
    uint64_t wake;
    assert_int_equal(schedule_next(x->schedule, 0, 10000, runs, 4, x->now, &wake), 1);
    assert_int_equal(runs[0].first, 0);
    assert_int_equal(runs[0].count, 10);
    prove(x->schedule, 0, &runs[0], x->now);
    assert_int_equal(schedule_left(x->schedule), UNITS - 10);
    assert_int_equal(drain(x, 0, MS), UNITS - 10);
    assert_int_equal(schedule_left(x->schedule), 0);
}

TEST_WITH(the_trainer_is_asked_for_the_own_duty_alone, set_up, tear_down)
{
    scene *x = *state;
    member list[] = {x->other, x->self};
    assert_true(schedule_list(x->schedule, list, 2, x->now));
    assert_int_equal(drain(x, 0, MS), UNITS / 2);
    size_t other = schedule_join(x->schedule, &x->other, NEAR_SITE);
    assert_int_not_equal(other, 0);
    assert_int_equal(next_unit(x, other), UNITS);
    for (size_t u = 0; u < UNITS; u++)
        schedule_has(x->schedule, other, u, false, x->now);
    assert_true(schedule_without_origin(x->schedule));
    assert_int_equal(drain(x, other, MS), UNITS / 2);
    assert_int_equal(schedule_left(x->schedule), 0);
    assert_int_equal(schedule_get_counts(x->schedule).taken_over, 0);
}

TEST_WITH(what_a_holder_has_is_not_asked_of_the_trainer, set_up, tear_down)
{
    scene *x = *state;
    size_t other = schedule_join(x->schedule, &x->other, NEAR_SITE);
    for (size_t u = 0; u < UNITS; u += 2)
        schedule_has(x->schedule, other, u, true, x->now);
    assert_int_equal(drain(x, 0, MS), UNITS / 2);
    schedule_leave(x->schedule,
                   other); /* and without it the trainer is the last source */
    assert_int_equal(drain(x, 0, MS), UNITS / 2);
}

TEST_WITH(what_a_holder_offers_is_neither_here_nor_asked_for, set_up, tear_down)
{
    scene *x = *state;
    unit_run runs[UNITS];
    uint64_t wake;
    bool rest;
    size_t other = schedule_join(x->schedule, &x->other, NEAR_SITE);
    assert_int_equal(schedule_offered(x->schedule, other, &rest), 0);
    assert_false(rest);
    for (size_t u = 0; u < UNITS; u += 2)
        schedule_has(x->schedule, other, u, true, x->now);
    assert_int_equal(schedule_offered(x->schedule, other, &rest), UNITS / 2 * 1000);
    assert_false(rest);
    size_t n = schedule_next(x->schedule, other, 10000, runs, UNITS, x->now, &wake);
    assert_int_equal(n, 10);
    for (size_t i = 1; i < n; i++)
        assert_true(runs[i - 1].first < runs[i].first);
    assert_int_equal(schedule_offered(x->schedule, other, &rest),
                     (UNITS / 2 - 10) * 1000);
    schedule_return(x->schedule, other);
    assert_int_equal(drain(x, 0, MS), UNITS / 2);
    assert_int_equal(schedule_offered(x->schedule, other, &rest), UNITS / 2 * 1000);
    assert_true(rest);
    assert_int_equal(drain(x, other, MS), UNITS / 2);
    assert_int_equal(schedule_offered(x->schedule, other, &rest), 0);
}

TEST_WITH(the_rarest_comes_first, set_up, tear_down)
{
    scene *x = *state;
    size_t other = schedule_join(x->schedule, &x->other, NEAR_SITE);
    size_t third = schedule_join(x->schedule, &x->third, NEAR_SITE);
    for (size_t u = 0; u < UNITS; u++) {
        schedule_has(x->schedule, other, u, true, x->now);
        if (u != 37)
            schedule_has(x->schedule, third, u, true, x->now);
    }
    assert_int_equal(next_unit(x, other), 37);
}

TEST_WITH(a_unit_is_asked_of_one_source, set_up, tear_down)
{
    scene *x = *state;
    size_t other = schedule_join(x->schedule, &x->other, NEAR_SITE);
    size_t third = schedule_join(x->schedule, &x->third, NEAR_SITE);
    schedule_has(x->schedule, other, 5, true, x->now);
    schedule_has(x->schedule, third, 5, true, x->now);
    assert_int_equal(next_unit(x, other), 5);
    assert_int_equal(next_unit(x, third), UNITS);
    schedule_failed(x->schedule, other, x->now);
    assert_int_equal(next_unit(x, other), UNITS); /* it says anew what it has */
    assert_int_equal(next_unit(x, third), 5);
}

TEST_WITH(a_late_holder_is_broken_off_for_another, set_up, tear_down)
{
    scene *x = *state;
    size_t other = schedule_join(x->schedule, &x->other, NEAR_SITE);
    size_t third = schedule_join(x->schedule, &x->third, NEAR_SITE);
    for (size_t u = 0; u < 9; u++)
        schedule_has(x->schedule, other, u, true, x->now);
    for (size_t i = 0; i < 8; i++) {
        next_unit(x, other);
        x->now += S;
        bring(x, other);
    }
    size_t unit = next_unit(x, other);
    x->now += 4 * S;
    member list[] = {x->other, x->third};
    assert_true(schedule_list(x->schedule, list, 2, x->now));
    schedule_has(x->schedule, third, unit, true, x->now);
    assert_true(schedule_break_off(x->schedule, other, x->now));
    assert_false(schedule_break_off(x->schedule, other, x->now)); /* told once */
    schedule_failed(x->schedule, other, x->now);
    assert_int_equal(next_unit(x, third), unit);
    assert_int_equal(schedule_get_counts(x->schedule).late, 1);
}

TEST_WITH(who_is_silent_from_the_first_is_late_too, set_up, tear_down)
{
    scene *x = *state;
    size_t other = schedule_join(x->schedule, &x->other, NEAR_SITE);
    member list[] = {x->other};
    assert_true(schedule_list(x->schedule, list, 1, x->now));
    for (size_t u = 0; u < UNITS; u++)
        schedule_has(x->schedule, other, u, true, x->now);
    next_unit(x, other);
    x->now += S - MS;
    assert_false(schedule_break_off(x->schedule, other, x->now));
    x->now += 3 * S;
    assert_true(schedule_break_off(x->schedule, other, x->now));
    schedule_failed(x->schedule, other, x->now);
    assert_int_equal(drain(x, 0, MS) > 0, 1);
}

/* It is read nearly all the time; but not one that owes as long. */
static void expect_broken_off_beside_the_trainer(scene *x, uint64_t before,
                                                 uint64_t after, bool broken)
{
    size_t other = schedule_join(x->schedule, &x->other, NEAR_SITE);
    member list[] = {x->other};
    assert_true(schedule_list(x->schedule, list, 1, x->now));
    for (size_t u = 0; u < UNITS / 2; u++)
        schedule_has(x->schedule, other, u, true, x->now);
    next_unit(x, other);
    x->now += before;
    assert_true(next_unit(x, 0) < UNITS);
    x->now += after;
    assert_int_equal(schedule_break_off(x->schedule, other, x->now), broken);
}

TEST_WITH(a_trainer_that_is_being_read_takes_over, set_up, tear_down)
{
    expect_broken_off_beside_the_trainer(*state, 4 * S, MS, true);
}

TEST_WITH(a_trainer_that_owes_as_long_takes_nothing_over, set_up, tear_down)
{
    expect_broken_off_beside_the_trainer(*state, 0, 4 * S, false);
}

TEST_WITH(for_a_trainer_that_brings_nothing_nobody_is_broken_off, set_up, tear_down)
{
    scene *x = *state;
    size_t other = schedule_join(x->schedule, &x->other, NEAR_SITE);
    size_t third = schedule_join(x->schedule, &x->third, NEAR_SITE);
    member list[] = {x->other, x->third};
    assert_true(schedule_list(x->schedule, list, 2, x->now));
    for (size_t u = 0; u < UNITS; u++)
        schedule_has(x->schedule, other, u, true, x->now);
    schedule_without_trainer(x->schedule);
    size_t unit = next_unit(x, other);
    x->now += 30 * S;
    assert_false(schedule_break_off(x->schedule, other, x->now));
    schedule_has(x->schedule, third, unit, true, x->now); /* but for another holder */
    assert_true(schedule_break_off(x->schedule, other, x->now));
}

TEST_WITH(nothing_is_late_before_three_times_the_usual, set_up, tear_down)
{
    scene *x = *state;
    size_t other = schedule_join(x->schedule, &x->other, NEAR_SITE);
    size_t third = schedule_join(x->schedule, &x->third, NEAR_SITE);
    for (size_t u = 0; u < 2; u++) {
        schedule_has(x->schedule, other, u, true, x->now);
        schedule_has(x->schedule, third, u, true, x->now);
    }
    next_unit(x, other);
    x->now += S;
    bring(x, other);
    next_unit(x, other);
    x->now += 3 * S;
    assert_false(schedule_break_off(x->schedule, other, x->now));
    x->now += S;
    assert_true(schedule_break_off(x->schedule, other, x->now));
}

/* An owner that reads many units at a time is silent meanwhile. */
TEST_WITH(a_duty_that_comes_in_batches_is_waited_for, set_up, tear_down)
{
    scene *x = *state;
    member list[] = {x->other};
    assert_true(schedule_list(x->schedule, list, 1, x->now));
    size_t other = schedule_join(x->schedule, &x->other, NEAR_SITE), left = 16;
    assert_int_equal(drain(x, 0, MS), UNITS / 2);
    x->now += 4 * S;
    for (size_t u = 0; u < UNITS && left > 0; u++) { /* what is here is not counted */
        schedule_has(x->schedule, other, u, false, x->now);
        left -= next_unit(x, other) < UNITS;
    }
    x->now += 4 * S;
    assert_int_equal(next_unit(x, 0), UNITS);
    x->now += 20 * S;
    assert_in_range(next_unit(x, 0), 0, UNITS - 1);
}

/* Everybody takes what the trainer is to be asked for, and all hear of it. How many units. */
static size_t take_turns(schedule *all[READERS], uint64_t now)
{
    size_t taken = 0;
    for (size_t i = 1; i < READERS; i++) {
        unit_run run;
        uint64_t wake;
        if (schedule_next(all[i], 0, 1, &run, 1, now, &wake) == 0)
            continue;
        prove(all[i], 0, &run, now);
        taken++;
        for (size_t j = 1; j < READERS; j++)
            if (j != i)
                schedule_has(all[j], i < j ? i : i - 1, run.first, false, now);
    }
    return taken;
}

/* The first of nine readers is in the list and brings nothing. */
TEST_WITH(a_late_duty_falls_to_the_next_and_is_read_once, set_up, tear_down)
{
    scene *x = *state;
    member list[READERS];
    schedule *all[READERS];
    for (size_t i = 0; i < READERS; i++)
        memset(list[i].id, (int)(10 + i), sizeof list[i].id);
    for (size_t i = 1; i < READERS; i++) {
        all[i] = schedule_create(x->sizes, UNITS, &list[i], x->now);
        assert_true(schedule_list(all[i], list, READERS, x->now));
        for (size_t j = 1; j < READERS; j++)
            assert_true(j == i || schedule_join(all[i], &list[j], NEAR_SITE) > 0);
    }
    size_t taken = 0, early = 0, seconds = 0;
    for (; taken < UNITS && seconds < 100; seconds++) {
        taken += take_turns(all, x->now + seconds * S);
        if (seconds == 5)
            early = taken;
    }
    assert_in_range(early, 8 * 5, UNITS - UNITS / READERS);
    assert_int_equal(taken, UNITS);
    assert_in_range(seconds, 9, 30); /* nobody waits for it for long */
    assert_int_equal(take_turns(all, x->now + 100 * S), 0);
    for (size_t i = 1; i < READERS; i++)
        schedule_free(all[i]);
}

/* The source says that it has the next of the units that the member @p who owns. */
static void bring_next(scene *x, size_t source, const uint32_t *owner, size_t who,
                       size_t *at)
{
    while (*at < UNITS && owner[*at] != who)
        ++*at;
    schedule_has(x->schedule, source, (*at)++, false, x->now);
}

/* Else a silent owner would seem to bring what a third one gets otherwise. */
TEST_WITH(who_is_dealt_nothing_brings_no_duties, set_up, tear_down)
{
    scene *x = *state;
    member list[] = {x->self, x->other};
    uint32_t owner[UNITS], load[2];
    assert_true(schedule_list(x->schedule, list, 2, x->now));
    duty_deal(list, 2, owner, UNITS, load);
    assert_int_equal(drain(x, 0, MS), UNITS / 2);
    size_t third = schedule_join(x->schedule, &x->third, NEAR_SITE);
    for (size_t i = 0, at = 0; i < UNITS / 4; i++) {
        x->now += 200 * MS;
        bring_next(x, third, owner, 1, &at);
    }
    assert_int_equal(drain(x, third, MS), UNITS / 4);
    assert_in_range(next_unit(x, 0), 0, UNITS - 1);
}

/* An owner that goes on, ten times more slowly than the others: they do not wait for its end. */
TEST_WITH(a_slow_owner_is_helped_out, set_up, tear_down)
{
    scene *x = *state;
    member list[] = {x->self, x->other, x->third};
    uint32_t owner[UNITS], load[3];
    size_t at_slow = 0, at_third = 0, seconds = 0;
    duty_deal(list, 3, owner, UNITS, load);
    assert_true(schedule_list(x->schedule, list, 3, x->now));
    size_t slow = schedule_join(x->schedule, &x->other, NEAR_SITE);
    size_t third = schedule_join(x->schedule, &x->third, NEAR_SITE);
    for (; schedule_left(x->schedule) > 0 && seconds < 300; seconds++) {
        x->now += S;
        bring_next(x, third, owner, 2, &at_third);
        if (seconds % 10 == 9)
            bring_next(x, slow, owner, 1, &at_slow);
        for (size_t i = 0; i < 3; i++)
            if (next_unit(x, (size_t[]){0, slow, third}[i]) < UNITS)
                bring(x, (size_t[]){0, slow, third}[i]);
    }
    assert_in_range(seconds, UNITS / 3, 90); /* the slow one would take 210 */
}

TEST_WITH(a_holder_that_fails_is_left_alone_for_longer_each_time, set_up, tear_down)
{
    scene *x = *state;
    size_t other = schedule_join(x->schedule, &x->other, NEAR_SITE);
    uint64_t last = 0;
    for (size_t i = 0; i < 4; i++) {
        schedule_has(x->schedule, other, 3, true, x->now);
        assert_int_equal(next_unit(x, other), 3);
        schedule_failed(x->schedule, other, x->now);
        schedule_has(x->schedule, other, 3, true, x->now);
        unit_run run;
        uint64_t wake;
        assert_int_equal(schedule_next(x->schedule, other, 1, &run, 1, x->now, &wake),
                         0);
        assert_true(wake - x->now > last);
        last = wake - x->now;
        x->now = wake;
    }
}

static void list_all(scene *x)
{
    member list[] = {x->self, x->other, x->third};
    assert_true(schedule_list(x->schedule, list, 3, x->now));
}

static void has_all(scene *x, size_t source)
{
    for (size_t u = 0; u < UNITS; u++)
        schedule_has(x->schedule, source, u, true, x->now);
}

TEST_WITH(of_those_that_are_near_one_brings_a_unit, set_up, tear_down)
{
    scene *x = *state;
    list_all(x);
    size_t near = schedule_join(x->schedule, &x->other, NEAR_RACK);
    size_t far = schedule_join(x->schedule, &x->third, NEAR_SITE);
    has_all(x, far);
    assert_int_equal(drain(x, far, MS / 100), UNITS / 2);
    has_all(x, near); /* and what a near one has is asked of it alone */
    assert_int_equal(next_unit(x, far), UNITS);
    assert_int_equal(drain(x, near, MS / 100), UNITS / 2);
    assert_int_equal(schedule_left(x->schedule), 0);
}

TEST_WITH(a_near_one_that_brings_nothing_is_not_waited_for, set_up, tear_down)
{
    scene *x = *state;
    unit_run run;
    uint64_t wake;
    list_all(x);
    (void)schedule_join(x->schedule, &x->other, NEAR_RACK);
    size_t far = schedule_join(x->schedule, &x->third, NEAR_SITE);
    has_all(x, far);
    assert_int_equal(drain(x, far, MS / 100), UNITS / 2);
    assert_int_equal(schedule_next(x->schedule, far, 1, &run, 1, x->now, &wake), 0);
    assert_true(wake <= x->now + 20 * MS);
    x->now += 2 * S;
    assert_int_equal(drain(x, far, MS / 100), UNITS / 2);
}

TEST_WITH(one_that_has_failed_is_near_no_more, set_up, tear_down)
{
    scene *x = *state;
    list_all(x);
    size_t near = schedule_join(x->schedule, &x->other, NEAR_HOST);
    size_t far = schedule_join(x->schedule, &x->third, NEAR_SITE);
    has_all(x, far);
    has_all(x, near);
    assert_int_equal(next_unit(x, far), UNITS);
    schedule_failed(x->schedule, near, x->now);
    has_all(x, near);
    assert_int_equal(drain(x, far, MS / 100), UNITS);
}
