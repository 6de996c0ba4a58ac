/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/bench.h"
#include "fetch/output.h"
#include "clock.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PIECE = 1 << 20, PAGE = 4096, ROUNDS = 5, MAX_THREADS = 64 };

/* A contiguous stretch of a rank's memory: 1 MiB at most. */
typedef struct piece {
    pid_t pid;
    uint64_t from, to, length; /**< to: offset in the arena */
} piece;

typedef struct pieces {
    piece *items;
    size_t count, capacity;
    uint64_t bytes;
} pieces;

static void limits_add_piece(pieces *p, pid_t pid, uint64_t from, uint64_t length,
                             uint64_t room)
{
    p->items = output_room(p->items, p->count, &p->capacity, sizeof p->items[0]);
    /* Allocations lie a few bytes apart, so that a little more is read than the tensors
       have; what goes beyond the arena starts at its front again. */
    length = length < room ? length : room;
    const piece *last = p->count > 0 ? &p->items[p->count - 1] : NULL;
    uint64_t to = last != NULL ? last->to + last->length : 0;
    p->items[p->count++] = (piece){pid, from, to + length <= room ? to : 0, length};
    p->bytes += length;
}

static int limits_by_address(const void *a, const void *b)
{
    const rank_extent *x = a;
    const rank_extent *y = b;
    return (x->address > y->address) - (x->address < y->address);
}

/* Stretches of shards that share pages or neighbouring ones, cut into pieces; until there are
   @p most bytes. */
static void limits_add_rank(pieces *p, pid_t pid, const rank_extent *shards,
                            size_t count, uint64_t room, uint64_t most)
{
    rank_extent *sorted = output_require(malloc((count + 1) * sizeof sorted[0]));
    memcpy(sorted, shards, count * sizeof sorted[0]);
    qsort(sorted, count, sizeof sorted[0], limits_by_address);
    for (size_t i = 0; i < count;) {
        uint64_t from = sorted[i].address;
        uint64_t end = from + sorted[i].bytes;
        for (i++; i < count && sorted[i].address <= end + PAGE; i++)
            end = sorted[i].address + sorted[i].bytes;
        for (; from < end && p->bytes < most; from += PIECE)
            limits_add_piece(p, pid, from, end - from < PIECE ? end - from : PIECE,
                             room);
    }
    free(sorted);
}

int bench_together(void *(*work)(void *), void *items, size_t size, uint32_t n)
{
    pthread_t *threads = output_require(calloc(n + 1, sizeof *threads));
    uint32_t started = 1;
    int failed = 0;
    for (; started < n && failed == 0; started += failed == 0) {
        void *item = (char *)items + started * size;
        failed = pthread_create(&threads[started], NULL, work, item);
    }
    work(items);
    for (uint32_t i = 1; i < started; i++)
        pthread_join(threads[i], NULL);
    free(threads);
    return failed;
}

typedef struct reader {
    const pieces *pieces;
    const arena *arena;
    size_t first, step;
    int failed; /**< errno */
} reader;

static void *read_pieces(void *cookie)
{
    reader *r = cookie;
    for (size_t i = r->first; i < r->pieces->count; i += r->step) {
        const piece *p = &r->pieces->items[i];
        struct iovec local = {r->arena->memory + p->to, p->length};
        struct iovec remote = {(void *)(uintptr_t)p->from, p->length};
        ssize_t n = process_vm_readv(p->pid, &local, 1, &remote, 1, 0);
        if (n != (ssize_t)p->length) {
            r->failed = n < 0 ? errno : EFAULT;
            break;
        }
    }
    return NULL;
}

static int read_once(const pieces *p, const arena *a, uint32_t threads)
{
    reader readers[MAX_THREADS] = {0};
    for (uint32_t t = 0; t < threads; t++)
        readers[t] = (reader){p, a, t, threads, 0};
    int failed = bench_together(read_pieces, readers, sizeof readers[0], threads);
    for (uint32_t t = 0; t < threads && failed == 0; t++)
        failed = readers[t].failed;
    return failed;
}

void bench_raw_read(bench_limits *limits, const rank_options *options, const ranks *r,
                    const arena *a, uint64_t most, uint32_t threads)
{
    pieces p = {0};
    uint64_t times[ROUNDS];
    bench_limit *limit = bench_limit_add(limits, "raw reads");
    int failed = 0;
    uint32_t parts = options->world_size / options->replicate;
    threads = threads < MAX_THREADS ? threads : MAX_THREADS;
    for (uint32_t rank = 0; rank < parts; rank++)
        limits_add_rank(&p, ranks_slot(r, rank)->pid, ranks_extents(r, rank),
                        options->tensors->count, a->size, most);
    for (uint32_t round = 0; round < ROUNDS && failed == 0; round++) {
        uint64_t start = clock_ns();
        failed = read_once(&p, a, threads);
        times[round] = clock_ns() - start;
    }
    limit->threads = threads;
    limit->bytes = p.bytes;
    limit->pieces = p.count;
    bench_limit_end(limit, times, ROUNDS, failed != 0 ? strerror(failed) : NULL);
    free(p.items);
}

