/* SPDX-License-Identifier: Apache-2.0 */
/* What goes after the handshake beside data: new keys, tickets, alerts, and what is no record. The
   other end is OpenSSL as its own program would use it. */
#include "secrets.h"
#include "testing.h"
#include "tls_internal.h"
#include <dlfcn.h>
#include <sys/socket.h>

#define LARGE 100000
#define FLOOD 100000 /* changes of keys */
#define KEY_UPDATE 24
#define HANDSHAKE 22
#define RECORDS_MOST (UINT64_C(1) << 22)

static uint8_t bytes[LARGE], got[LARGE + 1];
static unsigned updates; /* that OpenSSL has read */

typedef void (*message_fn)(int, int, int, const void *, size_t, SSL *, void *);

/* What the library has no use for. */
static struct {
    int (*suites)(SSL *, const char *);
    int (*padding)(SSL *, size_t);
    int (*shutdown)(SSL *);
    void (*watch)(SSL *, message_fn);
} theirs;

typedef struct pair {
    tls_end *ends[2]; /* the rank's, the reader's */
    tls *t[2];
    int fds[2];
} pair;

static void on_message(int is_sent, int version, int type, const void *data,
                       size_t size, SSL *ssl, void *cookie)
{
    (void)version, (void)ssl, (void)cookie;
    updates += !is_sent && type == HANDSHAKE && size > 0 &&
               *(const uint8_t *)data == KEY_UPDATE;
}

static void start(pair *p, const char *suites)
{
    const uint8_t world[16] = {5};
    tls_step steps[2] = {TLS_WAIT, TLS_WAIT};
    assert_works(tls_end_of_rank(secret_of('1'), world, 3, &p->ends[0], ERROR));
    assert_works(tls_end_by_secret(secret_of('1'), NULL, &p->ends[1], ERROR));
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, p->fds), 0);
    for (int i = 0; i < 2; i++)
        assert_non_null(p->t[i] = tls_new(p->ends[i], p->fds[i]));
    if (suites)
        assert_int_equal(theirs.suites(p->t[1]->ssl, suites), 1);
    for (int turn = 0; turn < 4; turn++)
        for (int i = 1; i >= 0; i--)
            steps[i] = steps[i] == TLS_WAIT ? tls_handshake(p->t[i]) : steps[i];
    assert_int_equal(steps[0], TLS_UP);
    assert_int_equal(steps[1], TLS_UP);
    updates = 0;
    for (int i = 0; i < 2; i++)
        theirs.watch(p->t[i]->ssl, on_message);
}

static void stop(pair *p)
{
    for (int i = 0; i < 2; i++) {
        tls_free(&p->t[i]);
        tls_end_free(&p->ends[i]);
        close(p->fds[i]);
    }
}

/* By @p room bytes at most at once. */
static void say(pair *p, int from, size_t size, size_t room)
{
    const struct iovec all = {bytes, size};
    size_t come = 0;
    memset(got, 0xee, sizeof got);
    assert_int_equal(tls_send(p->t[from], p->fds[from], &all, 1), size);
    while (come < size) {
        size_t most = size - come < room ? size - come : room;
        ssize_t n = tls_receive(p->t[1 - from], p->fds[1 - from], got + come, most);
        assert_true(n > 0 || (errno == EAGAIN && tls_unsent(p->t[from]) > 0));
        come += n > 0 ? (size_t)n : 0;
        assert_int_equal(tls_flush(p->t[from]), 0);
    }
    assert_memory_equal(got, bytes, size);
    assert_int_equal(got[size], 0xee);
    assert_false(tls_pending(p->t[1 - from]));
}

static void all_sizes_arrive(const char *suites)
{
    static const size_t sizes[] = {1, 1007, 16383, 16384, 16385, LARGE};
    static const size_t rooms[] = {1, 333, 16384, 16385, LARGE};
    pair p;
    start(&p, suites);
    for (int from = 0; from < 2; from++) {
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            for (size_t k = 0; k < sizeof rooms / sizeof *rooms; k++)
                say(&p, from, sizes[i], rooms[k]);
        assert_int_equal(theirs.padding(p.t[from]->ssl, 4096), 1);
        say(&p, from, 5000, 333);
    }
    stop(&p);
}

TEST(either_suite_is_as_good)
{
    all_sizes_arrive(NULL);
    all_sizes_arrive("TLS_CHACHA20_POLY1305_SHA256");
}

/* Both ends' own close looks the same: the other's data ends. */
TEST(who_says_goodbye_has_closed)
{
    pair p;
    start(&p, NULL);
    const struct iovec all = {bytes, 10};
    assert_int_equal(tls_send(p.t[0], p.fds[0], &all, 1), 10);
    assert_int_equal(theirs.shutdown(p.t[0]->ssl), 0);
    assert_int_equal(tls_flush(p.t[0]), 0);
    assert_int_equal(tls_receive(p.t[1], p.fds[1], got, LARGE), 10);
    assert_true(tls_pending(p.t[1]));
    assert_int_equal(tls_receive(p.t[1], p.fds[1], got, 1), 0);
    assert_int_equal(tls_receive(p.t[1], p.fds[1], got, 1), 0);
    stop(&p);
}

