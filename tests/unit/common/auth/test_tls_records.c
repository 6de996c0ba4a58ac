/* SPDX-License-Identifier: Apache-2.0 */
/* Records of TLS after the handshake. The other end is OpenSSL's own record layer, or somebody who
   has the keys and does what is not done. */
#include "secrets.h"
#include "testing.h"
#include "tls_internal.h"
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#define LARGE 100000
#define CHACHA "TLS_CHACHA20_POLY1305_SHA256"
#define EMPTY_MOST 32

static uint8_t bytes[LARGE], got[LARGE + 1];

/* What the library has no use for. */
static struct {
    int (*read)(SSL *, void *, size_t, size_t *);
    int (*write)(SSL *, const void *, size_t, size_t *);
    int (*key_update)(SSL *, int);
    int (*suites)(SSL *, const char *);
    int (*padding)(SSL *, size_t);
    int (*shutdown)(SSL *);
} theirs;

typedef struct pair {
    tls_end *ends[2]; /* the rank's, the reader's */
    tls *t[2];
    int fds[2];
} pair;

static void start(pair *p, const char *suites)
{
    fanin_error error = FANIN_ERROR_INIT;
    const uint8_t world[16] = {5};
    tls_step steps[2] = {TLS_WAIT, TLS_WAIT};
    assert_ok(tls_end_of_rank(secret_of('1'), world, 3, &p->ends[0], &error), error);
    assert_ok(tls_end_of_reader(secret_of('1'), &p->ends[1], &error), error);
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
    memset(got, 0xee, sizeof got);
}

static void stop(pair *p)
{
    for (int i = 0; i < 2; i++) {
        tls_free(&p->t[i]);
        tls_end_free(&p->ends[i]);
        close(p->fds[i]);
    }
}

/* OpenSSL's layer of the other end reads what this one says. */
static void say(pair *p, int from, size_t size)
{
    const struct iovec all = {bytes, size};
    tls *other = p->t[1 - from];
    size_t come = 0, step;
    assert_int_equal(tls_send(p->t[from], p->fds[from], &all, 1), size);
    while (come < size) {
        assert_int_equal(tls_flush(p->t[from]), 0);
        int result = theirs.read(other->ssl, got + come, size - come, &step);
        come += result == 1 ? step : 0;
        assert_true(result == 1 || tls_unsent(p->t[from]) > 0);
    }
    assert_memory_equal(got, bytes, size);
}

/* This end hears what OpenSSL's layer of the other one says, by @p room bytes at most at once. */
static void hear(pair *p, int to, size_t size, size_t room)
{
    tls *other = p->t[1 - to];
    size_t come = 0, written;
    assert_int_equal(theirs.write(other->ssl, bytes, size, &written), 1);
    memset(got, 0xee, sizeof got);
    while (come < size) {
        size_t most = size - come < room ? size - come : room;
        assert_int_equal(tls_flush(other), 0);
        ssize_t n = tls_receive(p->t[to], p->fds[to], got + come, most);
        assert_true(n > 0 || (errno == EAGAIN && tls_unsent(other) > 0));
        come += n > 0 ? (size_t)n : 0;
    }
    assert_memory_equal(got, bytes, size);
    assert_int_equal(got[size], 0xee);
    assert_false(tls_pending(p->t[to]));
}

/* Of both ends one has its own layer, the other OpenSSL's, whose numbers of records so stay each
   other's. */
