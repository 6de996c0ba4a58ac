/* SPDX-License-Identifier: Apache-2.0 */
/* Two ends of TLS on a pair of sockets. Who is between them: test_tls_middle.c. */
#include "secrets.h"
#include "testing.h"
#include "tls_internal.h"
#include <sys/socket.h>

#define WORLD_BYTE 5
#define RANK 3
#define LARGE ((size_t)3 << 20)

static uint8_t world[16], bytes[LARGE], got[LARGE];

typedef struct pair {
    tls_end *ends[2]; /* the rank's, the reader's */
    tls *t[2];
    int fds[2];
} pair;

static void start(pair *p, char rank_digit, char reader_digit)
{
    memset(world, WORLD_BYTE, sizeof world);
    assert_works(
        tls_end_of_rank(secret_of(rank_digit), world, RANK, &p->ends[0], ERROR));
    assert_works(tls_end_by_secret(secret_of(reader_digit), NULL, &p->ends[1], ERROR));
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, p->fds), 0);
    for (int i = 0; i < 2; i++)
        assert_non_null(p->t[i] = tls_new(p->ends[i], p->fds[i]));
}

static void stop(pair *p)
{
    for (int i = 0; i < 2; i++) {
        tls_free(&p->t[i]);
        tls_end_free(&p->ends[i]);
        close(p->fds[i]);
    }
}

/* Both until neither goes on; what came of it. */
static void shake(pair *p, tls_step out[2])
{
    out[0] = out[1] = TLS_WAIT;
    for (int turn = 0; turn < 8; turn++)
        for (int i = 0; i < 2; i++)
            if (out[1 - i] != TLS_FAILED || out[i] == TLS_WAIT)
                out[i] = out[i] == TLS_WAIT ? tls_handshake(p->t[i]) : out[i];
}

static void shake_well(pair *p)
{
    tls_step steps[2];
    shake(p, steps);
    assert_int_equal(steps[0], TLS_UP);
    assert_int_equal(steps[1], TLS_UP);
}

static void fill(void)
{
    for (size_t i = 0; i < LARGE; i++)
        bytes[i] = (uint8_t)(i * 7 + i / 251);
}

/* All of `bytes` in pieces of odd sizes, from one end to the other. */
static void move(pair *p, int from, size_t run)
{
    size_t sent = 0, come = 0;
    struct iovec iov[64];
    memset(got, 0, sizeof got);
    while (come < LARGE) {
        int n = 0;
        for (size_t at = sent; at < LARGE && n < 64; at += run, n++)
            iov[n] = (struct iovec){bytes + at, at + run < LARGE ? run : LARGE - at};
        ssize_t taken = n > 0 ? tls_send(p->t[from], p->fds[from], iov, n) : -1;
        assert_true(taken <= (ssize_t)TLS_SEND_MOST);
        if (taken < 0 && n > 0)
            assert_int_equal(errno, EAGAIN);
        sent += taken > 0 ? (size_t)taken : 0;
        struct iovec to[2] = {{got + come, 1}, {got + come + 1, LARGE - come - 1}};
        ssize_t n_come = tls_receive_into(p->t[1 - from], p->fds[1 - from], to, 2);
        if (n_come < 0)
            assert_int_equal(errno, EAGAIN);
        come += n_come > 0 ? (size_t)n_come : 0;
        assert_int_equal(tls_flush(p->t[from]), 0);
    }
    assert_int_equal(tls_unsent(p->t[from]), 0);
    assert_memory_equal(got, bytes, LARGE);
}

TEST(bytes_arrive)
{
    pair p;
    start(&p, '1', '1');
    shake_well(&p);
    fill();
    move(&p, 0, 100000);
    move(&p, 0, 13);
    move(&p, 1, 16384);
    assert_int_equal(tls_receive(p.t[1], p.fds[1], got, 1), -1);
    assert_int_equal(errno, EAGAIN);
    assert_false(tls_pending(p.t[1]));
    shutdown(p.fds[0], SHUT_WR);
    assert_int_equal(tls_receive(p.t[1], p.fds[1], got, 1), 0);
    stop(&p);
}

