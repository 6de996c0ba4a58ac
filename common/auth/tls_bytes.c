/* SPDX-License-Identifier: Apache-2.0 */
/* What has come from the socket and what is to go there: many records by one system call, and no
   signal. OpenSSL has its bytes from here. */
#include "tls_internal.h"
#include "array.h"

#include <errno.h>
#include <linux/tls.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

/* ---------------------------------------------------------------------- tls hello */

#define RECORD_HEADER 5
#define CLIENT_HELLO 1
#define MESSAGE_HEADER 4

static size_t tls_hello_number(const uint8_t *at, unsigned bytes)
{
    size_t value = 0;
    while (bytes-- > 0)
        value = value << 8 | *at++;
    return value;
}

static bool is_short_hello(const uint8_t *message, size_t record)
{
    return message[0] == CLIENT_HELLO && record <= TLS_HELLO_MOST &&
           record == MESSAGE_HEADER + tls_hello_number(message + 1, 3);
}

/* How many of the @p size bytes that have come next may go on to OpenSSL; 0: not before more have
    come; -1: never. Whoever passes them on takes them from g->left. */
static ssize_t hello_guard_pass(hello_guard *g, const uint8_t *data, size_t size)
{
    if (g->left == 0) {
        if (size < RECORD_HEADER)
            return 0;
        size_t record = tls_hello_number(data + 3, 2);
        if (data[0] == RECORD_HANDSHAKE) {
            if (size < RECORD_HEADER + MESSAGE_HEADER)
                return 0;
            if (!is_short_hello(data + RECORD_HEADER, record))
                return -1;
        }
        g->left = RECORD_HEADER + record;
    }
    return (ssize_t)(size < g->left ? size : g->left);
}

/* ---------------------------------------------------------------------- tls bytes */

#define FIRST ((size_t)4 << 10)     /* received at first; grows while that is full */
#define IN_MOST ((size_t)256 << 10) /* received at once */
#define OUT_KEPT ((size_t)64 << 10) /* of what was sent, while nothing comes */

/* Encrypted bytes without data that are taken at most: two records of any length. */
#define IDLE_MOST ((size_t)34 << 10)

/* OpenSSL's numbers. */
#define BIO_FLUSH 11
#define BIO_SET_KTLS 72
#define BIO_GET_KTLS_SEND 73
#define BIO_SET_KTLS_CONTROL 74
#define RECORD_ALERT 21
#define BIO_READ_AGAIN 0x09
#define BIO_RETRY_FLAGS 0x0f
#define BIO_SOURCE_SINK 0x0400

size_t tls_left(const tls_bytes *b)
{
    return b->size - b->used;
}

/* Room for @p more bytes behind those that are there. False: no memory. */
static bool tls_bytes_reserve(tls_bytes *b, size_t more)
{
    if (b->used == b->size)
        b->used = b->size = 0;
    return array_reserve(&b->data, &b->capacity, b->size + more, 1);
}

/* False: no memory. */
static bool tls_bytes_add(tls_bytes *b, const void *data, size_t size)
{
    if (!tls_bytes_reserve(b, size))
        return false;
    memcpy(b->data + b->size, data, size);
    b->size += size;
    return true;
}

/* Nothing has come, so this end may wait for long: room for a slice is given back. */
static void give_room_back(tls_bytes *b)
{
    if (tls_left(b) > 0 || b->capacity <= OUT_KEPT)
        return;
    free(b->data);
    *b = (tls_bytes){0};
}