static void with_openssl(const char *suites, uint16_t suite)
{
    static const size_t sizes[] = {1,     1006,  1007,  1023, 1024,
                                   16383, 16384, 16385, LARGE};
    static const size_t rooms[] = {1, 333, 1024, 16384, 16385, LARGE};
    for (int end = 0; end < 2; end++) {
        pair p;
        start(&p, suites);
        assert_int_equal(p.t[end]->seals.suite, suite);
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
            say(&p, end, sizes[i]);
            for (size_t k = 0; k < sizeof rooms / sizeof *rooms; k++)
                hear(&p, end, sizes[i], rooms[k]);
        }
        assert_int_equal(theirs.padding(p.t[1 - end]->ssl, 4096), 1);
        for (size_t k = 0; k < sizeof rooms / sizeof *rooms; k++)
            hear(&p, end, 5000, rooms[k]);
        assert_int_equal(theirs.shutdown(p.t[1 - end]->ssl), 0);
        assert_int_equal(tls_flush(p.t[1 - end]), 0);
        assert_int_equal(tls_receive(p.t[end], p.fds[end], got, 1), 0);
        assert_true(tls_pending(p.t[end]));
        stop(&p);
    }
}

static void records_are_openssls(void **state)
{
    with_openssl(NULL, SUITE_AES_128_GCM);
}

static void the_other_suite_is_as_good(void **state)
{
    with_openssl(CHACHA, SUITE_CHACHA20_POLY1305);
}

static void keys_are_changed(void **state)
{
    for (int end = 0; end < 2; end++) {
        pair p;
        start(&p, NULL);
        const record_keys first = p.t[end]->opens;
        assert_int_equal(theirs.key_update(p.t[1 - end]->ssl, 1), 1);
        hear(&p, end, 3000, LARGE); /* their new ones; they want ours */
        assert_memory_not_equal(first.secret, p.t[end]->opens.secret, KEY_SIZE);
        const record_keys before = p.t[end]->seals;
        say(&p, end, 3000);
        assert_memory_not_equal(before.secret, p.t[end]->seals.secret, KEY_SIZE);
        const record_keys after = p.t[end]->seals;
        say(&p, end, 3000); /* once */
        assert_memory_equal(after.secret, p.t[end]->seals.secret, KEY_SIZE);
        p.t[end]->written = UINT64_C(1) << 36;
        say(&p, end, 3000);
        assert_memory_not_equal(after.secret, p.t[end]->seals.secret, KEY_SIZE);
        assert_int_equal(p.t[end]->written, 3000);
        hear(&p, end, 3000, LARGE);
        stop(&p);
    }
}

/* A record of the other end's keys, to the reader. */
static void put(pair *p, uint8_t type, const void *data, size_t size)
{
    uint8_t record[RECORD_HEADER + 20000];
    size_t made = record_seal(&p->t[0]->seals, (record_type)type, data, size, record);
    assert_true(made > size);
    assert_int_equal(send(p->fds[0], record, made, 0), made);
}

static void expect_end(pair *p, tls_fault fault)
{
    const struct iovec all = {bytes, 10};
    assert_int_equal(tls_receive(p->t[1], p->fds[1], got, LARGE), -1);
    assert_int_equal(errno, EBADMSG);
    assert_int_equal(tls_failed(p->t[1]), fault);
    assert_true(tls_pending(p->t[1]));
    assert_int_equal(tls_receive(p->t[1], p->fds[1], got, LARGE), -1);
    assert_int_equal(errno, EBADMSG);
    assert_int_equal(tls_send(p->t[1], p->fds[1], &all, 1), -1);
    assert_int_equal(errno, EBADMSG);
}

static void refused(uint8_t type, const void *data, size_t size, tls_fault fault)
{
    pair p;
    start(&p, NULL);
    put(&p, type, data, size);
    expect_end(&p, fault);
    if (type != RECORD_ALERT) { /* who does that is told */
        assert_int_equal(tls_receive(p.t[0], p.fds[0], got, 1), -1);
        assert_int_equal(errno, EBADMSG);
        assert_string_equal(tls_why(p.t[0]), "sslv3 alert unexpected message");
    }
    stop(&p);
}

