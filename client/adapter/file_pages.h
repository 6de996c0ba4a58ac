/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * The space and the pages of a mapped file, made as its bytes come in. A rank says how large its tensors
 * are before it sends any of them: what it says costs nothing until then but the first few
 * megabytes. Threads go ahead of the bytes, since a page fault costs more than the copy of a page.
 *
 * Only what was asked for by file_pages_need() may be written: the rest of a file on a full disk would
 * be a signal (SIGBUS).
 */
#ifndef FILE_PAGES_H
#define FILE_PAGES_H

#include <stdbool.h>
#include <stdint.h>

typedef struct file_pages file_pages;

/**
 * For the first @p size bytes of @p file, mapped at @p base, which outlive it. Sets the file's size.
 * NULL with *errno_out: EOPNOTSUPP: the file system cannot make space piece by piece; EFBIG: the
 * file would be longer than the file system, or RLIMIT_FSIZE, allows; ENOMEM; and those of
 * ftruncate() and fallocate().
 */
file_pages *file_pages_start(int file, uint64_t size, int *errno_out);
/** The mapping is there: threads may begin to touch its pages. None can be had: it costs time. */
void file_pages_go_ahead(file_pages *p, uint8_t *base);
/** Space for [offset, offset + length); 0 or an errno (ENOSPC, EDQUOT, EIO, ...). Cheap where there is
    space already. Thread: the one that lands. */
int file_pages_need(file_pages *p, uint64_t offset, uint64_t length);
/** So many bytes more are in place: the threads may go on. Thread: any. */
void file_pages_landed(file_pages *p, uint64_t length);
/** Ends the threads within a few MiB of pages. NULL is fine. */
void file_pages_stop(file_pages **p);

#endif