TEST(keys_are_changed_when_asked)
{
    pair p;
    start(&p, NULL);
    for (int end = 0; end < 2; end++) {
        const SSL *other = p.t[1 - end]->ssl;
        updates = 0;
        assert_int_equal(p.ends[0]->o->SSL_key_update((SSL *)(uintptr_t)other, 1), 1);
        say(&p, 1 - end, 3000, LARGE); /* their new ones; they want ours */
        assert_int_equal(updates, 1);
        say(&p, end, 3000, LARGE);
        assert_int_equal(updates, 2);
        say(&p, end, 3000, LARGE); /* once */
        assert_int_equal(updates, 2);
    }
    stop(&p);
}

TEST(keys_are_changed_in_time)
{
    pair p;
    start(&p, NULL);
    for (int end = 0; end < 2; end++) {
        updates = 0;
        p.t[end]->records = RECORDS_MOST - 1;
        say(&p, end, 3000, LARGE);
        assert_int_equal(updates, 0);
        say(&p, end, 3000, LARGE);
        assert_int_equal(updates, 1);
        say(&p, end, 3000, LARGE);
        say(&p, 1 - end, 3000, LARGE);
        assert_int_equal(updates, 1);
    }
    stop(&p);
}

static void expect_end(pair *p, int end)
{
    const struct iovec all = {bytes, 10};
    for (int again = 0; again < 2; again++) {
        assert_int_equal(tls_receive(p->t[end], p->fds[end], got, LARGE), -1);
        assert_int_equal(errno, EBADMSG);
        assert_int_equal(tls_failed(p->t[end]), TLS_BROKEN);
        assert_non_null(tls_broken(p->t[end]));
        assert_true(tls_pending(p->t[end]));
    }
    assert_int_equal(tls_send(p->t[end], p->fds[end], &all, 1), -1);
    assert_int_equal(errno, EBADMSG);
}

/* A thread's time is not to be had for nothing. */
TEST(changes_of_keys_end)
{
    for (int end = 0; end < 2; end++) {
        pair p;
        start(&p, NULL);
        const openssl *o = p.ends[0]->o;
        SSL *other = p.t[1 - end]->ssl;
        for (int round = 0; round < 3; round++) {
            for (int i = 0; i < 100; i++)
                assert_true(o->SSL_key_update(other, 0) == 1 &&
                            o->SSL_do_handshake(other) == 1);
            say(&p, 1 - end, 10, 10);
        }
        ssize_t n = -1;
        errno = EAGAIN;
        for (int i = 0; i < FLOOD && n < 0 && errno == EAGAIN; i++) {
            assert_true(o->SSL_key_update(other, 0) == 1 &&
                        o->SSL_do_handshake(other) == 1);
            assert_int_equal(tls_flush(p.t[1 - end]), 0);
            n = tls_receive(p.t[end], p.fds[end], got, LARGE);
        }
        expect_end(&p, end);
        stop(&p);
    }
}

/* What comes before it is taken, and who sends it is told. */
TEST(what_is_no_record_is_refused)
{
    static const uint8_t odd[][30] = {
        {22, 3, 3, 0, 20}, {0, 0, 0, 0, 0},       {23, 3, 3, 0, 16},
        {23, 3, 3, 0, 0},  {23, 3, 3, 0x41, 255}, {23, 3, 3, 255, 255},
    };
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        pair p;
        const struct iovec all = {bytes, 4};
        start(&p, NULL);
        assert_int_equal(tls_send(p.t[0], p.fds[0], &all, 1), 4);
        assert_int_equal(send(p.fds[0], odd[i], sizeof odd[i], 0), sizeof odd[i]);
        assert_int_equal(tls_receive(p.t[1], p.fds[1], got, LARGE), 4);
        expect_end(&p, 1);
        assert_int_equal(tls_receive(p.t[0], p.fds[0], got, 1), -1);
        assert_int_equal(errno, EBADMSG);
        assert_says(tls_why(p.t[0]), "alert");
        stop(&p);
    }
}

static bool find_theirs(void)
{
    const char *named = getenv("FANIN_OPENSSL_LIBRARY");
    void *handle = dlopen(named ? named : "libssl.so.3", RTLD_NOW);
    if (!handle)
        return false;
    *(void **)&theirs.suites = dlsym(handle, "SSL_set_ciphersuites");
    *(void **)&theirs.padding = dlsym(handle, "SSL_set_block_padding");
    *(void **)&theirs.shutdown = dlsym(handle, "SSL_shutdown");
    *(void **)&theirs.watch = dlsym(handle, "SSL_set_msg_callback");
    return theirs.suites && theirs.padding && theirs.shutdown && theirs.watch;
}

static int set_up(void **state)
{
    for (size_t i = 0; i < LARGE; i++)
        bytes[i] = (uint8_t)(i * 7 + i / 251);
    return find_theirs() ? 0 : -1;
}

TESTS_BETWEEN(set_up, secrets_tear_down)

int main(void)
{
    if (openssl_is_missing())
        return 77;
    return tests_run(NULL);
}
