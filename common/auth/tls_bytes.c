/* SPDX-License-Identifier: Apache-2.0 */
/* What has come from the socket and what is to go there: many records by one system call, and no
   signal. */
#include "tls_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define FIRST                                                                          \
    ((size_t)4 << 10) /* received at once at first; grows while that is full */
#define IN_MOST ((size_t)256 << 10) /* received at once */

size_t tls_left(const tls_bytes *b)
{
    return b->size - b->used;
}

bool tls_reserve(tls_bytes *b, size_t more)
{
    if (b->used == b->size)
        b->used = b->size = 0;
    if (b->capacity - b->size >= more)
        return true;
    size_t capacity = b->capacity ? b->capacity : FIRST;
    while (capacity - b->size < more)
        capacity *= 2;
    uint8_t *data = realloc(b->data, capacity);
    if (!data)
        return false;
    b->data = data;
    b->capacity = capacity;
    return true;
}

ssize_t tls_refill(tls *t, size_t need)
{
    tls_bytes *in = &t->in;
    size_t have = tls_left(in);
    bool was_full = in->capacity > 0 && in->size == in->capacity;
    size_t want = was_full && in->capacity < IN_MOST ? 2 * in->capacity : in->capacity;
    want = want > need ? want : need;
    if (have > 0 && in->used > 0)
        memmove(in->data, in->data + in->used, have); /* of one record */
    in->used = 0;
    in->size = have;
    if (!tls_reserve(in, (want ? want : FIRST) - have)) {
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
    return t ? sizeof *t + t->in.capacity + t->out.capacity + t->left.capacity +
                   2 * RECORD_PLAIN
             : 0;
}
