/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What TLS costs a connection over 127.0.0.1: CPU time of each end a gigabyte, with and without it;
 * how long one send of a rank takes, which is what begin_update may have to wait for; and a
 * handshake.
 *
 *     bench_tls [GIGABYTES]    of each kind (4)
 */
#include "secrets.h"
#include "testing.h"
#include "tls.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MEMORY ((size_t)64 << 20) /* more than CPUs' caches hold */
#define ROOM (512 << 10)          /* what a rank gives a connection on one host */
#define PIECE ((size_t)1 << 20)
#define HANDSHAKES 200
#define DEADLINE_MS 10000

static uint8_t source[MEMORY], destination[MEMORY];

typedef struct side {
    tls *t;
    int fd;
    uint64_t bytes;
    double cpu;          /* seconds */
    uint64_t *ns, sends; /* each send that took all it was given */
} side;

static uint64_t time_of(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static double cpu_now(void)
{
    return (double)time_of(CLOCK_THREAD_CPUTIME_ID) * 1e-9;
}

static void wait_for(int fd, short events)
{
    struct pollfd p = {.fd = fd, .events = events};
    assert_int_equal(poll(&p, 1, DEADLINE_MS), 1);
}

/* As a data thread sends: at most so much at once, then what is left of it. */
static void *send_all(void *cookie)
{
    side *s = cookie;
    double start = cpu_now();
    for (uint64_t sent = 0; sent < s->bytes || tls_unsent(s->t) > 0;) {
        size_t at = sent % MEMORY;
        size_t most = MEMORY - at < TLS_SEND_MOST ? MEMORY - at : TLS_SEND_MOST;
        const struct iovec all = {source + at, most};
        assert_int_equal(tls_flush(s->t), 0);
        ssize_t n = -1;
        if (tls_unsent(s->t) == 0 && sent < s->bytes) {
            uint64_t begun = time_of(CLOCK_THREAD_CPUTIME_ID);
            n = tls_send(s->t, s->fd, &all, 1);
            assert_true(n >= 0 || errno == EAGAIN);
            if (n == (ssize_t)TLS_SEND_MOST)
                s->ns[s->sends++] = time_of(CLOCK_THREAD_CPUTIME_ID) - begun;
        }
        sent += n > 0 ? (uint64_t)n : 0;
        if (tls_unsent(s->t) > 0 || (sent < s->bytes && n < (ssize_t)most))
            wait_for(s->fd, POLLOUT);
    }
    s->cpu = cpu_now() - start;
    return NULL;
}

static void receive_all(side *s)
{
    double start = cpu_now();
    for (uint64_t come = 0; come < s->bytes;) {
        size_t at = come % MEMORY;
        size_t most = MEMORY - at < PIECE ? MEMORY - at : PIECE;
        ssize_t n = tls_receive(s->t, s->fd, destination + at, most);
        assert_true(n > 0 || (n < 0 && errno == EAGAIN));
        come += n > 0 ? (uint64_t)n : 0;
        if (n < 0)
            wait_for(s->fd, POLLIN);
    }
    s->cpu = cpu_now() - start;
}

static void connect_both(int fds[2])
{
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof at;
    int room = ROOM, listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    fds[1] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(listener, (struct sockaddr *)&at, size), 0);
    assert_int_equal(listen(listener, 1), 0);
    assert_int_equal(getsockname(listener, (struct sockaddr *)&at, &size), 0);
    assert_int_equal(connect(fds[1], (struct sockaddr *)&at, size), 0);
    fds[0] = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    assert_true(fds[0] >= 0);
    assert_int_equal(fcntl(fds[1], F_SETFL, O_NONBLOCK), 0);
    assert_int_equal(setsockopt(fds[0], SOL_SOCKET, SO_SNDBUF, &room, sizeof room), 0);
    close(listener);
}

static void shake(tls *t[2], const int fds[2])
{
    tls_step steps[2] = {TLS_WAIT, TLS_WAIT};
    while (steps[0] != TLS_UP || steps[1] != TLS_UP) {
        for (int i = 1; i >= 0; i--) {
            steps[i] = steps[i] == TLS_UP ? TLS_UP : tls_handshake(t[i]);
            assert_int_not_equal(steps[i], TLS_FAILED);
            if (steps[1 - i] != TLS_UP)
                wait_for(fds[1 - i], POLLIN); /* over loopback it is there at once */
        }
    }
}

