/* SPDX-License-Identifier: Apache-2.0 */
/** @file A fleet of readers, each with its scheduler, on simulated links: how long a step takes. */
#include "fleet.h"
#include "testing.h"

#define READERS 16

static fleet_result run(fleet_options o)
{
    fleet_result r = {0};
    o.readers = READERS;
    assert_true(fleet_run(&o, &r));
    return r;
}

TEST(a_fleet_has_a_step_in_the_time_of_one_pull_and_reads_the_trainer_once)
{
    fleet_result r = run(fleet_defaults());
    assert_true(r.times < 1.15);
    assert_true(r.models > 0.99 && r.models < 1.05);
}

/* The model is of use: it tells a fleet that shares badly. */
TEST(one_sending_thread_a_relay_leaves_links_idle)
{
    fleet_options o = fleet_defaults();
    o.threads = 1;
    assert_true(run(o).times > 1.5);
}

TEST(others_take_over_what_a_dead_or_silent_reader_was_to_bring)
{
    fleet_options o = fleet_defaults();
    o.unit_s = 0.05;
    o.dead = 3;
    assert_true(run(o).times < 1.15);
    o.dead = FLEET_NOBODY;
    o.silent = 3;
    o.units =
        1024; /* it owes many, which the others are not to take all at the same time */
    fleet_result r = run(o);
    assert_true(r.times < 1.15);
    assert_true(r.models < 1.05);
}

TEST(a_slow_uplink_slows_nobody_else_for_long)
{
    fleet_options o = fleet_defaults();
    o.unit_s = 0.05;
    o.slow = 3;
    fleet_result r = run(o);
    assert_true(r.times < 1.4);
    assert_true(r.models < 1.2);
}

TEST(who_comes_late_has_the_step_in_the_time_of_one_pull)
{
    fleet_options o = fleet_defaults();
    o.late = 3;
    fleet_result r = run(o);
    assert_true(r.late < 1.1);
    assert_true(r.models < 1.05);
}

/* Four racks of four, whose links carry half of what their readers can. */
static fleet_options tight_racks(void)
{
    fleet_options o = fleet_defaults();
    o.rack = 4;
    o.spine = 2;
    o.unit_s = 0.05;
    o.ticks = 8;
    return o;
}

TEST(a_unit_comes_to_each_rack_once)
{
    fleet_options o = tight_racks();
    assert_true(run(o).times < 1.15);
    o.unsaid = 1;
    assert_true(run(o).times > 1.4);
}

TEST(a_rack_does_without_one_that_is_slow_or_lost)
{
    fleet_options o = tight_racks();
    o.dead = 3;
    assert_true(run(o).times < 1.5);
    o.dead = FLEET_NOBODY;
    o.silent = 3;
    assert_true(run(o).times < 1.5);
    o.silent = FLEET_NOBODY;
    o.slow = 3;
    assert_true(run(o).times < 1.5);
}