void bench_memcpy(bench_limits *limits, const arena *a)
{
    uint64_t times[ROUNDS];
    bench_limit *limit = bench_limit_add(limits, "memcpy");
    limit->bytes = a->size;
    limit->threads = 1;
    uint8_t *source = arena_map(a->size);
    if (source == NULL) {
        bench_limit_end(limit, NULL, 0, "out of memory");
        return;
    }
    memset(source, 1, a->size); /* all pages its own, not the zero page */
    for (uint32_t round = 0; round < ROUNDS; round++) {
        uint64_t start = clock_ns();
        memcpy(a->memory, source, a->size);
        times[round] = clock_ns() - start;
    }
    bench_limit_end(limit, times, ROUNDS, NULL);
    munmap(source, a->size > 0 ? a->size : 1);
}

/* -------------------------------------------------------------------------- TCP */

/* Of what is unsent more than ROOM (doubled by the kernel) has left the CPU's caches before it is
   read. */
enum { ROOM = 512 << 10, DEADLINE_S = 60 };

/* One end of a connection from 127.0.0.1 to itself, and the part of the memory that goes over it.
   Of each lane the end that sends comes first. */
typedef struct lane_end {
    int socket;
    bool sends;
    uint8_t *memory;
    uint64_t bytes;
    int failed; /* errno; 0: all went */
} lane_end;

static void *move_all(void *cookie)
{
    lane_end *e = cookie;
    for (uint64_t at = 0; at < e->bytes && e->failed == 0;) {
        uint64_t left = e->bytes - at;
        size_t step = left < PIECE ? (size_t)left : (size_t)PIECE;
        ssize_t n = e->sends ? send(e->socket, e->memory + at, step, MSG_NOSIGNAL)
                             : recv(e->socket, e->memory + at, step, 0);
        if (n <= 0) {
            e->failed = n < 0 ? errno : ECONNRESET;
            shutdown(e->socket, SHUT_RDWR); /* so that the other end does not wait */
        } else {
            at += (uint64_t)n;
        }
    }
    return NULL;
}

/* 0, or errno. */
static int connect_lane(lane_end ends[2])
{
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_addr = {htonl(INADDR_LOOPBACK)}};
    struct timeval most = {.tv_sec = DEADLINE_S};
    int room = ROOM;
    socklen_t size = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int out = ends[0].socket = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool good = listener >= 0 && out >= 0 &&
                bind(listener, (struct sockaddr *)&at, sizeof at) == 0 &&
                listen(listener, 1) == 0 &&
                getsockname(listener, (struct sockaddr *)&at, &size) == 0 &&
                connect(out, (struct sockaddr *)&at, sizeof at) == 0;
    int in = ends[1].socket = good ? accept4(listener, NULL, NULL, SOCK_CLOEXEC) : -1;
    good = in >= 0 && setsockopt(out, SOL_SOCKET, SO_SNDBUF, &room, sizeof room) == 0 &&
           setsockopt(out, SOL_SOCKET, SO_SNDTIMEO, &most, sizeof most) == 0 &&
           setsockopt(in, SOL_SOCKET, SO_RCVTIMEO, &most, sizeof most) == 0;
    int failed = good ? 0 : errno;
    if (listener >= 0)
        close(listener);
    return failed;
}

static int open_lanes(lane_end *ends, uint32_t n, const arena *a, uint8_t *source)
{
    int failed = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t first = a->size * i / n, bytes = a->size * (i + 1) / n - first;
        ends[2 * i] = (lane_end){-1, true, source + first, bytes, 0};
        ends[2 * i + 1] = (lane_end){-1, false, a->memory + first, bytes, 0};
        failed = failed != 0 ? failed : connect_lane(&ends[2 * i]);
    }
    return failed;
}

