/* SPDX-License-Identifier: Apache-2.0 */
#include "adapter/file_pages.h"

#include "thread.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

/* ------------------------------------------------------ digests of pieces */

/* One thread digests 4 GB/s of memory that it has not touched before; a copy engine brings 55. */
#define DIGEST_THREADS 16
#define BYTES_A_THREAD ((uint64_t)64 << 20) /* below, one is enough */

typedef struct piece {
    worker_job job; /* first: the pool hands it back */
    const uint8_t *data;
    uint32_t size;
    atomic_uint_least32_t missing; /* bytes */
    int file;                      /* to be written to; -1 */
    uint64_t offset;               /* in it */
    digest *digest;
} piece;

struct piece_digests {
    uint64_t size;
    size_t count;
    atomic_bool wrong; /* bytes landed outside, or twice */
    piece *pieces;
    digest *digests;
    worker_pool *pool; /* of the pieces that are complete; the caller's */
};

static void make_digest(worker_job *job)
{
    const piece *p = (const piece *)job;
    *p->digest = digest_of(p->data, p->size);
    if (p->file >= 0) /* a hint: fsync() says what fails */
        sync_file_range(p->file, (off_t)p->offset, p->size, SYNC_FILE_RANGE_WRITE);
}

static void forget_pieces(piece_digests *p)
{
    for (size_t i = 0; i < p->count; i++)
        p->pieces[i].missing = p->pieces[i].size;
    p->wrong = false;
}

worker_pool *piece_digests_pool(uint64_t size)
{
    uint64_t worth = 1 + size / BYTES_A_THREAD;
    return worker_pool_create(
        1, worth < DIGEST_THREADS ? (unsigned)worth : DIGEST_THREADS, -1);
}

piece_digests *piece_digests_start(const uint8_t *base, uint64_t size,
                                   worker_pool *pool, int file)
{
    piece_digests *p = calloc(1, sizeof *p);
    if (!p)
        return NULL;
    p->size = size;
    p->count = (size_t)((size + DIGEST_PIECE - 1) / DIGEST_PIECE);
    p->pieces = calloc(p->count + 1, sizeof *p->pieces);
    p->digests = calloc(p->count + 1, sizeof *p->digests);
    p->pool = pool;
    if (!p->pieces || !p->digests) {
        piece_digests_stop(&p);
        return NULL;
    }
    for (size_t i = 0; i < p->count; i++) {
        uint64_t begin = i * DIGEST_PIECE, left = size - begin;
        p->pieces[i] =
            (piece){.job.run = make_digest,
                    .data = base + begin,
                    .size = (uint32_t)(left < DIGEST_PIECE ? left : DIGEST_PIECE),
                    .file = file,
                    .offset = begin,
                    .digest = &p->digests[i]};
    }
    forget_pieces(p);
    return p;
}

void piece_digests_landed(piece_digests *p, uint64_t offset, uint64_t length)
{
    if (offset > p->size || length > p->size - offset) {
        p->wrong = true;
        return;
    }
    while (length > 0) {
        piece *one = &p->pieces[offset / DIGEST_PIECE];
        uint64_t here = DIGEST_PIECE - offset % DIGEST_PIECE;
        if (here > length)
            here = length;
        uint32_t before = atomic_fetch_sub(&one->missing, (uint32_t)here);
        if (here > before) {
            p->wrong = true;
            return;
        }
        if (here == before)
            worker_pool_submit(p->pool, &one->job);
        offset += here;
        length -= here;
    }
}

void piece_digests_known(piece_digests *p, uint64_t offset, const digest *known)
{
    size_t at = (size_t)(offset / DIGEST_PIECE);
    if (offset % DIGEST_PIECE != 0 || at >= p->count ||
        p->pieces[at].size != DIGEST_PIECE ||
        atomic_exchange(&p->pieces[at].missing, 0) != DIGEST_PIECE)
        p->wrong = true;
    else
        p->digests[at] = *known;
}

void piece_digests_restart(piece_digests *p)
{
    worker_pool_drain(p->pool);
    forget_pieces(p);
}

bool piece_digests_finish(piece_digests *p, digest *out)
{
    bool whole = !p->wrong;
    for (size_t i = 0; i < p->count; i++)
        whole = whole && p->pieces[i].missing == 0;
    while (whole && worker_pool_help(p->pool))
        ; /* the rest is shared with the threads */
    worker_pool_drain(p->pool);
    if (whole)
        *out = digest_of(p->digests, p->count * sizeof *p->digests);
    return whole;
}

void piece_digests_stop(piece_digests **p)
{
    if (!p || !*p)
        return;
    piece_digests *d = *p;
    *p = NULL;
    worker_pool_drain(d->pool);
    free(d->pieces);
    free(d->digests);
    free(d);
}

