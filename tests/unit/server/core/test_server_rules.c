/* SPDX-License-Identifier: Apache-2.0 */
/* For each rule of consistency a property that holds with it and is broken without it.
   Built with FANIN_TEST_HOOKS, which lets a test take rules out. */
#include "call.h"
#include "clock.h"
#include "core/rules.h"
#include "publish/publication.h"
#include "server_peer.h"
#include "testing.h"

#include <pthread.h>
#include <semaphore.h>
#include <time.h>

#ifdef __has_feature
#if __has_feature(thread_sanitizer)
#define RACES_ARE_ERRORS
#endif
#endif

#define BIG ((uint64_t)LIMIT_READ_BYTES)

static uint8_t *memory; /* BIG bytes */

static int set_up(void **state)
{
    memory = malloc(BIG);
    memset(memory, 1, BIG);
    return memory ? 0 : -1;
}

static int tear_down(void **state)
{
    free(memory);
    return 0;
}

static fanin_server *start(uint32_t lease_ms)
{
    fanin_server *s = server_start_lease(lease_ms);
    server_put(s, RUN, "a", memory, BIG);
    server_commit(s, 1);
    return s;
}

/* Runs a property with all rules, then without some. */
static void check(bool (*holds)(void), unsigned rules)
{
    atomic_store(&server_rules_off, 0);
    bool with = holds();
    atomic_store(&server_rules_off, rules);
    bool without = holds();
    atomic_store(&server_rules_off, 0);
    assert_true(with);
    assert_false(without);
}

/* Its next event is a change. */
static peer watch_stable(fanin_server *s)
{
    peer watcher = peer_watch(s, 0);
    peer_await(&watcher, WIRE_STATE_STABLE);
    return watcher;
}

/* An end that arrives within the lease, after begin_update was called, is good. */
static bool end_in_time_is_good(void)
{
    fanin_server *s = start(5000);
    peer p = peer_open(s), watcher = watch_stable(s);
    grant g = peer_lease(&p);
    call u;
    call_start(&u, server_begin_run, s);
    peer_event(&watcher);
    bool good = peer_end(&p, &g, false).good;
    assert_int_equal(call_end(&u), FANIN_OK);
    return good;
}

SERVER_TEST(begin_update_drains)
{
    check(end_in_time_is_good, RULE_DRAIN);
}

/* A reader that comes while the publication drains gets no lease. */
static bool draining_refuses(void)
{
    fanin_server *s = start(5000);
    peer p = peer_open(s), watcher = watch_stable(s);
    grant g = peer_lease(&p), second = g;
    call u;
    call_start(&u, server_begin_run, s);
    peer_event(&watcher);
    bool refused = !peer_begin(&p, &second).granted;
    peer_end(&p, &g, false);
    if (!refused)
        peer_end(&p, &second, false);
    assert_int_equal(call_end(&u), FANIN_OK);
    return refused;
}

SERVER_TEST(draining_grants_no_lease)
{
    check(draining_refuses, RULE_REFUSAL);
}

#define HOLD_UP_LEASE_MS 500

/* begin_update returns although readers come all the time. */
static bool readers_cannot_hold_up(void)
{
    fanin_server *s = start(HOLD_UP_LEASE_MS);
    peer p = peer_open(s);
    grant g = peer_lease(&p);
    call u;
    call_start(&u, server_begin_run, s);
    /* A new lease before the last one is over: for four lease times, or if that is to end it, for
       as long as it takes. */
    unsigned both = RULE_REFUSAL | RULE_DRAIN_DEADLINE;
    bool endless = (atomic_load(&server_rules_off) & both) == both;
    deadline end = deadline_in_ms(endless ? 4 * HOLD_UP_LEASE_MS : 30000);
    bool returned = false;
    while (!deadline_passed(end) && !returned) {
        grant next = g;
        if (peer_begin(&p, &next).granted) {
            peer_end(&p, &g, true);
            g = next;
        }
        returned = call_returns(&u, 0);
    }
    assert_int_equal(call_end(&u), FANIN_OK);
    return returned;
}

