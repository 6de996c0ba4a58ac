/* SPDX-License-Identifier: Apache-2.0 */
/* Digests that a rank keeps: who asks for the same again costs no reading, and gets nothing of
   another step. Built with FANIN_TEST_HOOKS, to see each reading. */
#include "call.h"
#include "core/rules.h"
#include "digest.h"
#include "server_peer.h"
#include "testing.h"

#include <fanin/server.h>
#include <semaphore.h>
#include <time.h>

#define BIG ((uint64_t)LIMIT_READ_BYTES)
#define PORTION ((uint64_t)256 << 10) /* is digested at a time */

static uint8_t *memory; /* BIG bytes */
static atomic_uint readings;
static sem_t entered, released;

static int set_up(void **state)
{
    memory = malloc(BIG);
    return memory ? 0 : -1;
}

static int tear_down(void **state)
{
    free(memory);
    return 0;
}

static void count(void)
{
    atomic_fetch_add(&readings, 1);
}

static fanin_server *start(void)
{
    fanin_server_config c = server_config();
    c.lease_ms = 1; /* updates do not wait */
    c.data_threads = 1;
    fanin_server *s = server_start(&c);
    memset(memory, 1, BIG);
    server_put(s, RUN, "a", memory, BIG);
    atomic_store(&readings, 0);
    atomic_store(&server_on_send, count);
    return s;
}

static puller begin(fanin_server *s)
{
    puller r = puller_open(s);
    puller_begin(&r);
    return r;
}

static digest digest_here(uint64_t from, uint64_t length)
{
    box_digest *sum = box_digest_create();
    box_digest_add(sum, memory + from, length, 0);
    digest d = box_digest_take(sum);
    box_digest_free(sum);
    return d;
}

/* Asks for one range; whether the answer is what is in memory now. */
static bool is_current(puller *r, uint64_t from, uint64_t length)
{
    digest got, now = digest_here(from, length);
    read_entry one = {.box = 0, .offset = from, .length = length};
    peer_digest(&r->data, &r->grant, length, 0, &one, 1, &got);
    return digest_equal(&got, &now);
}

SERVER_TEST(who_asks_again_costs_no_reading)
{
    fanin_server *s = start();
    server_commit(s, 1);
    puller a = begin(s), b = begin(s);
    digest two[2], again[2], other[2];
    const read_entry parts[] = {{.box = 0, .length = 9000},
                                {.box = 0, .offset = 10000, .length = 7000}};
    const read_entry turned[] = {parts[1], parts[0]};
    peer_digest(&a.data, &a.grant, 16000, 0, parts, 2, two);
    assert_int_equal(atomic_load(&readings), 1);
    peer_digest(&b.data, &b.grant, 16000, 0, turned, 2, again);
    assert_true(digest_equal(&two[0], &again[1]) && digest_equal(&two[1], &again[0]));
    assert_true(is_current(&b, 0, 9000));
    assert_int_equal(atomic_load(&readings), 1);
    /* What was not asked for so is not known. */
    peer_digest(&b.data, &b.grant, 16000, FANIN_DTYPE_BF16, parts, 2, other);
    assert_false(digest_equal(&two[0], &other[0]));
    assert_true(is_current(&b, 0, 8999) && is_current(&b, 1, 9000));
    assert_int_equal(atomic_load(&readings), 4);
    puller_end(&a);
    puller_end(&b);
}

static void hold(void)
{
    struct timespec patience;
    count();
    sem_post(&entered);
    clock_gettime(CLOCK_REALTIME, &patience);
    patience.tv_sec += 10;
    sem_timedwait(&released, &patience);
}

static void hold_from_now(void)
{
    sem_init(&entered, 0, 0);
    sem_init(&released, 0, 0);
    atomic_store(&server_on_send, hold);
}

static void ask_for_all(puller *r)
{
    const read_entry whole = {.box = 0, .count = 1};
    peer_request_digest(&r->data, &r->grant, BIG, 0, &whole, 1);
}