static void odd_messages_are_refused(void **state)
{
    static const uint8_t large[RECORD_PLAIN] = {24};
    refused(RECORD_HANDSHAKE, "", 0, TLS_BROKEN);
    refused(RECORD_HANDSHAKE, "\x18\0\0", 3, TLS_BROKEN);
    refused(RECORD_HANDSHAKE, "\x18\0\0\1\2", 5, TLS_BROKEN);
    refused(RECORD_HANDSHAKE, "\x18\0\0\2\0\0", 6, TLS_BROKEN);
    refused(RECORD_HANDSHAKE, "\x18\0\0\1\0\4\0\0\0", 9, TLS_BROKEN);
    refused(RECORD_HANDSHAKE, "\4\0\0\5\0\0", 6, TLS_BROKEN);
    refused(RECORD_HANDSHAKE, "\x0d\0\0\0", 4, TLS_BROKEN);
    refused(RECORD_HANDSHAKE, large, sizeof large, TLS_BROKEN);
    refused(20, "\1", 1, TLS_BROKEN);
    refused(24, "\1", 1, TLS_BROKEN);
    refused(RECORD_ALERT, "\2\x33", 2, TLS_OTHER_SECRET);
    refused(RECORD_ALERT, "\2\x14", 2, TLS_BROKEN);
}

static void tickets_are_for_readers(void **state)
{
    pair p;
    uint8_t record[100];
    start(&p, NULL);
    put(&p, RECORD_HANDSHAKE, "\4\0\0\2\0\0\4\0\0\1\0", 11);
    assert_int_equal(tls_receive(p.t[1], p.fds[1], got, LARGE), -1);
    assert_int_equal(errno, EAGAIN);
    say(&p, 1, 100);
    size_t made =
        record_seal(&p.t[1]->seals, RECORD_HANDSHAKE, "\4\0\0\2\0\0", 6, record);
    assert_int_equal(send(p.fds[1], record, made, 0), made);
    assert_int_equal(tls_receive(p.t[0], p.fds[0], got, LARGE), -1);
    assert_int_equal(errno, EBADMSG);
    stop(&p);
}

/* A thread's time is not to be had for nothing. */
static void records_without_data_end(void **state)
{
    pair p;
    start(&p, NULL);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < EMPTY_MOST; i++)
            put(&p, RECORD_DATA, "", 0);
        assert_int_equal(tls_receive(p.t[1], p.fds[1], got, LARGE), -1);
        assert_int_equal(errno, EAGAIN);
        put(&p, RECORD_DATA, "x", 1);
        assert_int_equal(tls_receive(p.t[1], p.fds[1], got, LARGE), 1);
    }
    for (int i = 0; i <= EMPTY_MOST; i++)
        put(&p, RECORD_DATA, "", 0);
    expect_end(&p, TLS_BROKEN);
    stop(&p);
}

/* What comes before a bad record is taken, and that is told next. */
static void what_is_no_record_is_refused(void **state)
{
    static const uint8_t odd[][RECORD_HEADER] = {
        {22, 3, 3, 0, 20}, {21, 3, 3, 0, 2},    {0, 0, 0, 0, 0},      {23, 3, 3, 0, 16},
        {23, 3, 3, 0, 0},  {23, 3, 3, 0x41, 1}, {23, 3, 3, 255, 255},
    };
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        pair p;
        start(&p, NULL);
        put(&p, RECORD_DATA, "good", 4);
        assert_int_equal(send(p.fds[0], odd[i], RECORD_HEADER, 0), RECORD_HEADER);
        assert_int_equal(tls_receive(p.t[1], p.fds[1], got, LARGE), 4);
        expect_end(&p, TLS_BROKEN);
        stop(&p);
    }
}

/* Content of more than a record may hold, which its length allows. */
static void what_is_too_long_is_refused(void **state)
{
    pair p;
    start(&p, NULL);
    put(&p, RECORD_DATA, bytes, RECORD_PLAIN + 1);
    expect_end(&p, TLS_BROKEN);
    stop(&p);
}