/* A part of what has come is taken: the rest is there, though the socket says nothing. */
TEST(what_is_left_is_told)
{
    pair p;
    start(&p, '1', '1');
    shake_well(&p);
    fill();
    const struct iovec all = {bytes, 50000};
    assert_int_equal(tls_send(p.t[0], p.fds[0], &all, 1), 50000);
    assert_int_equal(tls_receive(p.t[1], p.fds[1], got, 10), 10);
    assert_true(tls_pending(p.t[1]));
    size_t come = 10;
    for (ssize_t n; (n = tls_receive(p.t[1], p.fds[1], got + come, 7777)) > 0;)
        come += (size_t)n;
    assert_int_equal(errno, EAGAIN);
    assert_int_equal(come, 50000);
    assert_false(tls_pending(p.t[1]));
    assert_memory_equal(got, bytes, 50000);
    stop(&p);
}

/* What begin_update may wait for is one slice, however much there is to be sent and whatever room
   there is. */
TEST(a_send_is_a_slice)
{
    pair p;
    start(&p, '1', '1');
    shake_well(&p);
    const struct iovec all[2] = {{bytes, 100}, {bytes + 100, LARGE - 100}};
    assert_int_equal(tls_send(p.t[0], p.fds[0], all, 2), TLS_SEND_MOST);
    size_t unsent = tls_unsent(p.t[0]);
    assert_true(unsent > 0); /* the sockets hold less */
    assert_int_equal(tls_send(p.t[0], p.fds[0], all, 2), -1);
    assert_int_equal(errno, EAGAIN);
    assert_int_equal(tls_unsent(p.t[0]), unsent);
    stop(&p);
}

/* The socket is to be waited for, and not its room, which is there at once. */
TEST(a_part_of_a_record_is_nothing)
{
    pair p;
    uint8_t record[2000];
    start(&p, '1', '1');
    shake_well(&p);
    const struct iovec all = {bytes, 1000};
    assert_int_equal(tls_send(p.t[0], p.fds[0], &all, 1), 1000);
    ssize_t size = recv(p.fds[1], record, sizeof record, MSG_DONTWAIT);
    assert_in_range(size, 1001, 1100);
    assert_int_equal(send(p.fds[0], record, 600, MSG_NOSIGNAL), 600);
    assert_int_equal(tls_receive(p.t[1], p.fds[1], got, 1000), -1);
    assert_int_equal(errno, EAGAIN);
    assert_false(tls_pending(p.t[1]));
    assert_int_equal(send(p.fds[0], record + 600, (size_t)size - 600, 0), size - 600);
    assert_int_equal(tls_receive(p.t[1], p.fds[1], got, 1000), 1000);
    assert_memory_equal(got, bytes, 1000);
    stop(&p);
}

TEST(other_secrets_are_refused)
{
    pair p;
    tls_step steps[2];
    start(&p, '1', '2');
    shake(&p, steps);
    assert_int_equal(steps[0], TLS_FAILED);
    assert_int_equal(tls_failed(p.t[0]), TLS_OTHER_SECRET);
    assert_int_equal(steps[1], TLS_FAILED);
    assert_int_equal(tls_failed(p.t[1]), TLS_OTHER_SECRET);
    assert_false(tls_is_up(p.t[0]) || tls_is_up(p.t[1]));
    stop(&p);
}

TEST(ranks_prove_themselves)
{
    pair p, other;
    uint8_t proof[TLS_PROOF_SIZE], altered[TLS_PROOF_SIZE], elsewhere[16];
    start(&p, '1', '1');
    start(&other, '1', '1');
    assert_false(tls_prove_rank(p.t[0], proof)); /* not before it is up */
    assert_false(tls_prove_rank(NULL, proof));
    shake_well(&p);
    shake_well(&other);
    assert_true(tls_prove_rank(p.t[0], proof));
    assert_true(tls_check_rank(p.t[1], world, RANK, proof, sizeof proof));
    assert_false(tls_check_rank(p.t[1], world, RANK + 1, proof, sizeof proof));
    memset(elsewhere, WORLD_BYTE + 1, sizeof elsewhere);
    assert_false(tls_check_rank(p.t[1], elsewhere, RANK, proof, sizeof proof));
    assert_false(tls_check_rank(p.t[1], world, RANK, proof, 0));
    assert_false(tls_check_rank(p.t[1], world, RANK, proof, sizeof proof - 1));
    for (size_t i = 0; i < 8 * sizeof proof; i++) {
        memcpy(altered, proof, sizeof proof);
        altered[i / 8] ^= (uint8_t)(1 << i % 8);
        assert_false(tls_check_rank(p.t[1], world, RANK, altered, sizeof altered));
    }
    /* Whoever is between two connections has it from one, and needs it on the other. */
    assert_false(tls_check_rank(other.t[1], world, RANK, proof, sizeof proof));
    stop(&p);
    stop(&other);
}

