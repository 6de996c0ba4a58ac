/* SPDX-License-Identifier: Apache-2.0 */
/** @file Reading a file that lies on a disk, and its digest, made in threads. */
#ifndef FILE_DIGEST_H
#define FILE_DIGEST_H

#include "digest.h"

/** @p size bytes from @p offset on; false with errno, 0: the file ends before. */
bool file_read(int file, void *to, size_t size, uint64_t offset);

typedef enum file_digest_result {
    FILE_DIGEST_OK,
    FILE_DIGEST_SHORT,   /**< the file ends before its size */
    FILE_DIGEST_ERROR,   /**< a read failed: errno */
    FILE_DIGEST_STOPPED, /**< @p go_on said no */
    FILE_DIGEST_MEMORY,
} file_digest_result;

/**
 * What piece_digests_finish() gives for the @p size bytes of @p file: the XXH3-128 of the XXH3-128s
 * of its DIGEST_PIECEs. Reads with pread(): a file that is cut meanwhile does no harm. Blocks as
 * long as that takes; @p go_on is asked by the calling thread between two pieces of its own.
 */
file_digest_result file_digest(int file, uint64_t size, bool (*go_on)(void *),
                               void *cookie, digest *out);

#endif