/* Each bit of a record, wherever it is opened: none of what was altered is left where data goes. */
static void no_altered_bit_is_left(void **state)
{
    enum { CONTENT = 1500, STEP = 37 };
    static const size_t rooms[] = {0, 100, CONTENT, CONTENT + 1, LARGE};
    uint8_t record[RECORD_HEADER + CONTENT + RECORD_ADDS], rest[sizeof record];
    pair p;
    record_found found;
    start(&p, NULL);
    const uint64_t number = p.t[1]->opens.number;
    size_t made = record_seal(&p.t[0]->seals, RECORD_DATA, bytes, CONTENT, record);
    assert_int_equal(made, sizeof record);
    for (size_t i = 0; i < sizeof rooms / sizeof *rooms; i++) {
        for (size_t bit = 0; bit < 8 * made; bit += STEP) {
            record[bit / 8] ^= (uint8_t)(1 << bit % 8);
            memset(got, 0xee, sizeof got);
            p.t[1]->opens.number = number;
            assert_false(record_open(&p.t[1]->opens, record, made - RECORD_HEADER, got,
                                     rooms[i], rest, &found));
            size_t here = rooms[i] < CONTENT + 1 ? rooms[i] : CONTENT + 1;
            for (size_t k = 0; k < here; k++)
                assert_int_equal(got[k], 0);
            assert_int_equal(got[here], 0xee);
            record[bit / 8] ^= (uint8_t)(1 << bit % 8);
        }
        p.t[1]->opens.number = number;
        assert_true(record_open(&p.t[1]->opens, record, made - RECORD_HEADER, got,
                                rooms[i], rest, &found));
        assert_int_equal(found.size, CONTENT);
        assert_int_equal(found.here, rooms[i] < CONTENT ? rooms[i] : CONTENT);
        assert_memory_equal(got, bytes, found.here);
        assert_memory_equal(rest, bytes + found.here, CONTENT - found.here);
        /* Its number is another by now: once. */
        assert_false(record_open(&p.t[1]->opens, record, made - RECORD_HEADER, got,
                                 rooms[i], rest, &found));
    }
    stop(&p);
}

static bool find_theirs(void)
{
    const char *named = getenv("FANIN_OPENSSL_LIBRARY");
    void *handle = dlopen(named ? named : "libssl.so.3", RTLD_NOW);
    if (!handle)
        return false;
    *(void **)&theirs.read = dlsym(handle, "SSL_read_ex");
    *(void **)&theirs.write = dlsym(handle, "SSL_write_ex");
    *(void **)&theirs.key_update = dlsym(handle, "SSL_key_update");
    *(void **)&theirs.suites = dlsym(handle, "SSL_set_ciphersuites");
    *(void **)&theirs.padding = dlsym(handle, "SSL_set_block_padding");
    *(void **)&theirs.shutdown = dlsym(handle, "SSL_shutdown");
    return theirs.read && theirs.write && theirs.key_update && theirs.suites &&
           theirs.padding && theirs.shutdown;
}

static int set_up(void **state)
{
    for (size_t i = 0; i < LARGE; i++)
        bytes[i] = (uint8_t)(i * 7 + i / 251);
    return find_theirs() ? 0 : -1;
}

int main(void)
{
    if (openssl_is_missing())
        return 77;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(records_are_openssls),
        cmocka_unit_test(the_other_suite_is_as_good),
        cmocka_unit_test(keys_are_changed),
        cmocka_unit_test(odd_messages_are_refused),
        cmocka_unit_test(tickets_are_for_readers),
        cmocka_unit_test(records_without_data_end),
        cmocka_unit_test(what_is_no_record_is_refused),
        cmocka_unit_test(what_is_too_long_is_refused),
        cmocka_unit_test(no_altered_bit_is_left),
    };
    return cmocka_run_group_tests_name("tls_records", tests, set_up, secrets_tear_down);
}
