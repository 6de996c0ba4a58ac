/* SPDX-License-Identifier: Apache-2.0 */
/* Somebody between two ends of TLS, who alters, cuts off, leaves out, repeats or reorders what goes
   by: with a launch's secret, and with certificates. Nothing but what was said is ever taken, and
   once. */
#include "secrets.h"
#include "testing.h"
#include "tls.h"
#include <sys/socket.h>

#define RANK 3
#define HEADER 5           /* of a record: type, version, length */
#define CHANGE_CIPHER 0x14 /* a record that says nothing, and is thrown away */
#define RECORDS 16         /* at most, of one way */
#define TURNS 10

static const char hello[] = "hello";
static tls_end *secret_ends[2], *certified_ends[2]; /* the rank's, the reader's */

typedef enum tamper {
    NOTHING,
    FLIP,   /* a bit of the byte */
    CUT,    /* the end comes before the byte */
    DROP,   /* the record */
    REPEAT, /* the record, at once */
    SWAP,   /* the record comes after the next one */
} tamper;

typedef struct edit {
    tamper how;
    int way;         /* 0: from the rank, 1: from the reader */
    unsigned record; /* of that way */
    size_t at;       /* of the record */
} edit;

typedef struct outcome {
    unsigned records[2];
    size_t sizes[2][RECORDS];
    size_t heard;  /* bytes that the reader took */
    bool harmless; /* what nobody reads was altered */
    bool cut;
    bool broken[2]; /* the end that is up takes no more */
} outcome;

typedef struct middle {
    const edit *edit;
    int fds[2]; /* towards the rank, towards the reader */
    struct {
        uint8_t data[65536];
        size_t size;
    } held, out;
    outcome result;
} middle;

static void add(middle *m, const uint8_t *data, size_t size)
{
    assert_true(m->out.size + size <= sizeof m->out.data);
    memcpy(m->out.data + m->out.size, data, size);
    m->out.size += size;
}

static void tamper_with(middle *m, uint8_t *record, size_t size)
{
    size_t at = m->edit->at;
    m->result.harmless = record[0] == CHANGE_CIPHER;
    switch (m->edit->how) {
    case FLIP:
        record[at] ^= 0x10;
        m->result.harmless = m->result.harmless || at == 1 || at == 2; /* the version */
        break;
    case CUT:
        m->result.cut = true;
        m->result.harmless = false;
        size = at;
        break;
    case DROP:
        size = 0;
        break;
    case REPEAT:
        add(m, record, size);
        break;
    default:
        memcpy(m->held.data, record, size);
        m->held.size = size;
        size = 0;
    }
    add(m, record, size);
}

/* A record of this way, whole. */
static void pass_record(middle *m, int way, uint8_t *record, size_t size)
{
    unsigned number = m->result.records[way]++;
    assert_true(number < RECORDS);
    m->result.sizes[way][number] = size;
    if (m->result.cut && way == m->edit->way)
        return;
    if (m->edit->how != NOTHING && way == m->edit->way && number == m->edit->record) {
        tamper_with(m, record, size);
        return;
    }
    add(m, record, size);
    if (m->held.size == 0 || way != m->edit->way)
        return;
    m->result.harmless = m->result.harmless || record[0] == CHANGE_CIPHER;
    add(m, m->held.data, m->held.size);
    m->held.size = 0;
}

/* All that an end has said. */
static void pass(middle *m, int way)
{
    uint8_t data[65536];
    ssize_t n = recv(m->fds[way], data, sizeof data, MSG_DONTWAIT);
    m->out.size = 0;
    for (ssize_t at = 0; at < n;) {
        assert_true(n - at >= HEADER);
        size_t size = HEADER + ((size_t)data[at + 3] << 8 | data[at + 4]);
        assert_true((ssize_t)size <= n - at);
        pass_record(m, way, data + at, size);
        at += (ssize_t)size;
    }
    if (m->out.size > 0)
        assert_int_equal(send(m->fds[1 - way], m->out.data, m->out.size, MSG_NOSIGNAL),
                         m->out.size);
    if (m->result.cut && way == m->edit->way)
        shutdown(m->fds[1 - way], SHUT_WR);
}

static void listen_to(tls *t, int fd, int to, outcome *o)
{
    char heard[2 * sizeof hello];
    ssize_t n = tls_receive(t, fd, heard, sizeof heard);
    o->broken[to] = o->broken[to] || (n < 0 && errno != EAGAIN);
    assert_true(to == 1 || n <= 0); /* nothing is said to the rank */
    for (ssize_t i = 0; i < n; i++)
        assert_int_equal(heard[i], hello[o->heard++]);
    assert_true(o->heard <= sizeof hello);
}