SERVER_TEST(begin_update_is_bounded)
{
    /* Each rule alone is enough ... */
    atomic_store(&server_rules_off, RULE_REFUSAL);
    assert_true(readers_cannot_hold_up());
    atomic_store(&server_rules_off, RULE_DRAIN_DEADLINE);
    assert_true(readers_cannot_hold_up());
    /* ... without both there is no bound. A machine so busy that a lease runs out before the next
       one is asked for is no bound either: that is tried again. */
    atomic_store(&server_rules_off, RULE_REFUSAL | RULE_DRAIN_DEADLINE);
    bool bounded = true;
    for (int i = 0; i < 3 && bounded; i++)
        bounded = readers_cannot_hold_up();
    atomic_store(&server_rules_off, 0);
    assert_false(bounded);
    assert_true(readers_cannot_hold_up());
}

static bool late_end_is_stale(void)
{
    fanin_server *s = start(0);
    peer p = peer_open(s);
    grant g = peer_lease(&p);
    server_begin(s);
    server_commit(s, 2);
    return !peer_end(&p, &g, false).good;
}

SERVER_TEST(end_confirms_the_epoch)
{
    check(late_end_is_stale, RULE_END_CHECK);
}

static bool other_step_is_refused(void)
{
    fanin_server *s = start(0);
    peer p = peer_open(s);
    grant g = peer_newest(&p);
    server_begin(s);
    server_commit(s, 2);
    return !peer_begin(&p, &g).granted;
}

SERVER_TEST(begin_minds_the_step)
{
    check(other_step_is_refused, RULE_STEP);
}

static bool other_catalog_is_refused(void)
{
    fanin_server *s = start(0);
    peer p = peer_open(s);
    grant g = peer_newest(&p);
    server_begin(s);
    server_put(s, RUN, "a", memory, BIG / 2);
    server_commit(s, 2);
    g.step = 2;
    return !peer_begin(&p, &g).granted;
}

SERVER_TEST(begin_minds_the_catalog)
{
    check(other_catalog_is_refused, RULE_CATALOG);
}

/* A reply that is underway when the epoch turns carries nothing that is written later. */
static bool reply_has_no_later_bytes(void)
{
    memset(memory, 1, BIG);
    fanin_server *s = start(0);
    peer p = peer_open_unix(s);
    peer d = peer_data_unix(s, &p);
    grant g = peer_lease(&p);
    read_entry all = {.box = 0, .count = 1};
    peer_request_read(&d, g.token, BIG, &all, 1);
    assert_false(
        peer_silent(&d, 10000)); /* has begun; the rest does not fit the socket */
    server_begin(s);
    memset(memory, 2, BIG);
    body in = peer_expect(&d, MSG_READ_OK);
    uint64_t old = 0, zero = 0;
    for (size_t i = 0; i < in.size; i++) {
        old += in.data[i] == 1;
        zero += in.data[i] == 0;
    }
    assert_int_equal(in.size, BIG);
    if (old == 0 || old == BIG)
        fail_msg("%llu old bytes of %llu", (unsigned long long)old,
                 (unsigned long long)BIG);
    return old + zero == BIG;
}

SERVER_TEST(sends_mind_the_epoch)
{
#ifdef RACES_ARE_ERRORS
    /* Without the rule the test is a data race, and ThreadSanitizer says so. */
    assert_true(reply_has_no_later_bytes());
#else
    check(reply_has_no_later_bytes, RULE_SEND_CHECK);
#endif
}

static sem_t entered, released;

/* Stands where a hook is called, once, until `released` is posted. */
static void hold(void)
{
    sem_post(&entered);
    struct timespec patience;
    clock_gettime(CLOCK_REALTIME, &patience);
    patience.tv_sec += 10;
    sem_timedwait(&released, &patience);
}

static void hold_send(void)
{
    atomic_store(&server_on_send, NULL);
    hold();
}

