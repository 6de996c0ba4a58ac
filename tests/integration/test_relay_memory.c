/* SPDX-License-Identifier: Apache-2.0 */
/* Allocations of the thread that pulls fail, one after the other: it has the step without what it
   had no memory for, or says so and blames nobody else, and the next pull works. */
#include "failing_memory.h"
#include "relay_readers.h"
#include "testing.h"

#define CALLS_MOST 5000

static world w;
static reader rich, poor;

static int tear_down(void **state)
{
    (void)failing_memory_stop();
    relay_reader_close(&rich);
    relay_reader_close(&poor);
    world_stop(&w);
    return 0;
}

#define CASE(name) TEST_WITH(name, NULL, tear_down)

/* With @p all_after also those behind it. */
static bool check(long calls, bool all_after)
{
    relay_reader_open(&poor, 0);
    failing_memory_start(calls, all_after);
    fanin_status status = relay_pull(&poor);
    bool failed = failing_memory_stop();
    if (status != FANIN_OK && (status != FANIN_ERR_MEMORY || !failed))
        fail_msg("allocation %ld: %s: %s", calls, fanin_status_name(status),
                 poor.error.message);
    if (status == FANIN_OK)
        check_bytes(&poor, 1);
    else
        expect_pull(&poor, 1);
    relay_reader_close(&poor);
    return failed;
}

static void check_all(long step, bool all_after)
{
    long calls = 0;
    world_begin(&w, 2, CUT_CHUNK0, 1);
    w.n_tensors = 2;
    ways_reset(&w);
    relay_reader_open(&rich, 0);
    expect_pull(&rich, 1);
    while (check(calls, all_after)) {
        calls += step;
        assert_true(calls < CALLS_MOST);
    }
    assert_true(calls > 100);
}

CASE(a_single_failure_blames_nobody)
{
    check_all(1, false);
}

CASE(without_memory_a_relay_recovers)
{
    check_all(5, true);
}
