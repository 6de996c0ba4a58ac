/* SPDX-License-Identifier: Apache-2.0 */
/* How long leases hold updates up, on whose account, and who is told. */
#include "call.h"
#include "guests/peer.h"
#include "log_catcher.h"
#include "publish/lease.h"
#include "server_peer.h"
#include "testing.h"
#include "thread.h"

#define MS UINT64_C(1000000)
#define WINDOW (SHARE_WINDOW_MS * MS)
#define HOUR_MS 3600000
#define SHARE_MS 60

static uint8_t memory[100];

/* ------------------------------------------------------- shares, by their own clock */

TEST(a_share_is_had_once_and_comes_back)
{
    bucket b = {0};
    uint64_t now = 1000 * WINDOW;
    assert_int_equal(share_left(&b, now, 500, HOUR_MS), 500 * MS);
    share_take(&b, now, 500, 100 * MS);
    assert_int_equal(share_left(&b, now, 500, HOUR_MS), 400 * MS);
    assert_int_equal(share_left(&b, now + WINDOW / 10, 500, HOUR_MS), 450 * MS);
    share_take(&b, now, 500, 150 * MS);
    assert_int_equal(share_left(&b, now, 500, HOUR_MS), 250 * MS);
    share_take(&b, now, 500, MS);
    assert_int_equal(share_left(&b, now, 500, HOUR_MS),
                     0); /* not until half of it is back */
    assert_int_equal(share_left(&b, now + WINDOW / 500, 500, HOUR_MS), 250 * MS);
    assert_int_equal(share_left(&b, now + WINDOW, 500, HOUR_MS), 500 * MS);
}

/* Who needs less than half of it does not wait until half of it is back. */
TEST(a_lease_is_enough_to_be_waited_for)
{
    bucket b = {0};
    uint64_t now = 1000 * WINDOW;
    share_take(&b, now, 2000, 2000 * MS);
    assert_int_equal(share_left(&b, now + WINDOW / 10 - MS, 2000, 200), 0);
    assert_int_equal(share_left(&b, now + WINDOW / 10, 2000, 200), 200 * MS);
    assert_int_equal(share_left(&b, now + WINDOW / 10, 2000, 1000), 0);
    assert_int_equal(share_left(&b, now + WINDOW / 2, 2000, 1000), 1000 * MS);
}

/* Whatever its leases do: what it holds up in any ten minutes is its share of eleven. */
TEST(no_pattern_gets_more_than_a_share)
{
    static const uint64_t steps_ms[] = {1, 26, 400, 7000};
    for (size_t i = 0; i < sizeof steps_ms / sizeof *steps_ms; i++) {
        bucket b = {0};
        uint64_t now = WINDOW, held = 0;
        for (; now < 11 * WINDOW; now += steps_ms[i] * MS) {
            uint64_t left = share_left(&b, now, 500, HOUR_MS);
            left = left < 300 * MS ? left : 300 * MS; /* the lease time */
            now += left;
            held += left;
            share_take(&b, now, 500, left);
        }
        assert_in_range(held, 4500 * MS, 5500 * MS);
    }
}

TEST(shares_of_nothing_and_of_everything)
{
    bucket b = {0};
    assert_int_equal(share_left(&b, WINDOW, 0, HOUR_MS), 0);
    share_take(&b, WINDOW, 0, WINDOW);
    share_take(&b, WINDOW, SHARE_WINDOW_MS, 1000 * WINDOW);
    assert_true(share_left(&b, WINDOW, SHARE_WINDOW_MS, HOUR_MS) == UINT64_MAX);
    assert_int_equal(share_left(&b, WINDOW, 500, HOUR_MS), 500 * MS);
    /* A debt has an end, too. */
    share_take(&b, WINDOW, 500, UINT64_MAX);
    assert_int_equal(share_left(&b, 3 * WINDOW, 500, HOUR_MS), 500 * MS);
}

/* ---------------------------------------------------- many peers, without connections */

/** As much of a server as leases need, and a lease of each of many peers. */
typedef struct crowd {
    fanin_server server;
    publication publication;
    shard_catalog catalog;
    peer_share peers[DRAIN_PEERS + 10];
    reader readers[DRAIN_PEERS + 10];
    drain drain;
} crowd;

