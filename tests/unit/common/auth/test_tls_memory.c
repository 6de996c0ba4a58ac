/* SPDX-License-Identifier: Apache-2.0 */
/* OpenSSL without memory, allocation by allocation: the end that lacks it says so, and nobody is
   taken for a stranger. */
#include "secrets.h"
#include "testing.h"
#include "tls.h"
#include <dlfcn.h>
#include <limits.h>
#include <sys/socket.h>

#define RANK 3

/* Of the thread that tests: allocations until one fails, and those that nobody has freed. */
static _Thread_local long left = LONG_MAX, live;
static _Thread_local bool failed, all;

static bool fails(void)
{
    if (left == LONG_MAX || (failed && !all) || left-- > 0)
        return false;
    left = 0;
    failed = true;
    errno = ENOMEM;
    return true;
}

static void *allocate(size_t size, const char *file, int line)
{
    void *made = fails() ? NULL : malloc(size);
    live += made != NULL;
    return made;
}

static void give_back(void *old, const char *file, int line)
{
    live -= old != NULL;
    free(old);
}

static void *change(void *old, size_t size, const char *file, int line)
{
    if (!old)
        return allocate(size, file, line);
    if (size == 0) {
        give_back(old, file, line);
        return NULL;
    }
    return fails() ? NULL : realloc(old, size);
}

/* Before OpenSSL has allocated anything. */
static bool take_over_memory(void)
{
    int (*set)(void *(*)(size_t, const char *, int),
               void *(*)(void *, size_t, const char *, int),
               void (*)(void *, const char *, int));
    const char *named = getenv("FANIN_OPENSSL_LIBRARY");
    void *library = dlopen(named ? named : "libssl.so.3", RTLD_NOW);
    void *found = library ? dlsym(library, "CRYPTO_set_mem_functions") : NULL;
    memcpy(&set, &found, sizeof set);
    return found && set(allocate, change, give_back) == 1;
}

static void start_failing(long after)
{
    failed = false;
    left = after;
}

static bool stop_failing(void)
{
    left = LONG_MAX;
    return failed;
}

/* ------------------------------------------------------------------ two ends */

typedef struct pair {
    tls *t[2]; /* the rank's, the reader's */
    int fds[2];
} pair;

static uint8_t world[16] = {5};
static tls_end *ends[2];

static void start(pair *p)
{
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, p->fds), 0);
    for (int i = 0; i < 2; i++)
        assert_non_null(p->t[i] = tls_new(ends[i], p->fds[i]));
}

static void stop(pair *p)
{
    for (int i = 0; i < 2; i++) {
        tls_free(&p->t[i]);
        close(p->fds[i]);
    }
}

/* With an end whose OpenSSL lacks memory after so many allocations; -1: none. Whether it did. */
static bool shake(pair *p, int poor, long after)
{
    tls_step steps[2] = {TLS_WAIT, TLS_WAIT};
    long rest = after;
    bool lacked = false;
    for (int turn = 0; turn < 8; turn++)
        for (int i = 0; i < 2; i++) {
            if (steps[i] != TLS_WAIT)
                continue;
            if (i == poor)
                start_failing(rest);
            failed = i == poor && lacked;
            steps[i] = tls_handshake(p->t[i]);
            if (i == poor) {
                rest = left;
                lacked = stop_failing();
            }
        }
    return lacked;
}

static void good_pair(pair *p)
{
    start(p);
    (void)shake(p, -1, LONG_MAX);
    assert_true(tls_is_up(p->t[0]) && tls_is_up(p->t[1]));
}

/* Handshakes in need; those of which OpenSSL tells a reason that could be another one as well, and
   is nobody's. */
static unsigned tries, unexplained;

/* The other end waits, hears that nothing goes on, or did not notice. */
static void nobody_is_blamed(const pair *p, int poor)
{
    tls_fault own = tls_failed(p->t[poor]), other = tls_failed(p->t[1 - poor]);
    tries++;
    unexplained += own == TLS_BROKEN;
    if (own == TLS_BROKEN || (own == TLS_FINE && tls_is_up(p->t[poor])))
        return;
    if (own != TLS_MEMORY)
        fail_msg("end %d says %d: %s", poor, own, tls_why(p->t[poor]));
    if (other != TLS_FINE && other != TLS_GAVE_UP)
        fail_msg("the other of %d says %d: %s", poor, other, tls_why(p->t[1 - poor]));
}

static void shake_in_need(int poor, long every)
{
    bool lacked = true;
    for (long after = 0; lacked; after += every) {
        pair p;
        start(&p);
        lacked = shake(&p, poor, after);
        nobody_is_blamed(&p, poor);
        stop(&p);
    }
}

/* Of the allocations of a handshake one of so many is lacking. */
static void shake_all_in_need(long every)
{
    tries = unexplained = 0;
    for (int poor = 0; poor < 2; poor++) {
        pair p;
        good_pair(&p); /* what is made once a process is made */
        stop(&p);
        all = true;
        shake_in_need(poor, every);
        all = false;
        shake_in_need(poor, every);
    }
    assert_true(unexplained * 50 <= tries);
}

