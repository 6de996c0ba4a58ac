/* SPDX-License-Identifier: Apache-2.0 */
/* Updates: states, steps, epochs, draining, what replaces and removals do. */
#include "call.h"
#include "clock.h"
#include "server_peer.h"
#include "testing.h"

#define MS UINT64_C(1000000)

static uint8_t memory[2][100];

/* With shard "a" at step 1. */
static fanin_server *start_published(uint32_t lease_ms)
{
    fanin_server *s = server_start_lease(lease_ms);
    server_put(s, RUN, "a", memory[0], 100);
    server_commit(s, 1);
    return s;
}

static fanin_status commit(fanin_server *s, uint64_t step)
{
    return fanin_server_commit(s, RUN, step, NULL, NULL);
}

SERVER_TEST(first_commit_needs_no_update)
{
    fanin_server *s = server_start_lease(0);
    assert_int_equal(commit(s, 1), FANIN_ERR_ARGUMENT); /* no such publication */
    server_put(s, RUN, "a", memory[0], 100);
    assert_int_equal(fanin_server_abort_update(s, RUN, NULL), FANIN_ERR_STATE);
    assert_int_equal(commit(s, 1), FANIN_OK);
    assert_int_equal(commit(s, 2), FANIN_ERR_STATE);
    server_begin(s);
    assert_int_equal(commit(s, 2), FANIN_OK);
    server_begin(s);
    assert_int_equal(fanin_server_abort_update(s, RUN, NULL), FANIN_OK);
    assert_int_equal(fanin_server_abort_update(s, RUN, NULL), FANIN_ERR_STATE);
    assert_int_equal(commit(s, 3), FANIN_OK); /* alone, after an abort */
    assert_int_equal(fanin_server_abort_update(s, "lora:x", NULL), FANIN_ERR_NOT_FOUND);
    fanin_server_stats stats = server_stats(s);
    assert_int_equal(stats.commits, 3);
    assert_int_equal(stats.aborts, 1);
    assert_int_equal(stats.updates, 2);
}

SERVER_TEST(begin_update_makes_the_publication)
{
    fanin_server *s = server_start_lease(0);
    server_begin(s);
    server_begin(s); /* again: a new epoch, at once */
    server_put(s, RUN, "a", memory[0], 100);
    server_commit(s, 1);
    assert_int_equal(fanin_server_begin_update(s, "nonsense", NULL),
                     FANIN_ERR_ARGUMENT);
    assert_int_equal(fanin_server_begin_update(NULL, RUN, NULL), FANIN_ERR_ARGUMENT);
}

SERVER_TEST(steps_grow_also_after_a_removal)
{
    fanin_server *s = server_start_lease(0);
    server_put(s, RUN, "a", memory[0], 100);
    server_commit(s, 5);
    server_begin(s);
    assert_int_equal(commit(s, 5), FANIN_ERR_ARGUMENT);
    assert_int_equal(commit(s, 4), FANIN_ERR_ARGUMENT);
    assert_int_equal(commit(s, 6), FANIN_OK);
    assert_int_equal(fanin_server_remove(s, RUN, NULL, NULL), FANIN_OK);
    assert_int_equal(commit(s, 7), FANIN_ERR_ARGUMENT); /* it is not there */
    assert_int_equal(fanin_server_remove(s, RUN, NULL, NULL), FANIN_ERR_NOT_FOUND);
    server_put(s, RUN, "a", memory[0], 100);
    fanin_error error = FANIN_ERROR_INIT;
    assert_int_equal(fanin_server_commit(s, RUN, 6, NULL, &error), FANIN_ERR_ARGUMENT);
    assert_non_null(strstr(error.message, "6"));
    assert_int_equal(commit(s, 7), FANIN_OK);
}

SERVER_TEST(a_withdrawn_step_is_worth_nothing)
{
    fanin_server *s =
        server_start_lease(60000); /* it must not wait for the reader below */
    assert_int_equal(fanin_server_withdraw(s, RUN, NULL), FANIN_ERR_NOT_FOUND);
    server_put(s, RUN, "a", memory[0], 100);
    assert_int_equal(fanin_server_withdraw(s, RUN, NULL), FANIN_ERR_STATE);
    server_commit(s, 1);
    peer p = peer_open(s);
    grant g = peer_lease(&p);
    assert_int_equal(fanin_server_withdraw(s, RUN, NULL), FANIN_OK);
    assert_false(peer_end(&p, &g, false).good);
    assert_false(peer_begin(&p, &g).granted);
    assert_int_equal(fanin_server_withdraw(s, RUN, NULL), FANIN_ERR_STATE);
    assert_int_equal(commit(s, 1), FANIN_ERR_ARGUMENT);
    assert_int_equal(commit(s, 2), FANIN_OK);
    g = peer_lease(&p);
    assert_int_equal(g.step, 2);
    assert_true(peer_end(&p, &g, false).good);
    server_begin(s);
    assert_int_equal(fanin_server_withdraw(s, RUN, NULL), FANIN_ERR_STATE);
    assert_int_equal(server_stats(s).aborts, 0); /* no update was */
}

