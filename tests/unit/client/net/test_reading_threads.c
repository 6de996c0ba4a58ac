/* SPDX-License-Identifier: Apache-2.0 */
/* Threads that read: how many, who reads what, and that they work, rest and end. */
#include "clock.h"
#include "topology.h"
#include "frame.h"
#include "net/threads.h"
#include "testing.h"
#include "thread.h"
#include <limits.h>
#include <stdatomic.h>

#define MS UINT64_C(1000000)
#define MIB ((uint64_t)1 << 20)
#define WINDOW (64 * MIB) /* the default */

/* ------------------------------------------------------------------- how many */

TEST(as_many_as_are_worth_it)
{
    static const struct {
        reading_size size;
        unsigned threads;
    } cases[] = {
        {{0, 2, 8, 1700 * MIB, WINDOW}, 1}, /* the other CPU is the ranks' */
        {{0, 3, 8, 1700 * MIB, WINDOW}, 1},
        {{0, 4, 8, 1700 * MIB, WINDOW}, 2},
        {{0, 32, 8, 1700 * MIB, WINDOW}, 8},
        {{0, 32, 2, 1700 * MIB, WINDOW}, 2},
        {{0, 256, 64, 1700 * MIB, WINDOW}, 8}, /* the window has no room for more */
        {{0, 256, 64, 1700 * MIB, 2 * WINDOW}, 16},
        {{0, 32, 8, 15 * MIB, WINDOW}, 1},
        {{0, 32, 8, 16 * MIB, WINDOW}, 2},
        {{0, 32, 8, 0, WINDOW}, 1},
        {{0, 32, 8, 1700 * MIB, 1}, 1},
        {{1, 32, 8, 1700 * MIB, WINDOW}, 1},
        {{4, 1, 8, 1, WINDOW}, 4}, /* who asks gets it */
        {{64, 2, 8, 1, WINDOW}, 8},
        {{64, 2, 64, 1, WINDOW}, 16},
        {{0, 256, 1024, 1700 * MIB, 1024 * WINDOW}, READING_THREADS_MOST},
        {{4, 2, 8, 1, 4096}, 1},
        {{4, 2, 0, 0, WINDOW}, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        unsigned n = reading_threads_for(&cases[i].size);
        if (n != cases[i].threads)
            fail_msg("case %zu: %u threads, not %u", i, n, cases[i].threads);
        /* Together they never ask for more than the window, or than one request. */
        assert_true(n == 1 || n * (uint64_t)LIMIT_READ_BYTES <= cases[i].size.window);
    }
}

/* Eight workers of a host that decipher leave its trainers CPUs. */
TEST(connections_by_tls_on_one_host_are_few)
{
    static const struct {
        unsigned cpus, plain, ciphered;
    } cases[] = {{1, 4, 1},  {2, 4, 1},  {8, 4, 1},  {15, 4, 1},
                 {16, 4, 2}, {31, 4, 3}, {32, 4, 4}, {512, 4, 4}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(reading_connections_for(cases[i].cpus, false), cases[i].plain);
        assert_int_equal(reading_connections_for(cases[i].cpus, true),
                         cases[i].ciphered);
    }
}

/* -------------------------------------------------------------- who reads what */

/* What each thread reads, if a source's readers read as much of it each. */
static void share_cut(const uint64_t *bytes, size_t n, unsigned threads, unsigned most,
                      uint64_t *of_thread)
{
    uint64_t threads_of[64];
    assert_true(reading_threads_share(bytes, n, threads, most, threads_of));
    for (unsigned i = 0; i < threads; i++)
        of_thread[i] = 0;
    for (size_t i = 0; i < n; i++) {
        unsigned readers = (unsigned)__builtin_popcountll(threads_of[i]);
        assert_true(readers > 0 && readers <= most);
        assert_true(threads == 64 || threads_of[i] >> threads == 0);
        for (unsigned j = 0; j < threads; j++) {
            if (threads_of[i] >> j & 1)
                of_thread[j] += bytes[i] / readers;
        }
    }
}

static void share(const uint64_t *bytes, size_t n, unsigned threads,
                  uint64_t *of_thread)
{
    share_cut(bytes, n, threads, 1, of_thread);
}

TEST(bytes_are_shared_evenly)
{
    static const uint64_t even[] = {5, 5, 5, 5, 5, 5, 5, 5};
    static const uint64_t uneven[] = {0, 100, 7, 30, 0, 30, 33, 0};
    uint64_t of[8];
    for (unsigned threads = 1; threads <= 8; threads *= 2) {
        share(even, 8, threads, of);
        for (unsigned i = 0; i < threads; i++)
            assert_int_equal(of[i], 40 / threads);
    }
    share(even, 7, 3, of);
    assert_int_equal(of[0], 10); /* the calling thread has the least */
    share(uneven, 8, 2, of);
    assert_int_equal(of[0], 100);
    assert_int_equal(of[1], 100);
    share(uneven, 8, 3, of);
    assert_int_equal(of[2], 100);
    assert_int_equal(of[0] + of[1], 100);
    assert_true(of[0] <= 67 && of[1] <= 67);
    share(uneven, 0, 4, of);
}

/* Where there are fewer sources than threads, or one has far more than the others, several read it.
   */
TEST(a_large_source_is_cut)
{
    static const uint64_t one[] = {80}, two[] = {90, 10}, three[] = {40, 40, 40};
    static const uint64_t near[] = {41, 40, 39, 40}, empty[] = {0, 0};
    uint64_t of[64];
    for (unsigned threads = 1; threads <= 8; threads *= 2) {
        share_cut(one, 1, threads, 16, of);
        for (unsigned i = 0; i < threads; i++)
            assert_int_equal(of[i], 80 / threads);
    }
    share_cut(one, 1, 8, 4, of); /* it has no more connections */
    for (unsigned i = 0; i < 8; i++)
        assert_int_equal(of[i], i < 4 ? 0 : 20);
    share_cut(two, 2, 2, 4, of);
    assert_int_equal(of[0] + of[1], 100);
    assert_true(of[0] == 45 || of[0] == 55);
    share_cut(three, 3, 4, 4, of);
    for (unsigned i = 0; i < 4; i++)
        assert_true(of[i] == 20 || of[i] == 40);
    share_cut(near, 4, 4, 4, of); /* a little more is no reason */
    for (unsigned i = 0; i < 4; i++)
        assert_true(of[i] >= 39 && of[i] <= 41);
    share_cut(one, 1, 64, 64, of);
    assert_int_equal(of[0], 1);
    assert_int_equal(of[63], 1);
    share_cut(empty, 2, 4, 4, of);
}

/* -------------------------------------------------------------- work and rest */

#define THREADS 3

typedef struct job {
    reading_threads *threads;
    atomic_uint turns;
    unsigned most; /* turns; 0: until it is to rest */
} job;

static bool turn(void *cookie, deadline *wake)
{
    job *j = cookie;
    unsigned turns = atomic_fetch_add(&j->turns, 1) + 1;
    assert_true(*wake == UINT64_MAX);
    reading_threads_tell(j->threads);
    return j->most == 0 || turns < j->most;
}

/* A thread whose loop has nothing waits in it until it is to rest. */
TEST(they_work_until_they_are_to_rest)
{
    loop owner;
    assert_int_equal(loop_init(&owner, NULL), FANIN_OK);
    reading_threads *t = reading_threads_create(&owner);
    assert_non_null(t);
    assert_int_equal(reading_threads_have(t, 1), 1);
    assert_int_equal(reading_threads_have(t, THREADS), THREADS);
    assert_int_equal(reading_threads_have(t, 1), THREADS); /* they are kept */
    for (int round = 0; round < 200; round++) {
        job jobs[THREADS] = {{t, 0, 0}, {t, 0, 1}, {t, 0, 0}};
        for (unsigned i = 0; i < THREADS; i++)
            reading_threads_go(t, i, turn, &jobs[i]);
        while (atomic_load(&jobs[0].turns) == 0 || atomic_load(&jobs[1].turns) == 0 ||
               atomic_load(&jobs[2].turns) == 0)
            loop_step(&owner, deadline_in_ms(20000));
        reading_threads_rest(t);
        for (unsigned i = 0; i < THREADS; i++)
            assert_int_equal(jobs[i].turns, 1);
    }
    reading_threads_rest(t); /* they do */
    reading_threads_destroy(&t);
    assert_null(t);
    reading_threads_destroy(&t);
    loop_finish(&owner);
}

/* Told often or once, the loop of who is told has one event, and then waits again. */
TEST(telling_wakes_once)
{
    loop owner;
    assert_int_equal(loop_init(&owner, NULL), FANIN_OK);
    reading_threads *t = reading_threads_create(&owner);
    assert_non_null(t);
    for (int times = 1; times <= 3; times++) {
        for (int i = 0; i < times; i++)
            reading_threads_tell(t);
        uint64_t start = clock_ns();
        loop_step(&owner, deadline_in_ms(20000));
        assert_true(clock_ns() - start < 10000 * MS);
        start = clock_ns();
        loop_step(&owner, start + 20 * MS);
        assert_true(clock_ns() - start >= 20 * MS);
    }
    reading_threads_destroy(&t);
    loop_finish(&owner);
}

TEST(those_that_never_worked_end)
{
    loop owner;
    assert_int_equal(loop_init(&owner, NULL), FANIN_OK);
    reading_threads *t = reading_threads_create(&owner);
    assert_non_null(t);
    unsigned cpus = usable_cpus(), quota = cpu_quota("/proc", "/sys");
    assert_int_equal(reading_threads_cpus(t), cpus < quota ? cpus : quota);
    assert_int_equal(reading_threads_have(t, UINT_MAX), READING_THREADS_MOST);
    reading_threads_destroy(&t);
    loop_finish(&owner);
}