/* begin_update does not return while a send reads the memory. */
static bool begin_waits_for_a_send(void)
{
    fanin_server *s = start(0);
    peer p = peer_open(s), watcher = watch_stable(s);
    peer d = peer_data(s, &p);
    grant g = peer_lease(&p);
    sem_init(&entered, 0, 0);
    sem_init(&released, 0, 0);
    atomic_store(&server_on_send, hold_send);
    read_entry one = {.box = 0, .length = 100};
    peer_request_read(&d, g.token, 100, &one, 1);
    sem_wait(&entered);
    call u;
    call_start(&u, server_begin_run, s);
    peer_await(&watcher, WIRE_STATE_WRITING);
    /* Without the rule it returns at once, but on a busy machine that may take a while. */
    bool waits = !call_returns(&u, atomic_load(&server_rules_off) ? 10000 : 100);
    sem_post(&released);
    assert_int_equal(call_end(&u), FANIN_OK);
    peer_expect(&d, MSG_READ_OK);
    return waits;
}

SERVER_TEST(begin_update_waits_for_sends)
{
    check(begin_waits_for_a_send, RULE_SEND_WAIT);
}

/* Sends that are to be held are counted down to 0. */
static atomic_int to_hold;

static void hold_some(void)
{
    if (atomic_fetch_sub(&to_hold, 1) > 0)
        hold();
}

static fanin_server *start_threads(uint32_t threads)
{
    fanin_server_config c = server_config();
    c.lease_ms = 0;
    c.data_threads = threads;
    memset(memory, 1, BIG);
    fanin_server *s = server_start(&c);
    server_put(s, RUN, "a", memory, BIG);
    server_commit(s, 1);
    return s;
}

static const read_entry first_bytes = {.box = 0, .length = 100};

/* The next @p n sends stand until `released` is posted for each. */
static void hold_next(int n)
{
    sem_init(&entered, 0, 0);
    sem_init(&released, 0, 0);
    atomic_store(&to_hold, n);
    atomic_store(&server_on_send, hold_some);
}

/* Its data thread is held with the first bytes. */
static void read_held(peer *data, const grant *g)
{
    peer_request_read(data, g->token, 100, &first_bytes, 1);
    sem_wait(&entered);
}

static void read_now(peer *data, const grant *g)
{
    uint8_t got[100];
    peer_read(data, g, &first_bytes, 1, got, sizeof got);
    assert_int_equal(got[99], 1);
}

/* Readers are served while the thread of another one is held up, and a new connection comes to the
   thread that has the fewest. */
SERVER_TEST(data_threads_serve_side_by_side)
{
    fanin_server *s = start_threads(2);
    peer p = peer_open(s);
    peer a = peer_data(s, &p), b = peer_data(s, &p), a2 = peer_data(s, &p);
    grant g = peer_lease(&p);
    hold_next(1);
    read_held(&a, &g);
    read_now(&b, &g);
    peer_ping(&p);
    peer_request_read(&a2, g.token, 100, &first_bytes, 1);
    assert_true(peer_silent(&a2, 100)); /* for it is the first one's */
    peer_close(&b);
    peer_await_count(&p, s, offsetof(fanin_server_stats, sessions), 3);
    peer b2 = peer_data(s, &p), b3 = peer_data(s, &p);
    read_now(&b2, &g);
    read_now(&b3, &g);
    assert_true(peer_silent(&a, 0)); /* it is held up still */
    sem_post(&released);
    peer_expect(&a, MSG_READ_OK);
    peer_expect(&a2, MSG_READ_OK);
    assert_true(peer_end(&p, &g, false).good);
}

