/* SPDX-License-Identifier: Apache-2.0 */
#include "outgoing.h"

#include <errno.h>
#include <sys/socket.h>

bool outgoing_is_empty(const outgoing *o)
{
    return o->sent == o->bytes.size;
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

int outgoing_flush(outgoing *o, int fd)
{
    while (!outgoing_is_empty(o)) {
        ssize_t n =
            send(fd, o->bytes.data + o->sent, o->bytes.size - o->sent, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return 0;
        if (n < 0)
            return errno;
        o->sent += (size_t)n;
    }
    outgoing_clear(o);
    return 0;
}