/* The rank says hello once it is up; what came of it. */
static outcome converse(tls_end *const ends[2], const edit *e)
{
    static middle m;
    tls *t[2];
    int fds[2];
    tls_step steps[2] = {TLS_WAIT, TLS_WAIT};
    bool said = false;
    m = (middle){.edit = e};
    for (int i = 0; i < 2; i++) {
        int pair[2];
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair), 0);
        fds[i] = pair[0];
        m.fds[i] = pair[1];
        assert_non_null(t[i] = tls_new(ends[i], fds[i]));
    }
    for (int turn = 0; turn < TURNS; turn++)
        for (int i = 1; i >= 0; i--) {
            const struct iovec all = {(void *)(uintptr_t)hello, sizeof hello};
            if (steps[i] == TLS_WAIT)
                steps[i] = tls_handshake(t[i]);
            if (i == 0 && steps[i] == TLS_UP && !said)
                said = tls_send(t[i], fds[i], &all, 1) == (ssize_t)sizeof hello;
            if (steps[i] == TLS_UP)
                listen_to(t[i], fds[i], i, &m.result);
            pass(&m, i);
        }
    for (int i = 0; i < 2; i++) {
        tls_free(&t[i]);
        close(fds[i]);
        close(m.fds[i]);
    }
    return m.result;
}

static void expect_nothing(tls_end *const ends[2], const edit *e)
{
    outcome o = converse(ends, e);
    if (o.harmless || o.heard == 0)
        return;
    fail_msg("tamper %d with record %u of way %d, byte %zu: it is heard", e->how,
             e->record, e->way, e->at);
}

/* The last record was good, and said again it ends the connection. */
static void expect_once(tls_end *const ends[2], const edit *e)
{
    outcome o = converse(ends, e);
    assert_int_equal(o.heard, sizeof hello);
    assert_true(o.broken[1 - e->way]);
}

/* @p step: of the bytes that are altered, or before which the end comes. */
static void alter_all(tls_end *const ends[2], size_t step)
{
    const edit none = {.how = NOTHING};
    const outcome clean = converse(ends, &none);
    assert_int_equal(clean.heard, sizeof hello);
    assert_true(clean.records[0] > 2 && clean.records[1] > 1);
    for (int way = 0; way < 2; way++)
        for (unsigned i = 0; i < clean.records[way]; i++) {
            edit e = {.way = way, .record = i};
            /* Signatures differ in length by some bytes: the last ones may not be there. */
            for (e.at = 0; e.at + 8 < clean.sizes[way][i]; e.at += step)
                for (int how = FLIP; how <= CUT; how++) {
                    e.how = (tamper)how;
                    expect_nothing(ends, &e);
                }
            for (int how = DROP; how <= SWAP; how++) {
                e = (edit){.how = (tamper)how, .way = way, .record = i};
                if (how == REPEAT && i + 1 == clean.records[way])
                    expect_once(ends, &e);
                else
                    expect_nothing(ends, &e);
            }
        }
}

/* What one connection said, said again by who has heard it: no key fits. */
static void say_again(tls_end *const ends[2])
{
    uint8_t recorded[32768];
    size_t size[2];
    for (int again = 0; again < 2; again++) {
        tls *t[2];
        int fds[2];
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds), 0);
        for (int i = 0; i < 2; i++)
            assert_non_null(t[i] = tls_new(ends[i], fds[i]));
        size_t at = 0;
        for (int flight = 0; flight < 2; flight++) {
            if (!again) {
                assert_int_not_equal(tls_handshake(t[1]), TLS_FAILED);
                ssize_t n = recv(fds[0], recorded + at, sizeof recorded - at, 0);
                assert_true(n > 0);
                size[flight] = (size_t)n;
            }
            assert_int_equal(send(fds[1], recorded + at, size[flight], 0),
                             size[flight]);
            at += size[flight];
            tls_step step = tls_handshake(t[0]);
            assert_int_equal(step, flight == 0 ? TLS_WAIT
                                   : again     ? TLS_FAILED
                                               : TLS_UP);
        }
        for (int i = 0; i < 2; i++) {
            tls_free(&t[i]);
            close(fds[i]);
        }
    }
}

TEST(with_a_secret_nothing_altered_is_taken)
{
    alter_all(secret_ends, 3);
}

TEST(with_certificates_nothing_altered_is_taken)
{
    if (!certified_ends[0])
        skip();
    alter_all(certified_ends, 11);
}

TEST(recordings_are_of_no_use)
{
    say_again(secret_ends);
    if (certified_ends[0])
        say_again(certified_ends);
}

static int set_up(void **state)
{
    static const uint8_t world[16] = {5};
    assert_works(tls_end_of_rank(secret_of('1'), world, RANK, &secret_ends[0], ERROR));
    assert_works(tls_end_by_secret(secret_of('1'), NULL, &secret_ends[1], ERROR));
    if (!certified_ends_of(RANK, certified_ends))
        print_message("no certificates without the command openssl\n");
    return 0;
}

static int tear_down(void **state)
{
    for (int i = 0; i < 2; i++) {
        tls_end_free(&secret_ends[i]);
        tls_end_free(&certified_ends[i]);
    }
    secrets_remove();
    return 0;
}

TESTS_BETWEEN(set_up, tear_down)

int main(void)
{
    if (openssl_is_missing())
        return 77;
    return tests_run(NULL);
}