/* The value that so many of a hundred are below, in microseconds. */
static double part(const uint64_t *sorted, uint64_t n, uint64_t hundredths)
{
    uint64_t at = n * hundredths / 100;
    return (double)sorted[at < n ? at : n - 1] * 1e-3;
}

static int by_size(const void *a, const void *b)
{
    const uint64_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

static void tell(const char *name, side both[2], double wall)
{
    double gb = (double)both[0].bytes * 1e-9;
    printf("%-6s %.2f GB/s; CPU of who sends %.3f s/GB, of who receives %.3f s/GB\n",
           name, gb / wall, both[0].cpu / gb, both[1].cpu / gb);
    uint64_t n = both[0].sends;
    qsort(both[0].ns, n, sizeof *both[0].ns, by_size);
    if (n > 0)
        printf("%-6s a send of %zu KiB, CPU time: p50 %.0f us, p99 %.0f us, most %.0f "
               "us, of %llu\n",
               name, TLS_SEND_MOST >> 10, part(both[0].ns, n, 50),
               part(both[0].ns, n, 99), part(both[0].ns, n, 100),
               (unsigned long long)n);
}

static void move(tls_end *ends[2], uint64_t bytes)
{
    int fds[2];
    side both[2] = {{.bytes = bytes}, {.bytes = bytes}};
    tls *t[2] = {NULL, NULL};
    pthread_t sender;
    connect_both(fds);
    for (int i = 0; i < 2 && ends; i++)
        assert_non_null(t[i] = tls_new(ends[i], fds[i]));
    if (ends)
        shake(t, fds);
    for (int i = 0; i < 2; i++) {
        both[i].t = t[i];
        both[i].fd = fds[i];
    }
    both[0].ns = calloc(bytes / TLS_SEND_MOST + 1, sizeof *both[0].ns);
    assert_non_null(both[0].ns);
    uint64_t start = time_of(CLOCK_MONOTONIC);
    assert_int_equal(pthread_create(&sender, NULL, send_all, &both[0]), 0);
    receive_all(&both[1]);
    pthread_join(sender, NULL);
    tell(ends ? "TLS" : "plain", both,
         (double)(time_of(CLOCK_MONOTONIC) - start) * 1e-9);
    for (int i = 0; i < 2; i++) {
        tls_free(&t[i]);
        close(fds[i]);
    }
    free(both[0].ns);
}

static void shake_often(tls_end *ends[2])
{
    uint64_t ns[HANDSHAKES];
    for (int round = 0; round < HANDSHAKES; round++) {
        int fds[2];
        tls *t[2];
        connect_both(fds);
        uint64_t start = time_of(CLOCK_THREAD_CPUTIME_ID);
        for (int i = 0; i < 2; i++)
            assert_non_null(t[i] = tls_new(ends[i], fds[i]));
        shake(t, fds);
        ns[round] = time_of(CLOCK_THREAD_CPUTIME_ID) - start;
        for (int i = 0; i < 2; i++) {
            tls_free(&t[i]);
            close(fds[i]);
        }
    }
    qsort(ns, HANDSHAKES, sizeof *ns, by_size);
    printf("TLS    a handshake, CPU time of both ends: p50 %.0f us, p99 %.0f us\n",
           part(ns, HANDSHAKES, 50), part(ns, HANDSHAKES, 99));
}

int main(int argc, char **argv)
{
    fanin_error error = FANIN_ERROR_INIT;
    const uint8_t world[16] = {5};
    tls_end *ends[2];
    double gigabytes = argc > 1 ? strtod(argv[1], NULL) : 4;
    uint64_t bytes = gigabytes > 0 ? (uint64_t)(gigabytes * 1e9) : 1;
    memset(source, 1, sizeof source); /* all pages its own, not the zero page */
    memset(destination, 2, sizeof destination);
    assert_ok(tls_end_of_rank(secret_of('1'), world, 0, &ends[0], &error), error);
    assert_ok(tls_end_of_reader(secret_of('1'), &ends[1], &error), error);
    for (int round = 0; round < 3; round++) {
        move(NULL, bytes);
        move(ends, bytes);
    }
    shake_often(ends);
    for (int i = 0; i < 2; i++)
        tls_end_free(&ends[i]);
    secrets_remove();
    return 0;
}