/* ---------------------------------------------------------------- the secret */

static int with_secret(void **state)
{
    assert_works(tls_end_of_rank(secret_of('1'), world, RANK, &ends[0], ERROR));
    assert_works(tls_end_by_secret(secret_of('1'), NULL, &ends[1], ERROR));
    return 0;
}

static int without_ends(void **state)
{
    for (int i = 0; i < 2; i++)
        tls_end_free(&ends[i]);
    return 0;
}

#define CASE(name) TEST_WITH(name, with_secret, without_ends)

CASE(handshakes_by_the_secret)
{
    shake_all_in_need(1);
}

CASE(a_rank_proves_itself_or_not)
{
    pair p;
    uint8_t proof[TLS_PROOF_SIZE];
    bool lacked = true;
    good_pair(&p);
    for (long after = 0; lacked; after++) {
        start_failing(after);
        bool made = tls_prove_rank(p.t[0], proof);
        lacked = stop_failing();
        assert_true(made || lacked);
        if (made)
            assert_true(tls_check_rank(p.t[1], world, RANK, proof, sizeof proof));
    }
    stop(&p);
}

CASE(who_cannot_check_a_proof_knows_that)
{
    bool lacked = true;
    for (long after = 0; lacked; after++) {
        pair p;
        uint8_t proof[TLS_PROOF_SIZE];
        good_pair(&p);
        assert_true(tls_prove_rank(p.t[0], proof));
        start_failing(after);
        bool good = tls_check_rank(p.t[1], world, RANK, proof, sizeof proof);
        lacked = stop_failing();
        assert_int_equal(tls_failed(p.t[1]), good ? TLS_FINE : TLS_MEMORY);
        stop(&p);
    }
}

/* The end that sends, or the one that receives. */
static void data_in_need(int poor)
{
    static uint8_t bytes[40000], got[sizeof bytes];
    const struct iovec text = {bytes, sizeof bytes};
    bool lacked = true;
    for (long after = 0; lacked; after++) {
        pair p;
        good_pair(&p);
        start_failing(poor == 0 ? after : LONG_MAX);
        ssize_t sent = tls_send(p.t[0], p.fds[0], &text, 1);
        int why = errno;
        lacked = stop_failing();
        start_failing(poor == 1 ? after : LONG_MAX);
        ssize_t come = tls_receive(p.t[1], p.fds[1], got, sizeof got);
        why = poor == 0 ? why : errno;
        lacked |= stop_failing();
        if ((poor == 0 ? sent : come) < 0) {
            assert_int_equal(why, ENOMEM);
            assert_int_equal(tls_failed(p.t[poor]), TLS_MEMORY);
            assert_int_equal(tls_failed(p.t[1 - poor]), TLS_FINE);
        }
        stop(&p);
    }
}

CASE(data_without_memory_blames_nobody)
{
    data_in_need(0);
    data_in_need(1);
}

CASE(what_is_begun_is_given_back)
{
    bool lacked = true;
    pair p;
    good_pair(&p);
    for (long after = 0; lacked; after++) {
        long before = live;
        start_failing(after);
        tls *t = tls_new(ends[1], p.fds[1]);
        lacked = stop_failing();
        assert_true(t || lacked);
        tls_free(&t);
        assert_int_equal(live, before);
    }
    stop(&p);
}

TEST(ends_lack_it_too)
{
    bool lacked = true;
    for (long after = 0; lacked; after++) {
        tls_end *end = NULL;
        fanin_error error = FANIN_ERROR_INIT;
        start_failing(after);
        fanin_status status = tls_end_by_secret(secret_of('1'), NULL, &end, &error);
        lacked = stop_failing();
        if (status != FANIN_OK && status != FANIN_ERR_MEMORY)
            fail_msg("%ld: %s (%s)", after, error.message, error.remedy);
        tls_end_free(&end);
    }
}

/* -------------------------------------------------------------- certificates */

static int with_certificates(void **state)
{
    *state = certified_ends_of(RANK, ends) ? ends : NULL;
    return 0;
}

TEST_WITH(handshakes_by_certificates, with_certificates, without_ends)
{
    if (!*state)
        skip();
    shake_all_in_need(37); /* a handshake has 4,000, and signs */
}

TEST_WITH(whose_certificate_it_is, with_certificates, without_ends)
{
    if (!*state)
        skip();
    bool lacked = true;
    for (long after = 0; lacked; after++) {
        pair p;
        good_pair(&p);
        start_failing(after);
        bool good = tls_check_rank(p.t[1], world, RANK, NULL, 0);
        lacked = stop_failing();
        assert_int_equal(tls_failed(p.t[1]), good ? TLS_FINE : TLS_MEMORY);
        stop(&p);
    }
}

TESTS_BETWEEN(NULL, secrets_tear_down)

int main(void)
{
    bool is_ours = take_over_memory();
    if (openssl_is_missing())
        return 77;
    assert_true(is_ours);
    return tests_run(NULL);
}
