/* SPDX-License-Identifier: Apache-2.0 */
/* What goes after the handshake, and what may come beside it: alerts, new keys, and tickets that
   nobody uses. */
#include "tls_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

/* Long before what AES-GCM should encrypt under one key: 2^24.5 full records. */
#define KEY_BYTES (UINT64_C(1) << 36)
/* Records without data one after the other: who sends more wants this thread's time. */
#define IDLE_MOST 32
/* What is shorter is not opened where data goes: nothing but data is ever as long from those who do
   as we do. */
#define SHORT ((size_t)1 << 10)

#define FATAL 2
#define ALERT_CLOSE 0
#define ALERT_UNEXPECTED 10
#define ALERT_RECORD_MAC 20
#define ALERT_OVERFLOW 22
#define TICKET 4
#define KEY_UPDATE 24
#define KEY_UPDATE_SIZE 5

bool tls_records_begin(tls *t)
{
    const openssl *o = t->end->o;
    const SSL_CIPHER *cipher = o->SSL_get_current_cipher(t->ssl);
    uint16_t suite = cipher ? o->SSL_CIPHER_get_protocol_id(cipher) : 0;
    bool is_told = t->told == 3 && o->SSL_has_pending(t->ssl) == 0;
    bool good =
        is_told &&
        record_keys_set(&t->seals, o, true, suite, t->secrets[t->end->is_rank]) &&
        record_keys_set(&t->opens, o, false, suite, t->secrets[!t->end->is_rank]);
    explicit_bzero(t->secrets, sizeof t->secrets);
    if (!is_told) {
        t->why = "OpenSSL does not tell its keys";
        t->fault = TLS_BROKEN;
    } else if (!good) {
        (void)tls_lack_memory(t);
    }
    return good;
}

/* False: no memory. */
static bool seal(tls *t, record_type type, const void *data, size_t size)
{
    if (!tls_reserve(&t->out, RECORD_HEADER + size + RECORD_ADDS))
        return false;
    size_t made = record_seal(&t->seals, type, data, size, t->out.data + t->out.size);
    t->out.size += made;
    return made > 0;
}

/* Tells the other why as well. Nothing comes after it. */
static int broken(tls *t, uint8_t alert, const char *why)
{
    const uint8_t words[2] = {FATAL, alert};
    if (seal(t, RECORD_ALERT, words, sizeof words))
        (void)tls_flush(t);
    t->why = why;
    t->fault = TLS_BROKEN;
    return EBADMSG;
}

/* ----------------------------------------------------------------- receiving */

/* 0, or an errno. */
static int hear_alert(tls *t, const uint8_t *words, size_t size)
{
    if (size != 2)
        return broken(t, ALERT_UNEXPECTED, "an alert of another size than an alert's");
    t->closed = true;
    if (words[1] == ALERT_CLOSE)
        return 0;
    t->closed = false; /* it says more than that */
    tls_fail(t, LIBRARY_SSL | (TLS_REASON_ALERT + words[1]));
    return EBADMSG;
}

/* One message after the other; all of each is in one record. 0, or an errno. */
static int hear_handshake(tls *t, const uint8_t *words, size_t size)
{
    while (size >= 4) {
        size_t body = (size_t)words[1] << 16 | (size_t)words[2] << 8 | words[3];
        if (body > size - 4)
            break;
        bool is_ticket = words[0] == TICKET && !t->end->is_rank;
        bool is_update = words[0] == KEY_UPDATE && body == 1 && words[4] <= 1 &&
                         size == KEY_UPDATE_SIZE; /* what follows has other keys */
        if (!is_ticket && !is_update)
            break;
        if (is_update && !record_keys_next(&t->opens)) {
            (void)broken(t, TLS_ALERT_INTERNAL, NULL);
            (void)tls_lack_memory(t);
            return ENOMEM;
        }
        t->asked |= is_update && words[4] == 1;
        words += 4 + body;
        size -= 4 + body;
    }
    return size == 0
               ? 0
               : broken(t, ALERT_UNEXPECTED, "a message of a handshake that is over");
}

