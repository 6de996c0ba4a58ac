/* SPDX-License-Identifier: Apache-2.0 */
#include "flip_proxy.h"

#include "socket.h"
#include "testing.h"
#include <poll.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define MAX_PAIRS 16
#define PIECE 16384

typedef struct pair {
    int end[2]; /* where bytes of each way come from; -1: free */
    unsigned number;
} pair;

static void close_pair(pair *p)
{
    close(p->end[0]);
    close(p->end[1]);
    p->end[0] = p->end[1] = -1;
}

static bool put(int fd, const uint8_t *data, size_t size)
{
    while (size > 0) {
        ssize_t n = send(fd, data, size, MSG_NOSIGNAL);
        if (n <= 0)
            return false;
        data += n;
        size -= (size_t)n;
    }
    return true;
}

static bool pass(flip_proxy *p, const pair *c, flip_way way)
{
    static _Thread_local uint8_t piece[PIECE];
    ssize_t n = recv(c->end[way], piece, sizeof(piece), 0);
    if (n <= 0)
        return false;
    uint64_t before = 0, end;
    if (c->number < FLIP_CONNECTIONS)
        before = atomic_fetch_add(&p->passed[c->number][way], (uint64_t)n);
    end = before + (uint64_t)n;
    if (c->number == p->connection && way == p->way && p->at >= before && p->at < end) {
        piece[p->at - before] ^= (uint8_t)(1u << p->bit);
        atomic_store(&p->flipped, true);
    }
    return put(c->end[way == FLIP_TO_RANK ? FLIP_TO_CLIENT : FLIP_TO_RANK], piece,
               (size_t)n);
}

static void on_accept(const flip_proxy *p, pair *pairs, unsigned *n_accepted)
{
    char text[32];
    socket_address to;
    int client = accept4(p->listener, NULL, NULL, SOCK_CLOEXEC);
    if (client < 0)
        return;
    snprintf(text, sizeof(text), "127.0.0.1:%u", (unsigned)p->target);
    assert_int_equal(socket_resolve(text, &to, NULL), FANIN_OK);
    int rank = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    pair *c = pairs;
    while (c < pairs + MAX_PAIRS && c->end[0] >= 0)
        c++;
    if (rank < 0 || c == pairs + MAX_PAIRS ||
        connect(rank, (struct sockaddr *)&to.storage, to.length) != 0) {
        close(client);
        close(rank);
        return;
    }
    socket_tune(client);
    socket_tune(rank);
    *c = (pair){.end = {client, rank}, .number = (*n_accepted)++};
}

static void *run(void *cookie)
{
    flip_proxy *p = cookie;
    pair pairs[MAX_PAIRS];
    unsigned n_accepted = 0;
    for (int i = 0; i < MAX_PAIRS; i++)
        pairs[i] = (pair){.end = {-1, -1}};
    for (;;) {
        struct pollfd polled[2 + 2 * MAX_PAIRS] = {{p->wake, POLLIN, 0},
                                                   {p->listener, POLLIN, 0}};
        for (int i = 0; i < MAX_PAIRS; i++) {
            polled[2 + 2 * i] = (struct pollfd){pairs[i].end[0], POLLIN, 0};
            polled[3 + 2 * i] = (struct pollfd){pairs[i].end[1], POLLIN, 0};
        }
        (void)poll(polled, 2 + 2 * MAX_PAIRS, -1);
        if (polled[0].revents)
            break;
        for (int i = 0; i < MAX_PAIRS; i++) {
            if ((polled[2 + 2 * i].revents && !pass(p, &pairs[i], FLIP_TO_RANK)) ||
                (polled[3 + 2 * i].revents && !pass(p, &pairs[i], FLIP_TO_CLIENT)))
                close_pair(&pairs[i]);
        }
        if (polled[1].revents)
            on_accept(p, pairs, &n_accepted);
    }
    for (int i = 0; i < MAX_PAIRS; i++) {
        if (pairs[i].end[0] >= 0)
            close_pair(&pairs[i]);
    }
    return NULL;
}

void flip_proxy_start(flip_proxy *p, uint16_t target)
{
    socket_address tcp;
    p->target = target;
    atomic_init(&p->flipped, false);
    for (int i = 0; i < FLIP_CONNECTIONS; i++) {
        atomic_init(&p->passed[i][0], 0);
        atomic_init(&p->passed[i][1], 0);
    }
    assert_int_equal(socket_resolve("127.0.0.1:0", &tcp, NULL), FANIN_OK);
    assert_int_equal(socket_listen(&tcp, 16, &p->listener, NULL), FANIN_OK);
    snprintf(p->address, sizeof(p->address), "127.0.0.1:%u",
             (unsigned)socket_port(p->listener));
    p->wake = eventfd(0, EFD_CLOEXEC);
    assert_true(p->wake >= 0);
    assert_int_equal(pthread_create(&p->thread, NULL, run, p), 0);
}

void flip_proxy_stop(flip_proxy *p)
{
    uint64_t one = 1;
    assert_int_equal(write(p->wake, &one, sizeof(one)), sizeof(one));
    pthread_join(p->thread, NULL);
    close(p->listener);
    close(p->wake);
}
