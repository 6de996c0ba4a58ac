/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The space and the pages of mapped files, made as their bytes come in. A rank says how large its
 * tensors are before it sends any of them: what it says costs nothing until then but the first few
 * megabytes. Threads go ahead of the bytes, since a page fault costs more than the copy of a page.
 *
 * Only what was asked for by file_pages_need() may be written: the rest of a file on a full disk
 * would be a signal (SIGBUS).
 */
#ifndef FILE_PAGES_H
#define FILE_PAGES_H

#include "digest.h"
#include "worker_pool.h"
#include <fanin/error.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * A file that grows beyond RLIMIT_FSIZE is EFBIG and SIGXFSZ, which ends a process that minds
 * neither. Between enter and leave the calling thread gets the error alone; the process's
 * dispositions stay as they are.
 */
typedef struct file_limit_guard {
    sigset_t before;
    bool pending; /**< the signal was there already: it is not ours to take */
} file_limit_guard;

file_limit_guard file_limit_enter(void);
/** Keeps errno. */
void file_limit_leave(const file_limit_guard *g);

/** Faults of one file scale to about so many threads, each of which takes so many bytes at once. */
#define FILE_PAGES_THREADS 4
#define FILE_PAGES_STEP ((uint64_t)4 << 20)
/** Makes the pages of a mapping; the content stays as it is. False: they could not all be had, on
    an old kernel for one, and appear when they are touched. */
bool file_pages_touch(uint8_t *base, size_t size);

/** Makes space for [at, at + size) of a file that holds nothing there yet; 0 or an errno. Slower
    than fallocate(), and works where the file system or the host (a filter of system calls) has
    none. */
int file_space_make(int file, uint64_t at, uint64_t size);

typedef struct file_pages file_pages;

/** A file, and where it lies in the range of addresses that all of them are mapped into. */
typedef struct file_part {
    int file;
    uint64_t at, size; /**< bytes */
} file_part;

/**
 * For @p count files, ascending by their place, which outlive it; *parts is copied. Sets the files'
 * sizes. NULL with *errno_out: EOPNOTSUPP: space cannot be made piece by piece here; EFBIG:
 * a file would be longer than the file system, or RLIMIT_FSIZE, allows; ENOMEM; and those of
 * ftruncate() and fallocate().
 */
file_pages *file_pages_start(const file_part *parts, size_t count, int *errno_out);
/** They are mapped from @p base on: threads may begin to touch pages. None can be had: it costs
    time. */
void file_pages_go_ahead(file_pages *p, uint8_t *base);
/** Space for [offset, offset + length) of the range; 0 or an errno (ENOSPC, EDQUOT, EIO, ...).
    Cheap where there is space already. Thread: the one that lands. */
int file_pages_need(file_pages *p, uint64_t offset, uint64_t length);
/** So many bytes more are in place: the threads may go on. Thread: any. */
void file_pages_landed(file_pages *p, uint64_t length);
/** Ends the threads within a few MiB of pages. NULL is fine. */
void file_pages_stop(file_pages **p);

/* The digest of a file that fills in any order, made in threads while it fills. */

typedef struct piece_digests piece_digests;

/** Threads for files of @p size bytes together. NULL: out of memory. */
worker_pool *piece_digests_pool(uint64_t size);

/**
 * For @p size bytes at @p base; they and @p pool, which several files may share, outlive the
 * result. Nothing has landed yet. If the pool has no thread, piece_digests_finish() does the work.
 * @p file: the file that is mapped there, whose pieces are on their way to the disk once they are
 * whole, so that memory never holds all of it; -1: when the kernel likes. NULL: out of memory.
 */
piece_digests *piece_digests_start(const uint8_t *base, uint64_t size,
                                   worker_pool *pool, int file);

/**
 * Bytes [offset, offset + length) are final; reported once each. Costs a few nanoseconds, and
 * a lock once for each DIGEST_PIECE. Thread: any, several at once, while none calls another
 * function.
 */
void piece_digests_landed(piece_digests *p, uint64_t offset, uint64_t length);

/** The DIGEST_PIECE bytes at @p offset, a multiple of that, are final and have the digest @p known;
    reported once, instead of piece_digests_landed(). Thread: as that. */
void piece_digests_known(piece_digests *p, uint64_t offset, const digest *known);

/** Everything will land again. Waits until the pool's threads rest, a millisecond or so: of all
    files that share it. */
void piece_digests_restart(piece_digests *p);

/** The XXH3-128 of the pieces' XXH3-128s. False: some bytes did not land, or landed twice. */
bool piece_digests_finish(piece_digests *p, digest *out);

/** Waits until the pool's threads rest, frees. NULL and *p == NULL are fine. */
void piece_digests_stop(piece_digests **p);

/** @p size bytes from @p offset on; false with errno, 0: the file ends before. */
bool file_read(int file, void *to, size_t size, uint64_t offset);

typedef enum file_read_result {
    FILE_READ_OK,
    FILE_READ_SHORT,   /**< the file ends before its size */
    FILE_READ_ERROR,   /**< a read failed: errno */
    FILE_READ_STOPPED, /**< go_on said no */
    FILE_READ_MEMORY,
} file_read_result;

/**
 * What piece_digests_finish() gives for the @p size bytes of @p file: the XXH3-128 of the XXH3-128s
 * of its DIGEST_PIECEs. Reads with pread(): a file that is cut meanwhile does no harm. Blocks as
 * long as that takes; go_on is asked by the calling thread between two pieces of its own.
 */
file_read_result file_digest(int file, uint64_t size, bool (*go_on)(void *),
                             void *cookie, digest *out);

#endif
