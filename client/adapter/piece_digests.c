/* SPDX-License-Identifier: Apache-2.0 */
#include "adapter/piece_digests.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>

/* One thread digests 4 GB/s of memory that it has not touched before; a copy engine brings 55. */
#define MAX_THREADS 16
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

static void make(worker_job *job)
{
    const piece *p = (const piece *)job;
    *p->digest = digest_of(p->data, p->size);
    if (p->file >= 0) /* a hint: fsync() says what fails */
        sync_file_range(p->file, (off_t)p->offset, p->size, SYNC_FILE_RANGE_WRITE);
}

static void forget(piece_digests *p)
{
    for (size_t i = 0; i < p->count; i++)
        p->pieces[i].missing = p->pieces[i].size;
    p->wrong = false;
}

worker_pool *piece_digests_pool(uint64_t size)
{
    uint64_t worth = 1 + size / BYTES_A_THREAD;
    return worker_pool_create(1, worth < MAX_THREADS ? (unsigned)worth : MAX_THREADS,
                              -1);
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
            (piece){.job.run = make,
                    .data = base + begin,
                    .size = (uint32_t)(left < DIGEST_PIECE ? left : DIGEST_PIECE),
                    .file = file,
                    .offset = begin,
                    .digest = &p->digests[i]};
    }
    forget(p);
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
    forget(p);
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
