/* SPDX-License-Identifier: Apache-2.0 */
#include "secured_peer.h"
#include "socket.h"
#include "testing.h"

#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>

#define MOST 16
#define PATIENCE_MS 10000
#define PLAIN 0   /* the peer's end of things */
#define SECURED 1 /* the server's */

typedef struct go_between {
    pthread_t thread;
    tls *t;
    int fds[2];
} go_between;

static go_between all[MOST];
static size_t n;

static void await(int fd, short events)
{
    assert_int_equal(poll(&(struct pollfd){.fd = fd, .events = events}, 1, PATIENCE_MS),
                     1);
}

/* All of it; false: the connection is over. */
static bool say(go_between *g, const uint8_t *data, size_t size)
{
    while (size > 0) {
        struct iovec piece = {(void *)data, size};
        ssize_t sent = tls_send(g->t, g->fds[SECURED], &piece, 1);
        if (sent < 0 && errno != EAGAIN && errno != EINTR)
            return false;
        data += sent > 0 ? sent : 0;
        size -= sent > 0 ? (size_t)sent : 0;
        while (tls_unsent(g->t) > 0) {
            await(g->fds[SECURED], POLLOUT);
            if (tls_flush(g->t) != 0)
                return false;
        }
    }
    return true;
}

/* Whatever has come from the server; false: it was the end. */
static bool hear(go_between *g)
{
    uint8_t bytes[16384];
    do {
        ssize_t got = tls_receive(g->t, g->fds[SECURED], bytes, sizeof bytes);
        if (got < 0 && (errno == EAGAIN || errno == EINTR))
            return true;
        if (got <= 0 || send(g->fds[PLAIN], bytes, (size_t)got, MSG_NOSIGNAL) != got)
            return false;
    } while (tls_pending(g->t));
    return true;
}

/* Until one side closes. */
static void *pass_on(void *cookie)
{
    go_between *g = cookie;
    uint8_t bytes[16384];
    struct pollfd wanted[] = {{.fd = g->fds[PLAIN], .events = POLLIN},
                              {.fd = g->fds[SECURED], .events = POLLIN}};
    for (bool goes_on = true; goes_on;) {
        goes_on = poll(wanted, 2, -1) > 0 && (!wanted[SECURED].revents || hear(g));
        if (goes_on && wanted[PLAIN].revents) {
            ssize_t got = recv(g->fds[PLAIN], bytes, sizeof bytes, 0);
            goes_on = got > 0 && say(g, bytes, (size_t)got);
        }
    }
    tls_free(&g->t);
    close(g->fds[SECURED]);
    close(g->fds[PLAIN]);
    return NULL;
}

peer secured_peer(fanin_server *s, const tls_end *end)
{
    socket_address at;
    int pair[2];
    char text[32];
    go_between *g = &all[n++];
    assert_true(n <= MOST);
    snprintf(text, sizeof text, "127.0.0.1:%u", (unsigned)fanin_server_port(s));
    assert_int_equal(socket_resolve(text, &at, NULL), FANIN_OK);
    assert_int_equal(socket_connect_start(&at, &g->fds[SECURED], NULL), FANIN_OK);
    await(g->fds[SECURED], POLLOUT);
    assert_non_null(g->t = tls_new(end, g->fds[SECURED]));
    tls_step step;
    while ((step = tls_handshake(g->t)) == TLS_WAIT)
        await(g->fds[SECURED], tls_unsent(g->t) > 0 ? POLLOUT : POLLIN);
    assert_int_equal(step, TLS_UP);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    g->fds[PLAIN] = pair[1];
    assert_int_equal(pthread_create(&g->thread, NULL, pass_on, g), 0);
    return peer_of(pair[0]);
}

void secured_peers_end(void)
{
    while (n > 0)
        pthread_join(all[--n].thread, NULL);
}