/* begin_update waits for the sends of all threads, however they end. */
SERVER_TEST(begin_update_waits_for_each_thread)
{
    enum { THREADS = 3 };
    fanin_server *s = start_threads(THREADS);
    peer p = peer_open(s), watcher = watch_stable(s), data[THREADS];
    grant g = peer_lease(&p);
    hold_next(THREADS);
    for (int i = 0; i < THREADS; i++) {
        data[i] = peer_data(s, &p);
        read_held(&data[i], &g);
    }
    peer_close(&data[1]);
    call u;
    call_start(&u, server_begin_run, s);
    peer_await(&watcher, WIRE_STATE_WRITING);
    for (int i = 0; i < THREADS; i++) {
        assert_false(call_returns(&u, 50));
        sem_post(&released);
    }
    assert_int_equal(call_end(&u), FANIN_OK);
    peer_expect(&data[0], MSG_READ_OK);
    peer_expect(&data[2], MSG_READ_OK);
    assert_false(peer_end(&p, &g, false).good);
}

/* A server ends, and a session, while the threads of its connections are in the middle of sends. */
SERVER_TEST(sessions_end_on_every_thread)
{
    fanin_server *s = start_threads(3);
    peer p = peer_open(s), q = peer_open(s), data[6];
    grant g = peer_lease(&p), h = peer_lease(&q);
    for (int i = 0; i < 6; i++)
        data[i] = peer_data(s, i < 3 ? &p : &q);
    hold_next(3);
    for (int i = 0; i < 3; i++)
        read_held(&data[i], &g);
    peer_close(&p);
    for (int i = 0; i < 3; i++)
        sem_post(&released);
    for (int i = 0; i < 3; i++) {
        peer_receive(&data[i]); /* what was on its way */
        peer_expect_closed(&data[i]);
    }
    for (int i = 3; i < 6; i++)
        read_now(&data[i], &h);
    peer_await_count(&q, s, offsetof(fanin_server_stats, sessions), 4);
    server_stop(&s, 0);
    for (int i = 3; i < 6; i++)
        peer_expect_closed(&data[i]);
}

/* Reads of four other epochs are still under way, so no more can be announced: the reply is
   padding, and no end says that it was good. */
SERVER_TEST(unannounced_reads_void_the_lease)
{
    memset(memory, 1, BIG);
    fanin_server *s = start(0);
    peer p = peer_open(s);
    peer d = peer_data(s, &p);
    grant g = peer_lease(&p);
    pthread_mutex_lock(&s->lock);
    publication *of = publication_find(s, RUN);
    for (size_t i = 0; i < READING_EPOCHS; i++)
        of->reading[i] = (reading){.epoch = g.epoch + 2 * (i + 1), .count = 1};
    pthread_mutex_unlock(&s->lock);
    read_entry one = {.box = 0, .length = 100};
    uint8_t got[100];
    peer_read(&d, &g, &one, 1, got, sizeof got);
    assert_int_equal(got[0], 0);
    assert_false(peer_end(&p, &g, false).good);
    pthread_mutex_lock(&s->lock);
    memset(of->reading, 0, sizeof of->reading);
    pthread_mutex_unlock(&s->lock);
    g = peer_lease(&p);
    peer_read(&d, &g, &one, 1, got, sizeof got);
    assert_int_equal(got[0], 1);
    assert_true(peer_end(&p, &g, false).good);
}

/* ---------------------------------------------------------------- snapshots */

static fanin_server *start_copies(uint32_t lease_ms)
{
    fanin_server *s = server_start_lease(lease_ms);
    memset(memory, 1, BIG);
    server_put(s, RUN, "a", memory, BIG);
    server_snapshot(s, 1);
    return s;
}

/* A snapshot, for call_start(). */
typedef struct filling {
    fanin_server *server;
    uint64_t step;
} filling;

static fanin_status fill_run(void *cookie)
{
    filling *f = cookie;
    server_begin(f->server);
    server_snapshot(f->server, f->step);
    return FANIN_OK;
}

static void hold_fill(void)
{
    atomic_store(&server_on_fill, NULL);
    hold();
}

/* ... that stands before its first byte when this returns, until `released` is posted. */
static void fill_start_held(call *c, filling *f)
{
    sem_init(&entered, 0, 0);
    sem_init(&released, 0, 0);
    atomic_store(&server_on_fill, hold_fill);
    call_start(c, fill_run, f);
    sem_wait(&entered);
}

