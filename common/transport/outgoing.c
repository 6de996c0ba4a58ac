/* SPDX-License-Identifier: Apache-2.0 */
#include "outgoing.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

bool outgoing_is_empty(const outgoing *o)
{
    return o->sent == o->bytes.size;
}

size_t outgoing_left(const outgoing *o)
{
    return o->bytes.size - o->sent;
}

void outgoing_clear(outgoing *o)
{
    buffer_clear(&o->bytes);
    o->sent = 0;
}

void outgoing_free(outgoing *o)
{
    buffer_free(&o->bytes);
    o->sent = 0;
}

int outgoing_flush(outgoing *o, tls *t, int fd)
{
    while (!outgoing_is_empty(o)) {
        const struct iovec all = {o->bytes.data + o->sent, outgoing_left(o)};
        ssize_t n = tls_send(t, fd, &all, 1);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return 0;
        if (n < 0)
            return errno;
        outgoing_sent(o, (size_t)n);
    }
    return tls_flush(t);
}

void outgoing_sent(outgoing *o, size_t bytes)
{
    o->sent += bytes;
    if (o->sent == o->bytes.size)
        o->sent = o->bytes.size = 0;
}

void outgoing_trim(outgoing *o, size_t keep)
{
    size_t left = outgoing_left(o);
    if (left == 0 && o->bytes.capacity > keep) {
        free(o->bytes.data);
        o->bytes = (buffer){.sealed = o->bytes.sealed, .failed = o->bytes.failed};
        o->sent = 0;
    } else if (o->sent >= keep && o->sent >= left) {
        memmove(o->bytes.data, o->bytes.data + o->sent, left);
        o->bytes.size = left;
        o->sent = 0;
    }
}