/* What is in `left` and no data. 0, or an errno. */
static int hear(tls *t, uint8_t type)
{
    const uint8_t *words = t->left.data;
    size_t size = t->left.size;
    t->left.size = 0;
    if (++t->idle > IDLE_MOST)
        return broken(t, ALERT_UNEXPECTED, "records without data, and no end of them");
    if (type == RECORD_ALERT)
        return hear_alert(t, words, size);
    if (type == RECORD_HANDSHAKE && size > 0)
        return hear_handshake(t, words, size);
    return type == RECORD_DATA
               ? 0
               : broken(t, ALERT_UNEXPECTED, "a record of a kind that is not expected");
}

/* The body of the record that comes next, as far as it is known: else 0, with EBADMSG if it is
   none. */
static size_t next_body(const tls *t, int *why)
{
    bool is_known = tls_left(&t->in) >= RECORD_HEADER;
    size_t body = is_known ? record_body(t->in.data + t->in.used) : 0;
    *why = is_known && body == 0 ? EBADMSG : 0;
    return body;
}

/* One record: data of it that has come to @p to, 0 too; the rest is in `left`. -1: errno. */
static ssize_t open_record(tls *t, size_t body, void *to, size_t room)
{
    record_found found;
    tls_bytes *left = &t->left;
    if (!tls_reserve(left, body))
        return tls_lack_memory(t);
    bool good = record_open(&t->opens, t->in.data + t->in.used, body, to,
                            body < SHORT ? 0 : room, left->data, &found);
    t->in.used += RECORD_HEADER + body;
    int why = 0;
    if (!good) {
        why = broken(t, ALERT_RECORD_MAC, "a record is not what was sent");
    } else if (found.type == RECORD_DATA && found.size > 0) {
        t->idle = 0;
        left->size = found.size - found.here;
    } else {
        /* All of it together. */
        memmove(left->data + found.here, left->data, found.size - found.here);
        memcpy(left->data, to, found.here);
        left->size = found.size;
        found.here = 0;
        why = hear(t, found.type);
    }
    errno = why;
    return why ? -1 : (ssize_t)found.here;
}

static size_t take_left(tls *t, void *to, size_t room)
{
    size_t step = tls_left(&t->left) < room ? tls_left(&t->left) : room;
    if (step > 0)
        memcpy(to, t->left.data + t->left.used, step);
    t->left.used += step;
    return step;
}

/* The next bytes, of one record at most. 0: there may be more; -1: errno, 0 at the end. */
static ssize_t receive_some(tls *t, uint8_t *to, size_t room)
{
    if (tls_left(&t->left) > 0)
        return (ssize_t)take_left(t, to, room);
    if (t->fault != TLS_FINE || t->closed || !t->up) {
        errno = t->fault == TLS_FINE && t->up ? 0 : EBADMSG;
        return -1;
    }
    int why;
    size_t body = next_body(t, &why), whole = body ? RECORD_HEADER + body : 0;
    if (body > 0 && tls_left(&t->in) >= whole)
        return open_record(t, body, to, room);
    if (why != 0)
        why = broken(t, ALERT_OVERFLOW, "the peer sent no record of TLS");
    else if (tls_refill(t, whole) > 0)
        return 0;
    else if (t->sys_errno == ENOMEM)
        return tls_lack_memory(t);
    else
        why = t->sys_errno;
    errno = why;
    return -1;
}

ssize_t tls_receive(tls *t, int fd, void *to, size_t room)
{
    if (!t)
        return recv(fd, to, room, MSG_DONTWAIT);
    size_t have = 0;
    ssize_t n = 0;
    t->sys_errno = 0;
    while (have < room && (n = receive_some(t, (uint8_t *)to + have, room - have)) >= 0)
        have += (size_t)n;
    if (have > 0 || room == 0)
        return (ssize_t)have;
    return errno == 0 ? 0 : -1;
}