/* By what the list says: the state is the same. */
SERVER_TEST(an_aborted_update_takes_no_step_back)
{
    fanin_server *s = server_start_lease(0);
    server_put(s, RUN, "a", memory[0], 100);
    server_commit(s, 5);
    peer p = peer_open(s);
    for (int i = 0; i < 2; i++) {
        server_begin(s);
        assert_works(fanin_server_abort_update(s, RUN, ERROR));
        msg_list_entry e = peer_entry(&p);
        assert_int_equal(e.state, WIRE_STATE_UNPUBLISHED);
        assert_int_equal(e.step, 5 + i);
        assert_int_equal(e.taken_back, 0);
        server_commit(s, 6 + (uint64_t)i);
    }
    assert_works(fanin_server_withdraw(s, RUN, ERROR));
    assert_int_equal(peer_entry(&p).taken_back, 1 + 7);
    server_commit(s, 8);
    assert_int_equal(peer_entry(&p).taken_back, 1 + 7);
}

SERVER_TEST(a_snapshot_is_not_withdrawn)
{
    fanin_server *s = server_start_lease(0);
    server_put(s, RUN, "a", memory[0], 100);
    server_snapshot(s, 1);
    assert_int_equal(fanin_server_withdraw(s, RUN, NULL), FANIN_ERR_STATE);
}

SERVER_TEST(numbers_are_never_used_twice)
{
    fanin_server *s = server_start_lease(0);
    peer p = peer_open(s);
    uint64_t epoch = 0, version = 0;
    for (uint64_t step = 1; step < 6; step++) {
        server_put(s, RUN, "a", memory[0], 100);
        server_commit(s, step);
        grant g = peer_lease(&p);
        assert_int_equal(g.epoch % 2, 0);
        assert_true(g.epoch > epoch);
        assert_true(g.catalog_version > version);
        epoch = g.epoch;
        version = g.catalog_version;
        assert_int_equal(fanin_server_remove(s, RUN, NULL, NULL), FANIN_OK);
        assert_false(peer_end(&p, &g, false).good);
    }
    assert_int_equal(server_stats(s).pulls_stale, 5);
}

SERVER_TEST(the_catalog_version_changes_with_the_catalog)
{
    fanin_server *s = server_start_lease(0);
    peer p = peer_open(s);
    fanin_pair pair = {"r", "16"};
    server_put(s, RUN, "a", memory[0], 100);
    server_commit(s, 1);
    grant first = peer_newest(&p);
    server_begin(s);
    server_put(s, RUN, "a", memory[0], 100); /* equal */
    server_commit(s, 2);
    grant same = peer_newest(&p);
    assert_int_equal(same.catalog_version, first.catalog_version);
    assert_memory_equal(same.key_digest, first.key_digest, 16);
    server_begin(s);
    assert_int_equal(fanin_server_set_metadata(s, RUN, &pair, 1, NULL), FANIN_OK);
    server_commit(s, 3);
    grant described = peer_newest(&p);
    assert_true(described.catalog_version > same.catalog_version);
    assert_memory_not_equal(described.key_digest, same.key_digest, 16);
    server_begin(s);
    server_put(s, RUN, "a", memory[1], 100); /* elsewhere: same keys */
    server_commit(s, 4);
    grant moved = peer_newest(&p);
    assert_true(moved.catalog_version > described.catalog_version);
    assert_memory_equal(moved.key_digest, described.key_digest, 16);
}

SERVER_TEST(new_shards_appear_with_the_next_commit)
{
    fanin_server *s = start_published(0);
    peer p = peer_open(s);
    grant before = peer_lease(&p);
    server_put(s, RUN, "b", memory[1], 100); /* no update: readers are not disturbed */
    assert_true(peer_end(&p, &before, false).good);
    grant g = peer_newest(&p);
    assert_int_equal(peer_count_keys(&p, &g), 1);
    server_begin(s);
    server_commit(s, 2);
    g = peer_newest(&p);
    assert_int_equal(peer_count_keys(&p, &g), 2);
}

/* ---------------------------------------------------------------- draining */

SERVER_TEST(begin_update_waits_at_most_the_lease)
{
    fanin_server *s =
        start_published(1000); /* so long that begin_update finds the lease alive */
    peer p = peer_open(s);
    uint64_t before = clock_ns();
    grant g = peer_lease(&p);
    uint64_t start_ns = clock_ns();
    server_begin(s);
    uint64_t waited = clock_ns() - start_ns;
    assert_true(clock_ns() - before >= 1000 * MS);
    assert_false(peer_end(&p, &g, false).good);
    fanin_server_stats stats = server_stats(s);
    assert_int_equal(stats.drains_expired, 1);
    assert_in_range(stats.drain_wait_ns_max, 1, waited);
    assert_true(stats.drain_wait_ns_total >= stats.drain_wait_ns_max);
}