/* Receives once, behind what is there: more than 0, 0 at the end, -1 with t->sys_errno. */
static ssize_t refill(tls *t)
{
    tls_bytes *in = &t->in;
    size_t have = tls_left(in);
    bool was_full = in->capacity > 0 && in->size == in->capacity;
    size_t want = was_full && in->capacity < IN_MOST ? 2 * in->capacity : in->capacity;
    if (have > 0 && in->used > 0)
        memmove(in->data, in->data + in->used, have); /* of one record */
    in->used = 0;
    in->size = have;
    if (!tls_bytes_reserve(in, (want ? want : FIRST) - have)) {
        t->sys_errno = ENOMEM;
        return -1;
    }
    ssize_t n;
    do
        n = recv(t->fd, in->data + have, in->capacity - have, MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    t->sys_errno = n < 0 ? errno : 0;
    in->size += n > 0 ? (size_t)n : 0;
    t->closed = n == 0;
    if (t->sys_errno == EAGAIN)
        give_room_back(&t->out);
    return n;
}

int tls_flush(tls *t)
{
    if (!t)
        return 0;
    while (tls_left(&t->out) > 0) {
        ssize_t n = send(t->fd, t->out.data + t->out.used, tls_left(&t->out),
                         MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno == EAGAIN ? 0 : errno;
        t->out.used += (size_t)n;
    }
    return 0;
}

size_t tls_unsent(const tls *t)
{
    return t ? tls_left(&t->out) : 0;
}

size_t tls_memory(const tls *t)
{
    /* And OpenSSL's own: an SSL, and records' buffers while they are in use. */
    return t ? sizeof *t + t->in.capacity + t->out.capacity + 2 * TLS_RECORD : 0;
}

/* ------------------------------------------------------- OpenSSL's bytes */

/* Whether what comes first is TLS: a rank without a secret, or none that is this far, says why in a
   frame. */
static bool is_tls(tls *t)
{
    uint8_t first = t->in.data[t->in.used];
    if (t->heard || first == TLS_FIRST_BYTE || first == TLS_NO_SECRET_ALERT[0])
        t->heard = true;
    else
        t->fault = TLS_PLAIN;
    return t->heard;
}

/* An alert, of a connection whose records the kernel makes. */
static void send_alert(tls *t, const void *data, size_t size)
{
    struct iovec all = {(void *)(uintptr_t)data, size};
    union {
        struct cmsghdr head;
        uint8_t bytes[CMSG_SPACE(1)];
    } type = {0};
    struct msghdr message = {.msg_iov = &all,
                             .msg_iovlen = 1,
                             .msg_control = type.bytes,
                             .msg_controllen = sizeof type.bytes};
    type.head.cmsg_level = SOL_TLS;
    type.head.cmsg_type = TLS_SET_RECORD_TYPE;
    type.head.cmsg_len = CMSG_LEN(1);
    *CMSG_DATA(&type.head) = RECORD_ALERT;
    (void)sendmsg(t->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* As OpenSSL would: a fatal alert, decode_error. */
static void refuse_hello(tls *t)
{
    static const uint8_t alert[TLS_ALERT_SIZE] = {0x15, 3, 3, 0, 2, 2, 50};
    t->fault = TLS_BROKEN;
    t->why = TLS_HELLO_ODD;
    if (t->by_kernel)
        send_alert(t, alert + RECORD_HEADER, sizeof alert - RECORD_HEADER);
    else
        (void)tls_bytes_add(&t->out, alert, sizeof alert);
}

/* How many bytes of what has come OpenSSL may have; 0: more have to come first; -1: none, ever. */
static ssize_t allowed(tls *t)
{
    size_t left = tls_left(&t->in);
    if (left == 0)
        return 0;
    if (!is_tls(t))
        return -1;
    if (!t->end->is_rank || t->up)
        return (ssize_t)left;
    ssize_t n = hello_guard_pass(&t->guard, t->in.data + t->in.used, left);
    if (n < 0)
        refuse_hello(t);
    return n;
}

/* Whoever sends nothing but records without data wants this thread's time. */
static bool tls_bytes_is_idle(tls *t, size_t step)
{
    t->idle += t->up ? step : 0;
    if (t->idle <= IDLE_MOST)
        return false;
    t->fault = TLS_BROKEN;
    t->why = "records without data, and no end of them";
    return true;
}

static int bio_read(BIO *bio, char *to, int room)
{
    const openssl *o = openssl_of_callback();
    tls *t = o->BIO_get_data(bio);
    ssize_t step;
    o->BIO_clear_flags(bio, BIO_RETRY_FLAGS);
    while ((step = allowed(t)) == 0) {
        ssize_t n = refill(t);
        if (n < 0 && t->sys_errno == EAGAIN)
            o->BIO_set_flags(bio, BIO_READ_AGAIN);
        if (n <= 0)
            return (int)n;
    }
    if (step < 0)
        return -1;
    step = step < room ? step : room;
    if (tls_bytes_is_idle(t, (size_t)step))
        return -1;
    memcpy(to, t->in.data + t->in.used, (size_t)step);
    t->in.used += (size_t)step;
    t->guard.left -= t->end->is_rank && !t->up ? (size_t)step : 0;
    return (int)step;
}

static int bio_write(BIO *bio, const char *data, int size)
{
    const openssl *o = openssl_of_callback();
    tls *t = o->BIO_get_data(bio);
    o->BIO_clear_flags(bio, BIO_RETRY_FLAGS);
    if (t->by_kernel) { /* which keeps its keys: a change of them is not announced */
        if (t->control == RECORD_ALERT)
            send_alert(t, data, (size_t)size);
        return size;
    }
    if (!tls_bytes_add(&t->out, data, (size_t)size)) {
        t->sys_errno = ENOMEM;
        return -1;
    }
    return size;
}

/* The kernel seals from now on, by these keys, if it can and all before them has gone. */
static bool give_keys(tls *t, long direction, void *keys)
{
    const openssl *o = t->end->o;
    if (t->by_kernel)
        return true;
    if (tls_flush(t) != 0 || tls_left(&t->out) > 0)
        return false;
    BIO *socket = o->BIO_new_socket(t->fd, 0);
    t->by_kernel = socket && o->BIO_ctrl(socket, BIO_SET_KTLS, direction, keys) > 0;
    if (socket)
        o->BIO_free(socket);
    return t->by_kernel;
}

static long bio_control(BIO *bio, int command, long number, void *pointer)
{
    tls *t = openssl_of_callback()->BIO_get_data(bio);
    switch (command) {
    case BIO_FLUSH: /* tls_flush() does */
        return 1;
    case BIO_SET_KTLS: /* what is received is opened by OpenSSL: other keys may follow */
        return number != 0 && give_keys(t, number, pointer);
    case BIO_GET_KTLS_SEND:
        return t->by_kernel;
    case BIO_SET_KTLS_CONTROL:
        t->control = (int)number;
        return 1;
    default:
        return 0;
    }
}

BIO_METHOD *tls_method_new(const openssl *o)
{
    BIO_METHOD *m = o->BIO_meth_new(o->BIO_get_new_index() | BIO_SOURCE_SINK, "fanin");
    if (m && o->BIO_meth_set_read(m, bio_read) && o->BIO_meth_set_write(m, bio_write) &&
        o->BIO_meth_set_ctrl(m, bio_control))
        return m;
    if (m)
        o->BIO_meth_free(m);
    return NULL;
}