/* Whoever plays a rank needs the rank's key, and a relay has its own. */
TEST(relays_are_no_ranks)
{
    pair p;
    uint8_t proof[TLS_PROOF_SIZE], id[16], other[16];
    memset(id, 7, sizeof id);
    memset(other, 8, sizeof other);
    start(&p, '1', '1');
    tls_free(&p.t[0]);
    tls_end_free(&p.ends[0]);
    char name[IDENTITY_MOST];
    relay_identity(world, id, name);
    assert_works(tls_end_by_secret(secret_of('1'), name, &p.ends[0], ERROR));
    assert_non_null(p.t[0] = tls_new(p.ends[0], p.fds[0]));
    tls_expect_relay(p.t[1]);
    shake_well(&p);
    assert_true(tls_prove_rank(p.t[0], proof));
    assert_true(tls_check_relay(p.t[1], world, id, proof, sizeof proof));
    assert_false(tls_check_relay(p.t[1], world, other, proof, sizeof proof));
    assert_false(tls_check_relay(p.t[1], other, id, proof, sizeof proof));
    assert_false(tls_check_relay(p.t[1], world, id, proof, sizeof proof - 1));
    assert_false(tls_check_rank(p.t[1], world, 0, proof, sizeof proof));
    assert_false(tls_check_rank(p.t[1], world, RANK, proof, sizeof proof));
    stop(&p);
    start(&p, '1', '1');
    shake_well(&p);
    assert_true(tls_prove_rank(p.t[0], proof));
    assert_false(tls_check_relay(p.t[1], world, id, proof, sizeof proof));
    stop(&p);
}

/* The reader hears a frame, an alert, or the end. */
static void answer(const void *data, size_t size, tls_fault expected)
{
    pair p;
    start(&p, '1', '1');
    assert_int_equal(tls_handshake(p.t[1]), TLS_WAIT);
    assert_int_equal(write(p.fds[0], data, size), size);
    shutdown(p.fds[0], SHUT_WR);
    assert_int_equal(tls_handshake(p.t[1]), TLS_FAILED);
    assert_int_equal(tls_failed(p.t[1]), expected);
    size_t come;
    const uint8_t *plain = tls_plain(p.t[1], &come);
    if (expected == TLS_PLAIN) {
        assert_int_equal(come, size);
        assert_memory_equal(plain, data, size);
    }
    stop(&p);
}

TEST(what_is_no_tls_is_told)
{
    answer("FAN1", 4, TLS_PLAIN);
    answer("HTTP/1.0 400", 12, TLS_PLAIN);
    answer(TLS_NO_SECRET_ALERT, TLS_ALERT_SIZE, TLS_NO_SECRET);
    answer("\x15\x03\x03\x00\x02\x02\x28", 7, TLS_OTHER_IDENTITY);
    answer("\x15\x03\x03\x00\x02\x02\x33", 7, TLS_OTHER_SECRET);
    answer("\x15\x03\x03", 3, TLS_CLOSED);
    answer("\x16\x03\x03\xff\xff", 5, TLS_BROKEN);
    answer("\x16\x03\x03\x00\x04\x02\x00\x00\x00", 9, TLS_BROKEN);
    answer("", 0, TLS_CLOSED);
}