/* ------------------------------------------------------------------ pages */

#ifndef MADV_POPULATE_WRITE /* Linux 5.14 */
#define MADV_POPULATE_WRITE 23
#endif
#define STEP FILE_PAGES_STEP
#define AHEAD ((uint64_t)64 << 20) /* what the threads may be ahead of the bytes */

typedef struct part {
    file_part is;
    uint64_t first; /* of its steps */
} part;

struct file_pages {
    part *parts;
    size_t n_parts;
    uint8_t *base;
    bool in_memory;         /* tmpfs: where a page is, there is space */
    uint64_t size, n_steps; /* of all files */
    atomic_bool *have;      /* space, by step */
    atomic_uint_fast64_t landed;
    pthread_mutex_t lock;
    pthread_cond_t moved;
    uint64_t next, allowed; /* steps; guarded by lock */
    bool stop;              /* guarded by lock */
    unsigned n_threads;
    pthread_t threads[FILE_PAGES_THREADS];
};

/* ------------------------------------------------------- the limit of file sizes */

static sigset_t the_signal(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGXFSZ);
    return set;
}

file_limit_guard file_limit_enter(void)
{
    file_limit_guard g;
    sigset_t set = the_signal(), pending;
    pthread_sigmask(SIG_BLOCK, &set, &g.before);
    g.pending = sigpending(&pending) == 0 && sigismember(&pending, SIGXFSZ) == 1;
    return g;
}

void file_limit_leave(const file_limit_guard *g)
{
    static const struct timespec at_once = {0, 0};
    sigset_t set = the_signal();
    int code = errno;
    if (!g->pending)
        while (sigtimedwait(&set, NULL, &at_once) < 0 && errno == EINTR)
            ;
    pthread_sigmask(SIG_SETMASK, &g->before, NULL);
    errno = code;
}

/* ------------------------------------------------------------------- pages */

bool file_pages_touch(uint8_t *base, size_t size)
{
    int status;
    do
        status = madvise(base, size, MADV_POPULATE_WRITE);
    while (status != 0 && (errno == EAGAIN || errno == EINTR));
    return status == 0;
}

/* Of a file. */
typedef struct place {
    const file_part *file;
    uint64_t offset, bytes;
} place;

static place part_place(const file_pages *p, uint64_t step)
{
    size_t low = 0, high = p->n_parts;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (p->parts[middle].first <= step)
            low = middle;
        else
            high = middle;
    }
    const part *found = &p->parts[low];
    uint64_t offset = (step - found->first) * STEP, left = found->is.size - offset;
    return (place){&found->is, offset, left < STEP ? left : STEP};
}

static int write_zeros(int file, uint64_t at, uint64_t size)
{
    static const char zeros[65536];
    while (size > 0) {
        size_t some = size < sizeof zeros ? (size_t)size : sizeof zeros;
        ssize_t wrote = pwrite(file, zeros, some, (off_t)at);
        if (wrote < 0 && errno != EINTR)
            return errno;
        at += wrote < 0 ? 0 : (uint64_t)wrote;
        size -= wrote < 0 ? 0 : (uint64_t)wrote;
    }
    return 0;
}

/* The C library minds EOPNOTSUPP alone. */
int file_space_make(int file, uint64_t at, uint64_t size)
{
    file_limit_guard guard = file_limit_enter();
    int code;
    do
        code = posix_fallocate(file, (off_t)at, (off_t)size);
    while (code == EINTR);
    if (code == ENOSYS)
        code = write_zeros(file, at, size);
    file_limit_leave(&guard);
    return code;
}

/* Making it twice, also at once, is fine: what is there stays. */
static int make_space(file_pages *p, uint64_t step)
{
    int status;
    if (atomic_load(&p->have[step]))
        return 0;
    place at = part_place(p, step);
    file_limit_guard guard = file_limit_enter();
    do
        status = fallocate(at.file->file, 0, (off_t)at.offset, (off_t)at.bytes);
    while (status != 0 && errno == EINTR);
    int code = status == 0 ? 0 : errno == ENOSYS ? EOPNOTSUPP : errno;
    file_limit_leave(&guard);
    if (code == 0)
        atomic_store(&p->have[step], true);
    return code;
}

/* Where a page of tmpfs is, there is space: making that first would have threads wait for each
   other, for the file's lock. */
static bool make_pages_of(file_pages *p, uint64_t step)
{
    if (!p->in_memory && make_space(p, step) != 0)
        return false;
    place at = part_place(p, step);
    if (!file_pages_touch(p->base + at.file->at + at.offset, (size_t)at.bytes))
        return false;
    atomic_store(&p->have[step], true);
    return true;
}

