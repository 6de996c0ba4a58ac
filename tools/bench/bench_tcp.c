/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/bench.h"
#include "fetch/progress.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

/* Of what is unsent more than ROOM (doubled by the kernel) has left the CPU's caches before it is
   read. */
enum { PIECE = 1 << 20, ROOM = 512 << 10, ROUNDS = 5, MAX_LANES = 64, DEADLINE_S = 60 };

/* A connection from 127.0.0.1 to itself, and the part of the memory that goes over it. */
typedef struct lane {
    int out, in;
    uint8_t *from, *to;
    uint64_t bytes;
    int unsent, unread; /* errno of either end; 0: all went */
} lane;

static size_t step_of(const lane *l, uint64_t at)
{
    return l->bytes - at < PIECE ? (size_t)(l->bytes - at) : (size_t)PIECE;
}

static void *send_all(void *cookie)
{
    lane *l = cookie;
    for (uint64_t at = 0; at < l->bytes;) {
        ssize_t n = send(l->out, l->from + at, step_of(l, at), MSG_NOSIGNAL);
        if (n < 0) {
            l->unsent = errno;
            shutdown(l->out, SHUT_RDWR); /* so that the other end does not wait */
            break;
        }
        at += (uint64_t)n;
    }
    return NULL;
}

static void *receive_all(void *cookie)
{
    lane *l = cookie;
    for (uint64_t at = 0; at < l->bytes;) {
        ssize_t n = recv(l->in, l->to + at, step_of(l, at), 0);
        if (n <= 0) {
            l->unread = n < 0 ? errno : ECONNRESET;
            shutdown(l->in, SHUT_RDWR);
            break;
        }
        at += (uint64_t)n;
    }
    return NULL;
}

/* Two threads a lane, one at either end; the calling one is among them. */
static int move_once(lane *lanes, uint32_t n)
{
    pthread_t senders[MAX_LANES], receivers[MAX_LANES];
    uint32_t sending = 0, receiving = 1;
    int failed = 0;
    for (; sending < n && failed == 0; sending += failed == 0) {
        failed = pthread_create(&senders[sending], NULL, send_all, &lanes[sending]);
    }
    for (; receiving < n && failed == 0; receiving += failed == 0) {
        failed =
            pthread_create(&receivers[receiving], NULL, receive_all, &lanes[receiving]);
    }
    for (uint32_t i = 0; i < n && failed != 0; i++) {
        shutdown(lanes[i].out, SHUT_RDWR);
    }
    receive_all(&lanes[0]);
    for (uint32_t i = 0; i < sending; i++) {
        pthread_join(senders[i], NULL);
    }
    for (uint32_t i = 1; i < receiving; i++) {
        pthread_join(receivers[i], NULL);
    }
    for (uint32_t i = 0; i < n && failed == 0; i++) {
        failed = lanes[i].unsent != 0 ? lanes[i].unsent : lanes[i].unread;
    }
    return failed;
}

/* 0, or errno. */
static int connect_lane(lane *l)
{
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_addr = {htonl(INADDR_LOOPBACK)}};
    struct timeval most = {.tv_sec = DEADLINE_S};
    int room = ROOM;
    socklen_t size = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    l->out = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool good = listener >= 0 && l->out >= 0 &&
                bind(listener, (struct sockaddr *)&at, sizeof at) == 0 &&
                listen(listener, 1) == 0 &&
                getsockname(listener, (struct sockaddr *)&at, &size) == 0 &&
                connect(l->out, (struct sockaddr *)&at, sizeof at) == 0;
    l->in = good ? accept4(listener, NULL, NULL, SOCK_CLOEXEC) : -1;
    good = l->in >= 0 &&
           setsockopt(l->out, SOL_SOCKET, SO_SNDBUF, &room, sizeof room) == 0 &&
           setsockopt(l->out, SOL_SOCKET, SO_SNDTIMEO, &most, sizeof most) == 0 &&
           setsockopt(l->in, SOL_SOCKET, SO_RCVTIMEO, &most, sizeof most) == 0;
    int failed = good ? 0 : errno;
    if (listener >= 0) {
        close(listener);
    }
    return failed;
}

static int open_lanes(lane *lanes, uint32_t n, const arena *a, uint8_t *source)
{
    int failed = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t first = a->size * i / n;
        uint64_t end = a->size * (i + 1) / n;
        lanes[i] = (lane){-1, -1, source + first, a->memory + first, end - first, 0, 0};
        failed = failed != 0 ? failed : connect_lane(&lanes[i]);
    }
    return failed;
}

static void close_lanes(const lane *lanes, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        if (lanes[i].out >= 0) {
            close(lanes[i].out);
        }
        if (lanes[i].in >= 0) {
            close(lanes[i].in);
        }
    }
}

void bench_tcp(bench_limits *limits, const arena *a, uint32_t threads)
{
    lane lanes[MAX_LANES] = {0};
    uint64_t times[ROUNDS];
    bench_limit *limit = bench_limit_add(limits, "TCP");
    uint8_t *source = arena_map(a->size);
    threads = threads < MAX_LANES ? threads : MAX_LANES;
    threads = threads > 0 ? threads : 1;
    limit->threads = threads;
    limit->bytes = a->size;
    if (source == NULL) {
        bench_limit_end(limit, NULL, 0, "out of memory");
        return;
    }
    memset(source, 1, a->size); /* all pages its own, not the zero page */
    int failed = open_lanes(lanes, threads, a, source);
    for (uint32_t round = 0; round < ROUNDS && failed == 0; round++) {
        uint64_t start = progress_now_ns();
        failed = move_once(lanes, threads);
        times[round] = progress_now_ns() - start;
    }
    bench_limit_end(limit, times, ROUNDS, failed != 0 ? strerror(failed) : NULL);
    close_lanes(lanes, threads);
    munmap(source, a->size > 0 ? a->size : 1);
}