/* Who forgets the handshake sends nothing that is not encrypted, and gets nothing. */
TEST(before_the_handshake_nothing_goes)
{
    pair p;
    uint8_t byte = 1;
    const struct iovec iov = {bytes, 1};
    start(&p, '1', '1');
    for (int i = 0; i < 2; i++) {
        assert_int_equal(tls_send(p.t[i], p.fds[i], &iov, 1), -1);
        assert_int_equal(errno, EBADMSG);
        assert_int_equal(tls_receive(p.t[i], p.fds[i], &byte, 1), -1);
        assert_int_equal(errno, EBADMSG);
        assert_int_equal(recv(p.fds[1 - i], &byte, 1, MSG_DONTWAIT), -1);
    }
    assert_int_equal(tls_handshake(p.t[1]), TLS_WAIT);
    assert_int_equal(tls_send(p.t[1], p.fds[1], &iov, 1), -1);
    shake_well(&p);
    fill();
    move(&p, 1, 4096);
    stop(&p);
}

/* What a rank makes of these bytes of a reader's, which are all that have come. */
static tls_step hear_hello(const void *data, size_t size, tls_fault expected)
{
    pair p;
    start(&p, '1', '1');
    tls_free(&p.t[1]);
    assert_int_equal(send(p.fds[1], data, size, 0), size);
    tls_step step = tls_handshake(p.t[0]);
    assert_int_equal(tls_failed(p.t[0]), expected);
    if (step == TLS_FAILED)
        assert_string_equal(tls_why(p.t[0]), TLS_HELLO_ODD);
    stop(&p);
    return step;
}

/* OpenSSL makes room for what the beginning says. */
TEST(a_hello_is_short)
{
    static const uint8_t honest[] = {0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc};
    static const uint8_t longest[] = {0x16, 3, 1, 0x20, 0, 1, 0, 0x1f, 0xfc};
    static const uint8_t bad[][9] = {
        {0x16, 3, 1, 0x20, 1, 1, 0, 0x1f, 0xfd}, /* a byte longer than may be */
        {0x16, 3, 1, 0x40, 0, 1, 2, 0, 0},       /* 128 KiB, of which this is a part */
        {0x16, 3, 1, 2, 0, 1, 0, 1, 0xfb},       /* something else behind it */
        {0x16, 3, 1, 0, 1, 1, 0x16, 3, 1},       /* byte by byte */
        {0x16, 3, 1, 2, 0, 2, 0, 1, 0xfc},       /* no ClientHello */
    };
    assert_int_equal(hear_hello(honest, sizeof honest, TLS_FINE), TLS_WAIT);
    assert_int_equal(hear_hello(longest, sizeof longest, TLS_FINE), TLS_WAIT);
    for (size_t i = 1; i < sizeof honest; i++)
        assert_int_equal(hear_hello(honest, i, TLS_FINE), TLS_WAIT);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(hear_hello(bad[i], sizeof bad[i], TLS_BROKEN), TLS_FAILED);
}

/* The kernel, which has the keys by then, makes the record. */
TEST(an_alert_is_sealed_by_who_has_the_keys)
{
    static const uint8_t no_hello[] = {0x16, 3, 1, 2, 0, 2, 0, 1, 0xfc};
    pair p;
    start(&p, '1', '1');
    p.t[0]->by_kernel = true;
    assert_int_equal(send(p.fds[1], no_hello, sizeof no_hello, 0), sizeof no_hello);
    assert_int_equal(tls_handshake(p.t[0]), TLS_FAILED);
    assert_int_equal(recv(p.fds[1], got, sizeof got, MSG_DONTWAIT), 2);
    assert_memory_equal(got, "\x02\x32", 2);
    stop(&p);
}

/* Who has been sent a slice and says nothing costs little memory. */
TEST(room_for_a_slice_is_given_back)
{
    pair p;
    start(&p, '1', '1');
    shake_well(&p);
    fill();
    move(&p, 0, LARGE);
    assert_true(tls_memory(p.t[0]) > TLS_SEND_MOST);
    assert_int_equal(tls_receive(p.t[0], p.fds[0], got, 1), -1);
    assert_int_equal(errno, EAGAIN);
    assert_true(tls_memory(p.t[0]) < TLS_SEND_MOST);
    move(&p, 0, LARGE);
    stop(&p);
}

TESTS_BETWEEN(NULL, secrets_tear_down)

int main(void)
{
    if (openssl_is_missing())
        return 77;
    return tests_run(NULL);
}
