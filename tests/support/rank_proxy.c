/* SPDX-License-Identifier: Apache-2.0 */
#include "rank_proxy.h"

#include "array.h"
#include "messages.h"
#include "digest.h"
#include "socket.h"
#include "testing.h"
#include <poll.h>
#include <sys/eventfd.h>

#define MAX_PAIRS 16
#define PIECE 65536
#define FLIPS 24 /* of a way of a connection */

/* A client's connection and its other half to the rank. */
typedef struct pair {
    int client, rank; /* -1: free */
    buffer asked;     /* of the client, not yet passed on */
    buffer greeting;  /* of the rank, until it is whole and told anew */
    bool greeted;
    bool is_unix, sealed; /* sealed: the client's frames have checksums */
    unsigned number;      /* in the order of accepting */
    uint64_t passed[2];   /* bytes, by way; with a flip */
} pair;

static void close_pair(pair *p)
{
    close(p->client);
    close(p->rank);
    buffer_free(&p->asked);
    buffer_free(&p->greeting);
    *p = (pair){.client = -1, .rank = -1};
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

/* Passes whole requests on. */
static bool from_client(rank_proxy *p, pair *c)
{
    if (!buffer_reserve(&c->asked, PIECE))
        return false;
    ssize_t n = recv(c->client, c->asked.data + c->asked.size, PIECE, 0);
    if (n <= 0)
        return false;
    c->asked.size += (size_t)n;
    for (;;) {
        frame f;
        const char *why;
        if (c->asked.size < FRAME_SIZE)
            return true;
        if (seal_decode(c->asked.data, c->sealed, &f, &why) != FANIN_OK)
            return false;
        size_t whole = FRAME_SIZE + (size_t)f.length + seal_size(c->sealed);
        if (c->asked.size < whole)
            return true;
        /* Both ends are this library: over TCP all frames but the hello are sealed. */
        c->sealed = !c->is_unix;
        if (f.type == p->when && !atomic_exchange(&p->triggered, true))
            p->trigger(p->cookie);
        bool dropped = f.type == p->when && atomic_load(&p->drops);
        if (!dropped && !put(c->rank, c->asked.data, whole))
            return false;
        memmove(c->asked.data, c->asked.data + whole, c->asked.size - whole);
        c->asked.size -= whole;
    }
}

/* The rank's hello with the address that the proxy stands for. */
static bool greet(rank_proxy *p, pair *c)
{
    frame f;
    const char *why;
    const buffer *g = &c->greeting;
    if (g->size < FRAME_SIZE)
        return true;
    if (frame_decode(g->data, &f, &why) != FANIN_OK)
        return false;
    size_t whole = FRAME_SIZE + (size_t)f.length;
    if (g->size < whole)
        return true;
    body b = {.data = g->data + FRAME_SIZE, .size = f.length};
    msg_hello_ok m;
    buffer told = {0};
    if (f.type == MSG_HELLO_OK && decode_hello_ok(&b, &m) == FANIN_OK) {
        snprintf(m.address, sizeof m.address, "%s", p->address);
        encode_hello_ok(&told, f.request, &m);
    } else {
        buffer_append(&told, g->data, whole);
    }
    buffer_append(&told, g->data + whole, g->size - whole);
    c->greeted = put(c->client, told.data, told.size);
    buffer_free(&told);
    return c->greeted;
}

static bool from_rank(rank_proxy *p, pair *c)
{
    static _Thread_local uint8_t piece[PIECE];
    ssize_t n = recv(c->rank, piece, sizeof(piece), 0);
    if (n <= 0)
        return false;
    if (c->greeted)
        return put(c->client, piece, (size_t)n);
    buffer_append(&c->greeting, piece, (size_t)n);
    return greet(p, c);
}

/* Passes on whatever comes, altered where it shall be. */
static bool pass(flip *f, pair *c, flip_way way)
{
    static _Thread_local uint8_t piece[PIECE];
    ssize_t n =
        recv(way == FLIP_TO_RANK ? c->client : c->rank, piece, sizeof(piece), 0);
    if (n <= 0)
        return false;
    uint64_t before = c->passed[way];
    c->passed[way] += (uint64_t)n;
    if (c->number < FLIP_CONNECTIONS)
        atomic_fetch_add(&f->passed[c->number][way], (uint64_t)n);
    if ((c->number == f->connection || f->connection == FLIP_EACH) && way == f->way &&
        f->at >= before && f->at - before < (uint64_t)n) {
        piece[f->at - before] ^= (uint8_t)(1u << f->bit);
        atomic_store(&f->flipped, true);
    }
    return put(way == FLIP_TO_RANK ? c->rank : c->client, piece, (size_t)n);
}

static bool forward(rank_proxy *p, pair *c, flip_way way)
{
    if (p->flip)
        return pass(p->flip, c, way);
    return way == FLIP_TO_RANK ? from_client(p, c) : from_rank(p, c);
}

static void target_address(const rank_proxy *p, bool is_unix, socket_address *out)
{
    char text[32];
    socket_address tcp;
    snprintf(text, sizeof(text), "127.0.0.1:%u", (unsigned)p->target);
    assert_int_equal(socket_resolve(text, &tcp, NULL), FANIN_OK);
    if (is_unix)
        socket_unix_address(geteuid(), &tcp, out);
    else
        *out = tcp;
}

/* A rank that is gone refuses here; the client sees its connection closed at once. */
static void on_accept(rank_proxy *p, pair *pairs, bool is_unix)
{
    socket_address to;
    int client = accept4(p->listeners[is_unix], NULL, NULL, SOCK_CLOEXEC);
    if (client < 0)
        return;
    unsigned number = atomic_fetch_add(&p->accepted[is_unix], 1);
    target_address(p, is_unix, &to);
    int rank = socket(to.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    pair *c = pairs;
    while (c < pairs + MAX_PAIRS && c->client >= 0)
        c++;
    if (rank < 0 || c == pairs + MAX_PAIRS ||
        connect(rank, (struct sockaddr *)&to.storage, to.length) != 0) {
        close(client);
        close(rank);
        return;
    }
    socket_tune(client);
    socket_tune(rank);
    /* Over TCP a forwarder is nothing special, and its rank has another address. */
    *c = (pair){.client = client,
                .rank = rank,
                .greeted = !is_unix || p->keeps_address,
                .is_unix = is_unix,
                .number = number};
}

static void on_wake(rank_proxy *p, pair *pairs)
{
    uint64_t count;
    (void)!read(p->wake, &count, sizeof count);
    for (int i = 0; i < MAX_PAIRS; i++)
        if (pairs[i].client >= 0 && !pairs[i].is_unix &&
            pairs[i].number + 1 == atomic_load(&p->cut))
            close_pair(&pairs[i]);
}

static void *run(void *cookie)
{
    rank_proxy *p = cookie;
    pair pairs[MAX_PAIRS];
    for (int i = 0; i < MAX_PAIRS; i++)
        pairs[i] = (pair){.client = -1, .rank = -1};
    for (;;) {
        bool holds = atomic_load(&p->holds);
        struct pollfd polled[3 + 2 * MAX_PAIRS] = {
            {p->wake, POLLIN, 0},
            {holds ? -1 : p->listeners[0], POLLIN, 0},
            {holds ? -1 : p->listeners[1], POLLIN, 0}};
        for (int i = 0; i < MAX_PAIRS; i++) {
            polled[3 + 2 * i] = (struct pollfd){pairs[i].client, POLLIN, 0};
            polled[4 + 2 * i] = (struct pollfd){pairs[i].rank, POLLIN, 0};
        }
        (void)poll(polled, 3 + 2 * MAX_PAIRS, -1);
        if (atomic_load(&p->ends))
            break;
        for (int i = 0; i < MAX_PAIRS; i++) {
            pair *c = &pairs[i];
            if ((polled[3 + 2 * i].revents && !forward(p, c, FLIP_TO_RANK)) ||
                (polled[4 + 2 * i].revents && !forward(p, c, FLIP_TO_CLIENT)))
                close_pair(c);
        }
        for (int i = 0; i < 2; i++) {
            if (polled[1 + i].revents && !atomic_load(&p->holds))
                on_accept(p, pairs, i == 1);
        }
        if (polled[0].revents)
            on_wake(p, pairs);
    }
    for (int i = 0; i < MAX_PAIRS; i++) {
        if (pairs[i].client >= 0)
            close_pair(&pairs[i]);
    }
    return NULL;
}

static void start(rank_proxy *p)
{
    socket_address tcp, name;
    assert_int_equal(socket_resolve("127.0.0.1:0", &tcp, NULL), FANIN_OK);
    assert_int_equal(socket_listen(&tcp, 16, &p->listeners[0], NULL), FANIN_OK);
    socket_set_port(&tcp, socket_port(p->listeners[0]));
    snprintf(p->address, sizeof p->address, "%.31s", tcp.text);
    socket_unix_address(geteuid(), &tcp, &name);
    p->listeners[1] = -1;
    if (!p->flip)
        assert_int_equal(socket_listen(&name, 16, &p->listeners[1], NULL), FANIN_OK);
    p->wake = eventfd(0, EFD_CLOEXEC);
    assert_true(p->wake >= 0);
    assert_int_equal(pthread_create(&p->thread, NULL, run, p), 0);
}

void rank_proxy_start(rank_proxy *p, uint16_t target, message_type when,
                      void (*trigger)(void *), void *cookie)
{
    *p = (rank_proxy){
        .target = target, .when = when, .trigger = trigger, .cookie = cookie};
    start(p);
}

void rank_proxy_start_flip(rank_proxy *p, uint16_t target, flip *f)
{
    *p = (rank_proxy){.target = target, .flip = f};
    start(p);
}

static void call_by_link(uint16_t target, flip *f,
                         void (*call)(const char *address, bool altered))
{
    rank_proxy proxy;
    rank_proxy_start_flip(&proxy, target, f);
    call(proxy.address, f->at != UINT64_MAX);
    rank_proxy_stop(&proxy);
}

void rank_proxy_flip_all(uint16_t target,
                         void (*call)(const char *address, bool altered))
{
    flip clean = {.at = UINT64_MAX};
    call_by_link(target, &clean, call);
    for (unsigned i = 0; i < 4; i++) {
        uint64_t total = clean.passed[i / 2][i % 2];
        assert_true(total > 0);
        for (uint64_t at = i; at < total; at += total / FLIPS + 1) {
            flip f = {.connection = i / 2,
                      .way = (flip_way)(i % 2),
                      .at = at,
                      .bit = (unsigned)(at % 8)};
            call_by_link(target, &f, call);
        }
    }
}

static void wake(rank_proxy *p)
{
    uint64_t one = 1;
    assert_int_equal(write(p->wake, &one, sizeof one), sizeof one);
}

void rank_proxy_hold(rank_proxy *p)
{
    atomic_store(&p->holds, true);
    wake(p);
}

void rank_proxy_let_go(rank_proxy *p)
{
    atomic_store(&p->holds, false);
    wake(p);
}

void rank_proxy_cut(rank_proxy *p, unsigned connection)
{
    atomic_store(&p->cut, connection + 1);
    wake(p);
}

void rank_proxy_stop(rank_proxy *p)
{
    atomic_store(&p->ends, true);
    wake(p);
    pthread_join(p->thread, NULL);
    close(p->listeners[0]);
    if (p->listeners[1] >= 0)
        close(p->listeners[1]);
    close(p->wake);
}
