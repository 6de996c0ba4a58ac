/* SPDX-License-Identifier: Apache-2.0 */
/* What comes before and inside TLS. First byte: bit 0: to the rank or to the reader; bit 1: bytes
   that nobody checked instead of the other end, or an honest one behind a link that alters bytes;
   bit 2: a secret or certificates (which the command openssl makes, once). The rest: those bytes;
   or edits of four bytes: where, in the order in which bytes go (two), what with, and how (bit 0:
   to which end; bit 1: a byte is left out, not altered). */
#include "fuzz.h"
#include "secrets.h"
#include "tls.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define TEXT 2500 /* bytes that each end says: records that are opened in place, too */
#define TURNS 60
#define EDIT 4

static const uint8_t world[16] = {7};
static tls_end *secret_ends[2], *certified_ends[2]; /* the rank's, the reader's */
static tls_end *const *ends;                        /* of this run */

typedef struct wire {
    tls *t[2];
    int fds[2], middle[2]; /* an end's, and the link's of it */
    size_t passed[2];      /* bytes, by the end that they go to */
    const uint8_t *edits;
    size_t size;
} wire;

static void make_secret_ends(void)
{
    fanin_error error = FANIN_ERROR_INIT;
    const char *file = secret_of('1');
    if (tls_end_of_rank(file, world, 1, &secret_ends[0], &error) != FANIN_OK ||
        tls_end_by_secret(file, NULL, &secret_ends[1], &error) != FANIN_OK)
        check(error.status == FANIN_ERR_UNSUPPORTED); /* no OpenSSL here */
    secrets_remove();
}

static bool make_ends(bool by_certificate)
{
    static bool tried[2];
    if (!tried[by_certificate]) {
        tried[by_certificate] = true;
        if (by_certificate)
            (void)certified_ends_of(3, certified_ends);
        else
            make_secret_ends();
    }
    ends = by_certificate ? certified_ends : secret_ends;
    return ends[0] && ends[1];
}

static void start(wire *l)
{
    for (int i = 0; i < 2; i++) {
        int pair[2];
        check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0,
                         pair) == 0);
        l->fds[i] = pair[0];
        l->middle[i] = pair[1];
    }
}

static void stop(wire *l)
{
    for (int i = 0; i < 2; i++) {
        tls_free(&l->t[i]);
        close(l->fds[i]);
        close(l->middle[i]);
    }
}

/* What becomes of the byte that goes to @p to; false: it is left out. */
static bool alter(const wire *l, int to, size_t at, uint8_t *byte)
{
    bool kept = true;
    for (size_t i = 0; i + EDIT <= l->size; i += EDIT) {
        const uint8_t *e = l->edits + i;
        if ((e[3] & 1) != to || (e[0] | (size_t)e[1] << 8) != at)
            continue;
        kept = kept && !(e[3] & 2);
        *byte ^= e[2];
    }
    return kept;
}

static void pass(wire *l, int to)
{
    uint8_t in[4096], out[4096];
    ssize_t n;
    while ((n = recv(l->middle[1 - to], in, sizeof in, 0)) > 0) {
        size_t left = 0;
        for (ssize_t i = 0; i < n; i++) {
            out[left] = in[i];
            left += alter(l, to, l->passed[to]++, &out[left]);
        }
        (void)!send(l->middle[to], out, left, MSG_NOSIGNAL); /* an end may have gone */
    }
}

/* What has come is what was said, as far as it goes: no byte of it is another one. */
static void listen_to(tls *t, int fd, size_t *come)
{
    uint8_t got[TEXT + 1];
    ssize_t n = tls_receive(t, fd, got, sizeof got);
    for (ssize_t i = 0; i < n; i++)
        check(got[i] == (uint8_t)(*come + (size_t)i));
    *come += n > 0 ? (size_t)n : 0;
    check(*come <= TEXT);
}

static void between_two(wire *l)
{
    uint8_t text[TEXT];
    size_t come[2] = {0}, said[2] = {0};
    tls_step steps[2] = {TLS_WAIT, TLS_WAIT};
    for (size_t i = 0; i < TEXT; i++)
        text[i] = (uint8_t)i;
    for (int i = 0; i < 2; i++)
        check((l->t[i] = tls_new(ends[i], l->fds[i])) != NULL);
    for (int turn = 0; turn < TURNS; turn++) {
        for (int i = 0; i < 2; i++) {
            struct iovec left = {text + said[i], TEXT - said[i]};
            steps[i] = steps[i] == TLS_WAIT ? tls_handshake(l->t[i]) : steps[i];
            if (steps[i] == TLS_UP && left.iov_len > 0) {
                ssize_t n = tls_send(l->t[i], l->fds[i], &left, 1);
                said[i] += n > 0 ? (size_t)n : 0;
            }
            (void)tls_flush(l->t[i]);
            if (steps[i] == TLS_UP)
                listen_to(l->t[i], l->fds[i], &come[i]);
            /* What was up may break afterwards. */
            bool failed = tls_failed(l->t[i]) != TLS_FINE;
            check(steps[i] == TLS_UP || failed == (steps[i] == TLS_FAILED));
        }
        pass(l, 0);
        pass(l, 1);
    }
    if (l->size < EDIT) /* nothing was altered */
        check(come[0] == TEXT && come[1] == TEXT);
}

/* Nobody gets in without the key. */
static void to_one(wire *l, int to, const uint8_t *data, size_t size)
{
    size_t at = 0;
    tls_step step = TLS_WAIT;
    check((l->t[to] = tls_new(ends[to], l->fds[to])) != NULL);
    while (step == TLS_WAIT && at <= size) {
        ssize_t n =
            at < size ? send(l->middle[to], data + at, size - at, MSG_NOSIGNAL) : -1;
        if (n <= 0)
            shutdown(l->middle[to], SHUT_WR);
        at = n > 0 ? at + (size_t)n : size + 1;
        step = tls_handshake(l->t[to]);
        (void)tls_flush(l->t[to]);
    }
    check(step != TLS_UP && !tls_is_up(l->t[to]));
    size_t said;
    (void)tls_plain(l->t[to], &said);
    check(said <= size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    wire l = {0};
    if (size == 0 || !make_ends(data[0] & 4))
        return 0;
    l.edits = data + 1;
    l.size = size - 1;
    start(&l);
    if (data[0] & 2)
        between_two(&l);
    else
        to_one(&l, data[0] & 1, data + 1, size - 1);
    stop(&l);
    return 0;
}
