/* SPDX-License-Identifier: Apache-2.0 */
/* Files that are read whole, by threads. */
#include "adapter/adapter_internal.h"

#include "adapter/file_pages.h"
#include "thread.h"
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#define MAX_THREADS 8

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
    pthread_t threads[MAX_THREADS];
    unsigned cpus = usable_cpus(), wanted = cpus < MAX_THREADS ? cpus : MAX_THREADS;
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