void bench_tcp(bench_limits *limits, const arena *a, uint32_t threads)
{
    lane_end ends[2 * MAX_THREADS];
    uint64_t times[ROUNDS];
    bench_limit *limit = bench_limit_add(limits, "TCP");
    uint8_t *source = arena_map(a->size);
    threads = threads < MAX_THREADS ? threads : MAX_THREADS;
    threads = threads > 0 ? threads : 1;
    limit->threads = threads;
    limit->bytes = a->size;
    if (source == NULL) {
        bench_limit_end(limit, NULL, 0, "out of memory");
        return;
    }
    memset(source, 1, a->size); /* all pages its own, not the zero page */
    int failed = open_lanes(ends, threads, a, source);
    for (uint32_t round = 0; round < ROUNDS && failed == 0; round++) {
        uint64_t start = clock_ns();
        failed = bench_together(move_all, ends, sizeof ends[0], 2 * threads);
        for (uint32_t i = 0; i < 2 * threads && failed == 0; i++)
            failed = ends[i].failed;
        times[round] = clock_ns() - start;
    }
    bench_limit_end(limit, times, ROUNDS, failed != 0 ? strerror(failed) : NULL);
    for (uint32_t i = 0; i < 2 * threads; i++)
        if (ends[i].socket >= 0)
            close(ends[i].socket);
    munmap(source, a->size > 0 ? a->size : 1);
}

/* ------------------------------------------------------------ the cipher of TLS */

enum { RECORD = 16 << 10, NONCE = 12, KEY = 16 };

typedef struct cipher_context cipher_context; /* EVP_CIPHER_CTX */

static struct {
    const void *(*cipher)(void);
    cipher_context *(*make)(void);
    void (*drop)(cipher_context *);
    int (*init)(cipher_context *, const void *cipher, void *engine, const uint8_t *key,
                const uint8_t *nonce);
    int (*update)(cipher_context *, uint8_t *to, int *size_out, const uint8_t *from,
                  int size);
} evp;

/* NULL, or why there is none. */
static const char *limits_load(void)
{
    const char *named = getenv("FANIN_OPENSSL_LIBRARY");
    void *handle = dlopen(named != NULL ? named : "libssl.so.3", RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL)
        return "OpenSSL 3 cannot be loaded";
    const struct {
        const char *name;
        void *to;
    } functions[] = {
        {"EVP_aes_128_gcm", &evp.cipher},   {"EVP_CIPHER_CTX_new", &evp.make},
        {"EVP_CIPHER_CTX_free", &evp.drop}, {"EVP_EncryptInit_ex", &evp.init},
        {"EVP_EncryptUpdate", &evp.update},
    };
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        void *function = dlsym(handle, functions[i].name);
        if (function == NULL)
            return "OpenSSL has no AES-128-GCM";
        memcpy(functions[i].to, &function, sizeof function);
    }
    return NULL;
}

typedef struct worker {
    uint64_t bytes;
    bool failed;
} worker;

/* Records of 16 KiB each, as TLS has them, of what the CPU's caches hold. */
static void *encrypt(void *cookie)
{
    static const uint8_t key[KEY], nonce[NONCE];
    worker *w = cookie;
    int made = 0;
    uint8_t *from = output_require(calloc(2, RECORD));
    uint8_t *to = from + RECORD;
    cipher_context *c = evp.make();
    w->failed = c == NULL || evp.init(c, evp.cipher(), NULL, key, nonce) != 1;
    for (uint64_t left = w->bytes; left > 0 && !w->failed;) {
        uint64_t step = left < RECORD ? left : RECORD;
        w->failed = evp.init(c, NULL, NULL, NULL, nonce) != 1 ||
                    evp.update(c, to, &made, from, (int)step) != 1;
        left -= step;
    }
    evp.drop(c);
    free(from);
    return NULL;
}

/* False: there is no thread to be had, or OpenSSL fails. */
static bool encrypt_once(uint64_t bytes, uint32_t threads)
{
    worker workers[MAX_THREADS] = {0};
    for (uint32_t t = 0; t < threads; t++)
        workers[t].bytes = bytes * (t + 1) / threads - bytes * t / threads;
    bool good = bench_together(encrypt, workers, sizeof workers[0], threads) == 0;
    for (uint32_t t = 0; t < threads; t++)
        good = good && !workers[t].failed;
    return good;
}

void bench_cipher(bench_limits *limits, uint64_t bytes, uint32_t threads)
{
    uint64_t times[ROUNDS];
    bench_limit *limit = bench_limit_add(limits, "AES-128-GCM of one end");
    const char *problem = limits_load();
    threads = threads < MAX_THREADS ? threads : MAX_THREADS;
    limit->threads = threads;
    limit->bytes = bytes;
    for (uint32_t round = 0; round < ROUNDS && problem == NULL; round++) {
        uint64_t start = clock_ns();
        problem = encrypt_once(bytes, threads) ? NULL : "OpenSSL's cipher fails";
        times[round] = clock_ns() - start;
    }
    bench_limit_end(limit, times, ROUNDS, problem);
}