/* All of them ask before the first has its answer. */
SERVER_TEST(those_who_ask_at_once_cost_one_reading)
{
    enum { READERS = 6 };
    fanin_server *s = start();
    server_commit(s, 1);
    puller all[READERS];
    for (int i = 0; i < READERS; i++)
        all[i] = begin(s);
    puller other = begin(s);
    const read_entry byte = {.box = 0, .length = 1};
    hold_from_now();
    peer_request_read(&other.data, other.grant.token, 1, &byte, 1);
    sem_wait(&entered);
    for (int i = 0; i < READERS; i++)
        ask_for_all(&all[i]);
    atomic_store(&server_on_send, count);
    sem_post(&released);
    for (int i = 0; i < READERS; i++)
        peer_expect(&all[i].data, MSG_DIGEST_OK);
    assert_int_equal(atomic_load(&readings), 1 + BIG / PORTION);
}

static void expect_stale(puller *r)
{
    ask_for_all(r);
    peer_expect_error(&r->data, FANIN_ERR_STALE);
}

static void update(fanin_server *s, uint8_t value)
{
    assert_works(fanin_server_begin_update(s, RUN, ERROR));
    memset(memory, value, BIG);
}

SERVER_TEST(nothing_is_told_of_another_step)
{
    fanin_server *s = start();
    server_commit(s, 1);
    puller r = begin(s);
    assert_true(is_current(&r, 0, BIG));
    update(s, 2);
    expect_stale(&r);
    server_commit(s, 2);
    puller_begin(&r);
    assert_true(is_current(&r, 0, BIG));
    update(s, 3);
    assert_works(fanin_server_abort_update(s, RUN, ERROR));
    expect_stale(&r);
    update(s, 4);
    server_commit(s, 3);
    puller_begin(&r);
    assert_true(is_current(&r, 0, BIG));
    assert_works(fanin_server_withdraw(s, RUN, ERROR));
    memset(memory, 5, BIG);
    expect_stale(&r);
    server_commit(s, 4);
    puller_begin(&r);
    assert_true(is_current(&r, 0, BIG));
    assert_works(fanin_server_remove(s, RUN, NULL, ERROR));
    expect_stale(&r);
}

/* Both connections take turns: the request is looked at, then the other one sends, and meanwhile
   the update begins. */
SERVER_TEST(nothing_is_told_once_an_update_has_begun)
{
    fanin_server *s = start();
    server_commit(s, 1);
    puller r = begin(s), other = begin(s), first = begin(s);
    peer watcher = peer_watch(s, 0);
    assert_true(is_current(&r, 0, BIG));
    const read_entry byte = {.box = 0, .length = 1}, whole = {.box = 0, .count = 1};
    hold_from_now();
    peer_request_read(&first.data, first.grant.token, 1, &byte, 1);
    sem_wait(&entered);
    peer_request_read(&other.data, other.grant.token, BIG, &whole, 1);
    ask_for_all(&r);
    sem_post(&released);
    sem_wait(&entered);
    call update;
    call_start(&update, server_begin_run, s);
    peer_await(&watcher, WIRE_STATE_WRITING);
    atomic_store(&server_on_send, NULL);
    sem_post(&released);
    peer_expect_error(&r.data, FANIN_ERR_STALE);
    peer_expect(&other.data, MSG_READ_OK);            /* the rest of it is padding */
    assert_int_equal(server_stats(s).pulls_stale, 2); /* each once */
    assert_int_equal(call_end(&update), FANIN_OK);
}

/* Each of two copies that can be read at a time has its own. */
SERVER_TEST(copies_are_told_apart)
{
    fanin_commit_options copied;
    fanin_commit_options_init(&copied, sizeof copied);
    copied.flags = FANIN_COMMIT_SNAPSHOT | FANIN_COMMIT_WAIT;
    fanin_server *s = start();
    assert_works(fanin_server_commit(s, RUN, 1, &copied, ERROR));
    puller old = begin(s);
    assert_true(is_current(&old, 0, BIG));
    update(s, 2);
    assert_works(fanin_server_commit(s, RUN, 2, &copied, ERROR));
    puller new = begin(s);
    assert_true(is_current(&new, 0, BIG));
    assert_false(is_current(&old, 0, BIG));
    memset(memory, 1, BIG);
    assert_true(is_current(&old, 0, BIG));
    puller_end(&old);
    puller_end(&new);
}

TESTS_BETWEEN(set_up, tear_down)