static uint64_t steps_allowed(const file_pages *p, uint64_t landed)
{
    uint64_t ahead = landed + AHEAD;
    return ahead >= p->size ? p->n_steps : ahead / STEP;
}

/* The next step that may be made; false: no more. */
static bool take_page_step(file_pages *p, uint64_t *out)
{
    pthread_mutex_lock(&p->lock);
    while (!p->stop && p->next < p->n_steps && p->next >= p->allowed)
        pthread_cond_wait(&p->moved, &p->lock);
    bool good = !p->stop && p->next < p->n_steps;
    *out = good ? p->next++ : 0;
    pthread_mutex_unlock(&p->lock);
    return good;
}

/* Ends where anything fails: whoever needs the space finds out why, and without pages they appear
   when they are touched. */
static void *make_step_pages(void *cookie)
{
    file_pages *p = cookie;
    pthread_setname_np(pthread_self(), "fanin-file");
    for (uint64_t step; take_page_step(p, &step) && make_pages_of(p, step);)
        ;
    return NULL;
}

static bool is_in_memory(int file)
{
    struct statfs info;
    return fstatfs(file, &info) == 0 && info.f_type == TMPFS_MAGIC;
}

static int set_size(int file, uint64_t size)
{
    file_limit_guard guard = file_limit_enter();
    int code = ftruncate(file, (off_t)size) == 0 ? 0 : errno;
    file_limit_leave(&guard);
    return code;
}

/* Every file has a step at least, so that each is found by its first one. */
static int copy_parts(file_pages *p, const file_part *parts)
{
    int code = 0;
    for (size_t i = 0; i < p->n_parts && code == 0; i++) {
        p->parts[i] = (part){parts[i], p->n_steps};
        p->size += parts[i].size;
        p->n_steps += parts[i].size > 0 ? (parts[i].size + STEP - 1) / STEP : 1;
        code = set_size(parts[i].file, parts[i].size);
    }
    return code;
}

file_pages *file_pages_start(const file_part *parts, size_t count, int *errno_out)
{
    file_pages *p = calloc(1, sizeof *p);
    *errno_out = ENOMEM;
    if (!p)
        return NULL;
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->moved, NULL);
    p->n_parts = count;
    p->parts = calloc(count + 1, sizeof *p->parts);
    p->in_memory = count > 0 && is_in_memory(parts[0].file);
    int code = p->parts ? copy_parts(p, parts) : ENOMEM;
    if (code == 0 && !(p->have = calloc(p->n_steps + 1, sizeof *p->have)))
        code = ENOMEM;
    if (code == 0 && p->size > 0)
        code = make_space(p, 0);
    if (code == 0)
        return p;
    file_pages_stop(&p);
    *errno_out = code;
    return NULL;
}

void file_pages_go_ahead(file_pages *p, uint8_t *base)
{
    p->base = base;
    p->allowed = steps_allowed(p, 0);
    unsigned wanted = usable_cpus();
    wanted = wanted < FILE_PAGES_THREADS ? wanted : FILE_PAGES_THREADS;
    wanted = wanted < p->n_steps ? wanted : (unsigned)p->n_steps;
    p->n_threads = worker_threads_start(p->threads, wanted, make_step_pages, p);
}

/* A long range is asked for before its first byte, by one thread for many that will write or pin
   it: space is made fast, and who writes clears the pages. Of a short one the pages are made at
   once. */
static int need_step(file_pages *p, uint64_t step, bool is_short)
{
    bool touch = is_short && p->in_memory && p->base && !atomic_load(&p->have[step]);
    return touch && make_pages_of(p, step) ? 0 : make_space(p, step);
}

/* Space for what a file has of [offset, end) of the range. */
static int need_of(file_pages *p, const part *file, uint64_t offset, uint64_t end)
{
    uint64_t at = file->is.at, stop = at + file->is.size;
    offset = offset > at ? offset : at;
    end = end < stop ? end : stop;
    if (offset >= end)
        return 0;
    uint64_t last = file->first + (end - 1 - at) / STEP;
    bool is_short = end - offset <= 2 * STEP;
    for (uint64_t step = file->first + (offset - at) / STEP; step <= last; step++) {
        int code = need_step(p, step, is_short);
        if (code != 0)
            return code;
    }
    return 0;
}

int file_pages_need(file_pages *p, uint64_t offset, uint64_t length)
{
    uint64_t end = offset + length;
    size_t low = 0, high = p->n_parts; /* the first that may have any of it */
    if (end < offset)
        end = UINT64_MAX;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (p->parts[middle].is.at + p->parts[middle].is.size <= offset)
            low = middle + 1;
        else
            high = middle;
    }
    for (; low < p->n_parts && p->parts[low].is.at < end; low++) {
        int code = need_of(p, &p->parts[low], offset, end);
        if (code != 0)
            return code;
    }
    return 0;
}

