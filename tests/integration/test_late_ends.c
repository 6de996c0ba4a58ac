/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that another thread tells of a pull's end: whatever the caller does next, no lease stays,
   and nothing is out of order. */
#include "ends.h"
#include "local_world.h"
#include "testing.h"
#include "thread.h"
#include <sys/wait.h>
#include <unistd.h>

#define RANKS 5
#define PULLS 60
#define LEASE_MS 60000 /* who has to wait for it is seen */
#define SOON_NS UINT64_C(20000000000)

static world w;
static fanin_client *client;
static fanin_error error = FANIN_ERROR_INIT;
static unsigned cpus;

unsigned __wrap_usable_cpus(void);
unsigned __wrap_usable_cpus(void)
{
    return cpus;
}

static int set_up(void **state)
{
    cpus = 2;
    w.lease_ms = LEASE_MS;
    world_begin(&w, RANKS, CUT_CHUNK0, 1);
    client = world_client(&w, FANIN_PATH_CMA);
    return 0;
}

static int tear_down(void **state)
{
    fanin_client_destroy(&client);
    world_stop(&w);
    return 0;
}

static void pull(uint64_t step)
{
    assert_int_equal(world_pulled(&w, client, FANIN_STEP_NEWEST, 0), step);
}

static bool count_rank(void *cookie, const fanin_rank_info *rank, uint64_t rtt_ns)
{
    (void)rank;
    (void)rtt_ns;
    ++*(unsigned *)cookie;
    return true;
}

/* An update, which waits for all leases that there are. */
static void commit(uint64_t step)
{
    uint64_t start = clock_ns();
    world_commit(&w, step);
    if (clock_ns() - start > SOON_NS)
        fail_msg("the update to step %u waited for a lease", (unsigned)step);
}

static void a_client_that_is_left_alone_has_no_lease(void **state)
{
    pull(1);
    commit(2);
    pull(2);
    commit(3);
    /* It has sent, and so has its name. */
    assert_int_equal(threads_named("fanin-late", NULL), 1);
}

static void what_follows_comes_behind_the_end(void **state)
{
    unsigned answered = 0;
    for (uint64_t step = 1; step <= PULLS; step++) {
        pull(step);
        if (step % 3 == 0)
            pull(step);
        if (step % 5 == 0)
            assert_ok(fanin_client_ping(client, 20000, count_rank, &answered, &error),
                      error);
        commit(step + 1);
    }
    assert_int_equal(answered, PULLS / 5 * RANKS);
}

static void a_client_that_goes_has_no_lease(void **state)
{
    pull(1);
    fanin_client_disconnect(client);
    commit(2);
    assert_ok(fanin_client_connect(client, w.address_list, RANKS, 20000, &error),
              error);
    pull(2);
    fanin_client_destroy(&client);
    commit(3);
}

static void a_child_leaves_its_parents_ends_alone(void **state)
{
    int status;
    for (uint64_t step = 1; step <= 5; step++) {
        pull(step);
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            fanin_status of =
                fanin_client_connect(client, w.address_list, RANKS, 1000, NULL);
            fanin_client_destroy(&client);
            _exit(of == FANIN_ERR_FORKED ? 0 : 1);
        }
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_int_equal(status, 0);
        commit(step + 1);
    }
}

static void a_rank_that_has_gone_is_found_by_the_next_pull(void **state)
{
    pull(1);
    world_stop_rank(&w, 2);
    fanin_status status =
        world_pull_step(&w, client, FANIN_STEP_NEWEST, 0, 500, &error);
    assert_true(status == FANIN_ERR_UNREACHABLE || status == FANIN_ERR_TIMEOUT);
    world_restart_rank(&w, 2);
    commit(2);
    pull(2);
    commit(3);
}

static void with_one_cpu_there_is_no_thread(void **state)
{
    cpus = 1;
    pull(1);
    pull(1);
    commit(2);
    pull(2);
    assert_int_equal(threads_named("fanin-late", NULL), 0);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(a_client_that_is_left_alone_has_no_lease),
        CASE(what_follows_comes_behind_the_end),
        CASE(a_client_that_goes_has_no_lease),
        CASE(a_child_leaves_its_parents_ends_alone),
        CASE(a_rank_that_has_gone_is_found_by_the_next_pull),
        CASE(with_one_cpu_there_is_no_thread),
    };
    if (!world_has_cma())
        return 77;
    return cmocka_run_group_tests_name("late ends", tests, NULL, NULL);
}