static void fill_end(call *c)
{
    sem_post(&released);
    call_end(c);
}

/* The token of an arena is void before the arena is written again. */
static bool reuse_voids_first(void)
{
    fanin_server *s = start_copies(0);
    peer p = peer_open(s);
    grant g = peer_lease(&p);
    server_begin(s);
    server_snapshot(s, 2);
    call f;
    fill_start_held(&f, &(filling){s, 3});
    bool stale = !peer_end(&p, &g, false).good;
    fill_end(&f);
    return stale;
}

SERVER_TEST(generations_are_raised_before_reuse)
{
    check(reuse_voids_first, RULE_ARENA_RAISE);
}

/* What is published while a commit fills an arena can be read to its end. */
static bool published_is_left_alone(void)
{
    fanin_server *s = start_copies(0);
    peer p = peer_open(s);
    peer d = peer_data(s, &p);
    grant g = peer_lease(&p);
    memset(memory, 2, BIG);
    server_begin(s);
    server_snapshot(s, 2);
    read_entry last = {.box = 0, .offset = BIG - 100, .length = 100};
    uint8_t got[100] = {0};
    peer_request_read(&d, g.token, sizeof got, &last, 1);
    peer_receive(&d);
    if (d.frame.type == MSG_READ_OK)
        memcpy(got, d.body, sizeof got);
    return got[0] == 1 && got[99] == 1 && peer_end(&p, &g, false).good;
}

SERVER_TEST(the_published_arena_is_never_filled)
{
    check(published_is_left_alone, RULE_ARENA_CHOICE);
}

/* Whether a reader is refused while the published arena, against the rule, is filled. */
static bool begin_is_refused_while_filled(void)
{
    fanin_server *s = start_copies(0);
    peer p = peer_open(s);
    grant g = peer_newest(&p);
    call f;
    fill_start_held(&f, &(filling){s, 2});
    bool refused = !peer_begin(&p, &g).granted;
    fill_end(&f);
    return refused;
}

SERVER_TEST(an_arena_being_filled_cannot_be_begun)
{
    /* It is never the published one ... */
    assert_false(begin_is_refused_while_filled());
    /* ... and if it were, nobody would get it, but for the rule. */
    atomic_store(&server_rules_off, RULE_ARENA_CHOICE);
    assert_true(begin_is_refused_while_filled());
    atomic_store(&server_rules_off, RULE_ARENA_CHOICE | RULE_ARENA_BEGIN);
    assert_false(begin_is_refused_while_filled());
    atomic_store(&server_rules_off, 0);
}

/* An end that arrives within the lease, after the commit that reuses its arena, is good. */
static bool lease_holds_up_reuse(void)
{
    fanin_server *s = start_copies(5000);
    peer p = peer_open(s);
    grant g = peer_lease(&p);
    server_begin(s);
    server_snapshot(s, 2);
    call f;
    call_start(&f, fill_run, &(filling){s, 3});
    /* Without the rule it returns, on a busy machine after a while. */
    call_returns(&f, atomic_load(&server_rules_off) ? 10000 : 100);
    bool good = peer_end(&p, &g, false).good;
    call_end(&f);
    return good;
}

SERVER_TEST(reuse_waits_for_leases)
{
    check(lease_holds_up_reuse, RULE_ARENA_WAIT);
}

/* A commit returns although a reader never ends. */
static bool reuse_is_bounded(void)
{
    fanin_server *s = start_copies(100);
    peer p = peer_open(s);
    grant g = peer_lease(&p);
    server_begin(s);
    server_snapshot(s, 2);
    call f;
    call_start(&f, fill_run, &(filling){s, 3});
    bool returned = call_returns(&f, atomic_load(&server_rules_off) ? 500 : 10000);
    peer_end(&p, &g, true);
    call_end(&f);
    return returned;
}

SERVER_TEST(reuse_waits_for_the_lease_time_at_most)
{
    check(reuse_is_bounded, RULE_ARENA_DEADLINE);
}

TESTS_BETWEEN(set_up, tear_down)