void file_pages_landed(file_pages *p, uint64_t length)
{
    uint64_t before = atomic_fetch_add(&p->landed, length);
    uint64_t allowed = steps_allowed(p, before + length);
    if (allowed == steps_allowed(p, before))
        return;
    pthread_mutex_lock(&p->lock);
    p->allowed = allowed > p->allowed ? allowed : p->allowed;
    pthread_cond_broadcast(&p->moved);
    pthread_mutex_unlock(&p->lock);
}

void file_pages_stop(file_pages **pages)
{
    file_pages *p = *pages;
    *pages = NULL;
    if (!p)
        return;
    pthread_mutex_lock(&p->lock);
    p->stop = true;
    pthread_cond_broadcast(&p->moved);
    pthread_mutex_unlock(&p->lock);
    worker_threads_join(p->threads, p->n_threads);
    pthread_cond_destroy(&p->moved);
    pthread_mutex_destroy(&p->lock);
    free(p->have);
    free(p->parts);
    free(p);
}

/* ----------------------------------------- files that are read whole, by threads */

#define READ_THREADS 8

typedef struct reading {
    int file;
    uint64_t size;
    size_t count; /* pieces */
    digest *digests;
    atomic_size_t next;
    atomic_int result, reason; /* of the first failure */
} reading;

static void fail_reading(reading *r, file_read_result result, int reason)
{
    int none = FILE_READ_OK;
    if (atomic_compare_exchange_strong(&r->result, &none, (int)result))
        atomic_store(&r->reason, reason);
}

bool file_read(int file, void *to, size_t size, uint64_t offset)
{
    for (size_t done = 0; done < size;) {
        ssize_t n = pread(file, (char *)to + done, size - done, (off_t)(offset + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            errno = n == 0 ? 0 : errno;
            return false;
        }
        done += (size_t)n;
    }
    return true;
}

static bool read_piece(reading *r, size_t piece, uint8_t *data)
{
    uint64_t begin = (uint64_t)piece * DIGEST_PIECE, left = r->size - begin;
    size_t size = (size_t)(left < DIGEST_PIECE ? left : DIGEST_PIECE);
    bool good = file_read(r->file, data, size, begin);
    if (good)
        r->digests[piece] = digest_of(data, size);
    else
        fail_reading(r, errno == 0 ? FILE_READ_SHORT : FILE_READ_ERROR, errno);
    return good;
}

/* Takes piece by piece until all are taken; @p go_on may be NULL. */
static void read_some(reading *r, bool (*go_on)(void *), void *cookie)
{
    uint8_t *data = malloc(DIGEST_PIECE);
    if (!data)
        fail_reading(r, FILE_READ_MEMORY, 0);
    while (atomic_load(&r->result) == FILE_READ_OK) {
        if (go_on && !go_on(cookie)) {
            fail_reading(r, FILE_READ_STOPPED, 0);
            break;
        }
        size_t piece = atomic_fetch_add(&r->next, 1);
        if (piece >= r->count || !read_piece(r, piece, data))
            break;
    }
    free(data);
}

static void *help_reading(void *argument)
{
    pthread_setname_np(pthread_self(), "fanin-file");
    read_some(argument, NULL, NULL);
    return NULL;
}

static file_read_result read_parts(reading *r, bool (*go_on)(void *), void *cookie)
{
    pthread_t threads[READ_THREADS];
    unsigned cpus = usable_cpus(), wanted = cpus < READ_THREADS ? cpus : READ_THREADS;
    r->count = (size_t)((r->size + DIGEST_PIECE - 1) / DIGEST_PIECE);
    wanted = wanted < r->count ? wanted : (unsigned)r->count;
    /* This thread is one of them. */
    unsigned n =
        worker_threads_start(threads, wanted > 0 ? wanted - 1 : 0, help_reading, r);
    read_some(r, go_on, cookie);
    worker_threads_join(threads, n);
    errno = atomic_load(&r->reason);
    return (file_read_result)atomic_load(&r->result);
}

file_read_result file_digest(int file, uint64_t size, bool (*go_on)(void *),
                             void *cookie, digest *out)
{
    reading r = {.file = file, .size = size};
    size_t count = (size_t)((size + DIGEST_PIECE - 1) / DIGEST_PIECE);
    r.digests = calloc(count + 1, sizeof r.digests[0]);
    if (!r.digests)
        return FILE_READ_MEMORY;
    file_read_result result = read_parts(&r, go_on, cookie);
    int reason = errno;
    if (result == FILE_READ_OK)
        *out = digest_of(r.digests, count * sizeof r.digests[0]);
    free(r.digests);
    errno = reason;
    return result;
}
