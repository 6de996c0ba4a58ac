/* SPDX-License-Identifier: Apache-2.0 */
/* What goes after the handshake, by OpenSSL's records. Those of a send lie in the connection's
   buffer, so that OpenSSL never waits for room in the socket. A kernel that has the keys seals the
   caller's bytes itself. */
#include "tls_internal.h"

#include <errno.h>
#include <sys/socket.h>

/* OpenSSL's numbers. */
#define ERROR_WANT_READ 2
#define ERROR_ZERO_RETURN 6
#define KEY_UPDATE_ALONE 0 /* the other need not change its keys */

/* Records under one key: long before what AES-GCM should encrypt, 2^24.5 full ones. */
#define RECORDS_MOST (UINT64_C(1) << 22)

/* Forgets errors of before, and lets OpenSSL know the thread, which takes a lock of its: what data
   takes of OpenSSL then does not, but for a change of keys. */
static const openssl *tls_data_enter(const tls *t)
{
    const openssl *o = t->end->o;
    openssl_enter(o);
    openssl_leave();
    return o;
}

static bool is_usable(const tls *t)
{
    return t->up && t->fault == TLS_FINE;
}

/* -1, with why in errno. */
static int broken(tls *t)
{
    tls_give_up(t);
    errno = t->fault == TLS_MEMORY ? ENOMEM : EBADMSG;
    return -1;
}

/* ----------------------------------------------------------------- receiving */

/* Bytes of one record at most; 0: the other closed; -1: errno. */
static ssize_t receive_some(tls *t, void *to, size_t room)
{
    size_t got = 0;
    if (t->closed && is_usable(t))
        return 0;
    errno = EBADMSG;
    if (!is_usable(t))
        return -1;
    const openssl *o = tls_data_enter(t);
    t->sys_errno = 0;
    int result = o->SSL_read_ex(t->ssl, to, room, &got);
    if (result == 1) {
        t->idle = 0;
        return (ssize_t)got;
    }
    int why = o->SSL_get_error(t->ssl, result);
    t->closed |= why == ERROR_ZERO_RETURN;
    if (t->closed)
        return 0;
    if (why != ERROR_WANT_READ && (t->sys_errno == 0 || t->sys_errno == ENOMEM))
        return broken(t);
    errno = why == ERROR_WANT_READ ? EAGAIN : t->sys_errno;
    return -1;
}

bool tls_has_bytes(const tls *t)
{
    return tls_left(&t->in) > 0 || t->end->o->SSL_has_pending(t->ssl) == 1;
}

ssize_t tls_receive(tls *t, int fd, void *to, size_t room)
{
    if (!t)
        return recv(fd, to, room, MSG_DONTWAIT);
    size_t have = 0;
    ssize_t n = 0;
    while (have < room && (n = receive_some(t, (uint8_t *)to + have, room - have)) > 0)
        have += (size_t)n;
    int why = errno;
    t->more = have == room && t->up && tls_has_bytes(t);
    errno = why;
    return have > 0 ? (ssize_t)have : n;
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
    /* There are bytes, or it is to be told that there will be none. */
    return t && t->up && (t->more || t->closed || t->fault != TLS_FINE);
}

/* ------------------------------------------------------------------- sending */

/* A change of keys may take locks of OpenSSL's. */
static bool change_keys(tls *t)
{
    const openssl *o = t->end->o;
    t->records = 0;
    openssl_enter(o);
    bool good = o->SSL_key_update(t->ssl, KEY_UPDATE_ALONE) == 1 &&
                o->SSL_do_handshake(t->ssl) == 1;
    openssl_leave();
    return good;
}

/* False, with errno: nothing may be sent any more. */
static bool seal(tls *t, const void *data, size_t size)
{
    size_t written;
    const openssl *o = tls_data_enter(t);
    t->sys_errno = 0;
    t->records += size / TLS_RECORD + 1;
    if ((t->records <= RECORDS_MOST || change_keys(t)) &&
        o->SSL_write_ex(t->ssl, data, size, &written) == 1)
        return true;
    (void)broken(t);
    return false;
}

ssize_t tls_send(tls *t, int fd, const struct iovec *iov, int n)
{
    int failed = t && !is_usable(t) ? EBADMSG : tls_flush(t);
    if (failed || tls_unsent(t) > 0) {
        errno = failed ? failed : EAGAIN;
        return -1;
    }
    if (!t || t->by_kernel) {
        struct msghdr message = {.msg_iov = (struct iovec *)(uintptr_t)iov,
                                 .msg_iovlen = (size_t)n};
        return sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    size_t taken = 0;
    for (int i = 0; i < n && taken < TLS_SEND_MOST; i++) {
        size_t most = TLS_SEND_MOST - taken;
        size_t size = iov[i].iov_len < most ? iov[i].iov_len : most;
        if (size > 0 && !seal(t, iov[i].iov_base, size))
            return -1;
        taken += size;
    }
    failed = tls_flush(t);
    errno = failed;
    return failed ? -1 : (ssize_t)taken;
}