SERVER_TEST(a_lease_time_of_zero_never_waits)
{
    fanin_server *s = start_published(0);
    peer p = peer_open(s);
    for (uint64_t step = 2; step < 100; step++) {
        grant g = peer_lease(&p);
        server_begin(s);
        server_commit(s, step);
        assert_false(peer_end(&p, &g, false).good);
    }
    assert_int_equal(server_stats(s).drains_expired, 98); /* each at once */
}

/* Calls begin_update in a thread; somebody's lease keeps it draining. */
static void start_draining(call *c, fanin_server *s)
{
    peer watcher = peer_watch(s, 0);
    call_start(c, server_begin_run, s);
    peer_await(&watcher, WIRE_STATE_DRAINING);
    peer_close(&watcher);
}

static bool give_back(peer *p, uint64_t begun)
{
    buffer b = {0};
    msg_end_ok ok;
    encode_end(&b, ++p->request, &(msg_end){.abandon = true, .begin = begun});
    peer_send(p, &b);
    body in = peer_expect(p, MSG_END_OK);
    assert_int_equal(decode_end_ok(&in, &ok), FANIN_OK);
    return ok.good;
}

/* By a client that did not wait for its begin's answer, and so knows no token. */
SERVER_TEST(a_lease_is_given_back_by_its_begin)
{
    fanin_server *s = start_published(60000);
    peer p = peer_open(s);
    grant other = peer_lease(&p);
    peer_request_begin(&p, &other);
    uint64_t begun = p.request;
    (void)peer_expect(&p, MSG_BEGIN_OK);
    assert_false(give_back(&p, begun + 1000)); /* there is none */
    assert_true(give_back(&p, begun));
    assert_false(give_back(&p, begun));
    assert_true(peer_end(&p, &other, false).good); /* it was another's */
    server_begin(s);
    assert_int_equal(server_stats(s).drains_expired, 0);
}

SERVER_TEST(a_closed_session_ends_the_draining)
{
    fanin_server *s = start_published(60000);
    peer p = peer_open(s);
    peer_lease(&p);
    call c;
    start_draining(&c, s);
    peer_close(&p);
    assert_int_equal(call_end(&c), FANIN_OK);
    assert_int_equal(server_stats(s).pulls_abandoned, 1);
    assert_int_equal(server_stats(s).drains_expired, 0);
}

SERVER_TEST(one_thread_drains_at_a_time)
{
    fanin_server *s = start_published(60000);
    peer p = peer_open(s);
    grant g = peer_lease(&p);
    call c;
    start_draining(&c, s);
    fanin_error error = FANIN_ERROR_INIT;
    assert_int_equal(fanin_server_begin_update(s, RUN, &error), FANIN_ERR_STATE);
    assert_non_null(strstr(error.message, "begin_update"));
    assert_int_equal(commit(s, 2), FANIN_ERR_STATE);
    assert_true(peer_end(&p, &g, false).good); /* draining counts as standing */
    assert_int_equal(call_end(&c), FANIN_OK);
    server_commit(s, 2);
}

/* ------------------------------------------------- changes outside of updates */

SERVER_TEST(a_moved_shard_makes_the_publication_unreadable)
{
    fanin_server *s = start_published(0);
    peer p = peer_open(s);
    peer d = peer_data(s, &p);
    grant g = peer_lease(&p);
    server_put(s, RUN, "a", memory[0], 100); /* equal: nothing happens */
    assert_true(peer_end(&p, &g, false).good);
    g = peer_lease(&p);
    server_put(s, RUN, "a", memory[1], 100);
    read_entry one = {.box = 0, .count = 1};
    peer_request_read(&d, g.token, 100, &one, 1);
    peer_expect_error(&d, FANIN_ERR_STALE);
    assert_false(peer_end(&p, &g, false).good);
    assert_false(peer_begin(&p, &g).granted);
    assert_int_equal(commit(s, 2), FANIN_OK);
    uint8_t got[100];
    memset(memory[1], 0x5a, 100);
    g = peer_lease(&p);
    peer_read(&d, &g, &one, 1, got, 100);
    assert_memory_equal(got, memory[1], 100);
}

SERVER_TEST(a_removed_shard_makes_the_publication_unreadable)
{
    fanin_server *s = server_start_lease(0);
    peer p = peer_open(s);
    server_put(s, RUN, "a", memory[0], 100);
    server_put(s, RUN, "b", memory[1], 100);
    server_commit(s, 1);
    grant g = peer_lease(&p);
    fanin_error error = FANIN_ERROR_INIT;
    assert_int_equal(fanin_server_remove(s, RUN, "c", &error), FANIN_ERR_NOT_FOUND);
    assert_string_equal(error.key, RUN ":c");
    assert_int_equal(fanin_server_remove(s, RUN, "b", NULL), FANIN_OK);
    assert_false(peer_end(&p, &g, false).good);
    assert_int_equal(commit(s, 2), FANIN_OK);
    g = peer_lease(&p);
    assert_int_equal(peer_count_keys(&p, &g), 1);
}