ssize_t tls_receive_into(tls *t, int fd, struct iovec *iov, int n)
{
    if (!t)
        return readv(fd, iov, n);
    size_t have = 0;
    for (int i = 0; i < n; i++) {
        ssize_t got = tls_receive(t, fd, iov[i].iov_base, iov[i].iov_len);
        have += got > 0 ? (size_t)got : 0;
        if (got < 0 || (size_t)got < iov[i].iov_len)
            return have > 0 ? (ssize_t)have : got;
    }
    return (ssize_t)have;
}

bool tls_pending(const tls *t)
{
    int why;
    if (!t || !t->up)
        return false;
    if (tls_left(&t->left) > 0 || t->fault != TLS_FINE || t->closed)
        return true; /* there are bytes, or it is to be told that there will be none */
    size_t body = next_body(t, &why);
    return why != 0 || (body > 0 && tls_left(&t->in) >= RECORD_HEADER + body);
}

/* ------------------------------------------------------------------- sending */

/* Of what is not taken yet: where it is. */
typedef struct place {
    const struct iovec *iov;
    int n;
    size_t at; /* in the first */
} place;

/* The next bytes, at most a record's: where they lie, or copied together if they are in short runs.
   */
static const void *next_bytes(tls *t, place *from, size_t most, size_t *size_out)
{
    most = most < RECORD_PLAIN ? most : RECORD_PLAIN;
    const uint8_t *at = (const uint8_t *)from->iov->iov_base + from->at;
    size_t whole = from->iov->iov_len - from->at;
    if (whole >= most || from->n == 1) {
        *size_out = whole < most ? whole : most;
        from->at += *size_out;
        return at;
    }
    if (!t->small && !(t->small = malloc(RECORD_PLAIN)))
        return NULL;
    size_t have = 0;
    while (from->n > 0 && have < most) {
        whole = from->iov->iov_len - from->at;
        size_t step = whole < most - have ? whole : most - have;
        memcpy(t->small + have, (const uint8_t *)from->iov->iov_base + from->at, step);
        have += step;
        from->at += step;
        if (from->at < from->iov->iov_len)
            break;
        from->iov++;
        from->n--;
        from->at = 0;
    }
    *size_out = have;
    return t->small;
}

/* False: no memory. */
static bool change_keys(tls *t)
{
    const uint8_t alone[KEY_UPDATE_SIZE] = {KEY_UPDATE, 0, 0, 1, 0};
    t->asked = false;
    t->written = 0;
    return seal(t, RECORD_HANDSHAKE, alone, sizeof alone) &&
           record_keys_next(&t->seals);
}

/* False: no memory; nothing may be sent any more, for a record's number may be used up. */
static bool encrypt(tls *t, const void *data, size_t size)
{
    bool good = data && ((t->written < KEY_BYTES && !t->asked) || change_keys(t)) &&
                seal(t, RECORD_DATA, data, size);
    t->written += size;
    if (good)
        return true;
    (void)tls_lack_memory(t);
    return false;
}

static void skip_empty(place *p)
{
    while (p->n > 0 && p->at == p->iov->iov_len) {
        p->iov++;
        p->n--;
        p->at = 0;
    }
}

ssize_t tls_send(tls *t, int fd, const struct iovec *iov, int n)
{
    if (!t) {
        struct msghdr message = {.msg_iov = (struct iovec *)(uintptr_t)iov,
                                 .msg_iovlen = (size_t)n};
        return sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    int failed = t->fault != TLS_FINE || !t->up ? EBADMSG : tls_flush(t);
    if (failed || tls_left(&t->out) > 0) {
        errno = failed ? failed : EAGAIN;
        return -1;
    }
    place from = {iov, n, 0};
    size_t taken = 0, size = 0;
    for (skip_empty(&from); from.n > 0 && taken < TLS_SEND_MOST; skip_empty(&from)) {
        const void *data = next_bytes(t, &from, TLS_SEND_MOST - taken, &size);
        if (!encrypt(t, data, size))
            return -1;
        taken += size;
    }
    failed = tls_flush(t);
    errno = failed;
    return failed ? -1 : (ssize_t)taken;
}