static crowd *crowd_make(void)
{
    crowd *c = test_calloc(1, sizeof *c);
    pthread_mutex_init(&c->server.lock, NULL);
    condition_init(&c->server.freed);
    c->server.lease_ms = HOUR_MS;
    c->server.stranger_share_ms = SHARE_MS;
    c->server.own_share_ms = SHARE_WINDOW_MS;
    c->catalog.references = 1000;
    c->publication.catalog = &c->catalog;
    for (size_t i = 0; i < DRAIN_PEERS + 10; i++) {
        c->readers[i].from = &c->peers[i];
        snprintf(c->peers[i].name, sizeof c->peers[i].name, "peer %zu", i);
    }
    pthread_mutex_lock(&c->server.lock);
    return c;
}

static void crowd_free(crowd *c)
{
    pthread_mutex_unlock(&c->server.lock);
    pthread_mutex_destroy(&c->server.lock);
    pthread_cond_destroy(&c->server.freed);
    test_free(c);
}

static lease *grant_to(crowd *c, size_t peer)
{
    lease *l = lease_grant(&c->server, &c->readers[peer], &c->publication, 1);
    assert_non_null(l);
    return l;
}

/* All leases as they are; true: they had all ended. */
static bool crowd_drain(crowd *c)
{
    drain_begin(&c->publication, &c->drain, deadline_in_ms(HOUR_MS));
    return drain_finish(&c->server, &c->publication, &c->drain, 0, NULL);
}

TEST(many_addresses_have_a_few_shares)
{
    crowd *c = crowd_make();
    uint64_t held = 0;
    for (size_t i = 0; i < 8; i++) {
        lease *l = grant_to(c, i);
        assert_false(crowd_drain(c));
        held += c->drain.longest_ns;
        lease_drop(&c->server, l);
    }
    assert_int_equal(c->server.stats.drains_cut, 8);
    /* Half of two and a half, and the one that was begun with half of it left. */
    assert_in_range(held, 5 * SHARE_MS * MS / 4, 5 * SHARE_MS * MS / 2);
    assert_int_equal(c->server.stats.held_up_ns_max, SHARE_MS * MS);
    crowd_free(c);
}

/* Whose lease is waited for until it ends, whatever others have had. */
static void expect_patience(crowd *c, size_t peer, size_t place)
{
    lease *l = grant_to(c, peer);
    drain_begin(&c->publication, &c->drain, deadline_in_ms(HOUR_MS));
    drain_add(&c->server, &c->drain, l);
    assert_true(c->drain.peers[place].until > c->drain.since + WINDOW);
    lease_drop(&c->server, l);
    assert_false(drain_wait(&c->server, &c->drain));
    assert_true(drain_end(&c->server, &c->publication, &c->drain));
}

TEST(who_is_no_stranger_is_waited_for)
{
    crowd *c = crowd_make();
    int secret;
    lease *l = grant_to(c, 1);
    assert_false(crowd_drain(c));
    lease_drop(&c->server, l);
    c->peers[9].is_own = true;
    expect_patience(c, 9, 0);
    /* With a secret whoever has a session has proven it. */
    c->server.tls = (tls_end *)(void *)&secret;
    drain_begin(&c->publication, &c->drain, deadline_in_ms(HOUR_MS));
    l = grant_to(c, 2);
    drain_add(&c->server, &c->drain, l);
    size_t place = l->drained - 1U;
    lease_drop(&c->server, l);
    assert_false(drain_wait(&c->server, &c->drain));
    assert_true(drain_end(&c->server, &c->publication, &c->drain));
    expect_patience(c, 2, place);
    c->server.tls = NULL;
    crowd_free(c);
}

TEST(more_peers_than_places_are_told_apart_no_more)
{
    crowd *c = crowd_make();
    lease *leases[DRAIN_PEERS + 10];
    c->peers[DRAIN_PEERS + 9].is_own = true;
    for (size_t i = 0; i < DRAIN_PEERS + 10; i++)
        leases[i] = grant_to(c, i);
    drain_begin(&c->publication, &c->drain, deadline_in_ms(HOUR_MS));
    for (size_t i = 0; i < DRAIN_PEERS + 10; i++)
        drain_add(&c->server, &c->drain, leases[i]);
    assert_int_equal(c->drain.peers[0].leases, 1); /* the own user has its place */
    assert_int_equal(c->drain.peers[DRAIN_PEERS + 1].leases, 9);
    for (size_t i = 0; i < DRAIN_PEERS + 10; i++)
        lease_drop(&c->server, leases[i]);
    assert_false(drain_wait(&c->server, &c->drain));
    assert_true(drain_end(&c->server, &c->publication, &c->drain));
    assert_int_equal(c->server.stats.drains_cut, 0);
    crowd_free(c);
}

/* --------------------------------------------------------------------- a server */

/* Its leases last for an hour, strangers' shares do not. */
static fanin_server *start(uint32_t stranger_share_ms)
{
    fanin_server_config c = server_config();
    c.lease_ms = HOUR_MS;
    c.stranger_share_ms = stranger_share_ms;
    return server_publish(&c, memory, sizeof memory);
}

/* The attack: whenever there is a new step, a fresh lease, and none is ended. */
SERVER_TEST(a_stranger_that_holds_leases_is_waited_for_no_more)
{
    log_listen("held-up");
    fanin_server *s = start(SHARE_MS);
    peer stranger = peer_open(s);
    enum { STEPS = 50 };
    for (uint64_t step = 1; step <= STEPS; step++) {
        grant g = peer_lease(&stranger);
        server_begin(s); /* an hour, if it waited */
        assert_false(peer_end(&stranger, &g, false).good);
        server_commit(s, step + 1);
    }
    fanin_server_stats stats = server_stats(s);
    assert_int_equal(stats.begins_granted, STEPS);
    assert_int_equal(stats.drains_cut, STEPS);
    assert_int_equal(stats.drains_expired, 0);
    assert_int_equal(stats.held_up_ns_max, SHARE_MS * MS);
    assert_string_equal(stats.held_up_by, "this host");
    log_await("this host");
    char text[16384];
    assert_int_equal(fanin_server_prometheus(s, text, sizeof text, NULL), FANIN_OK);
    assert_non_null(strstr(text, "\nfanin_drains_cut_total 50\n"));
    assert_non_null(
        strstr(text, "\nfanin_held_up_seconds_max{peer=\"this host\"} 0.060000000\n"));
}

SERVER_TEST(the_own_user_is_waited_for_beside_a_stranger)
{
    fanin_server *s = start(SHARE_MS);
    peer stranger = peer_open(s), own = peer_open_unix(s);
    for (uint64_t step = 1; step <= 5; step++) {
        peer watcher = peer_watch(s, 0);
        peer_await(&watcher, WIRE_STATE_STABLE);
        (void)peer_lease(&stranger);
        grant g = peer_lease(&own);
        call update;
        call_start(&update, server_begin_run, s);
        peer_event(&watcher); /* it drains */
        assert_false(call_returns(&update, 2 * SHARE_MS));
        assert_true(peer_end(&own, &g, false).good);
        assert_int_equal(call_end(&update), FANIN_OK);
        server_commit(s, step + 1);
        peer_close(&watcher);
    }
    assert_string_equal(server_stats(s).held_up_by, "this user");
}

/* Readers that end what they begin in time are waited for, if half of the share is left. */
SERVER_TEST(who_ends_in_time_loses_nothing)
{
    fanin_server *s = start(30000);
    peer stranger = peer_open(s), watcher = peer_watch(s, 0);
    peer_await(&watcher, WIRE_STATE_STABLE);
    grant g = peer_lease(&stranger);
    call update;
    call_start(&update, server_begin_run, s);
    peer_event(&watcher);
    assert_true(peer_end(&stranger, &g, false).good);
    assert_int_equal(call_end(&update), FANIN_OK);
    assert_int_equal(server_stats(s).drains_cut, 0);
}

SERVER_TEST(a_snapshot_waits_on_the_same_account)
{
    fanin_server_config config = server_config();
    config.lease_ms = HOUR_MS;
    config.stranger_share_ms = SHARE_MS;
    fanin_server *s = server_start(&config);
    server_put(s, RUN, "a", memory, sizeof memory);
    server_snapshot(s, 1);
    peer stranger = peer_open(s);
    for (uint64_t step = 2; step <= 10; step++) {
        (void)peer_lease(
            &stranger); /* of the copy that the commit after the next fills */
        server_begin(s);
        server_snapshot(s, step);
    }
    fanin_server_stats stats = server_stats(s);
    assert_int_equal(stats.drains_cut, 8);
    assert_int_equal(stats.held_up_ns_max, SHARE_MS * MS);
}
