/* SPDX-License-Identifier: Apache-2.0 */
/** @file What is copied into a chunk (stage.h): from a read's ranges to copy entries. */
#ifndef STAGE_FILL_H
#define STAGE_FILL_H

#include "stream/stage.h"

/** Copies of device memory stand at the front of the chunk's entries, of host memory at their end.
    */
typedef struct filling {
    chunk *to;
    size_t n_device, n_host;
    int device;  /**< -1: the host's memory only */
    bool failed; /**< memory of the host cannot be read: of that box */
    uint64_t box;
} filling;

/**
 * By way of @p through takes as much of the reply, from where the job is, as the empty chunk has
 * room for: memory of one device and of the host. The host's is copied, the device's (n_device
 * entries) remains to be. Inside a bracket.
 */
filling filling_gather(chunk *to, const job *j, const guarded *through);

/**
 * What the device is told to digest instead: whole ranges of the reply, converted, as many as the
 * chunk has room for and as lie on one device. No bytes come into the chunk, but the digests of
 * their pieces. False: some of the next range has been gathered, it is not of one device alone, or
 * cut into too many runs; the chunk is as it was.
 */
bool filling_digest(chunk *to, const job *j, uint32_t convert, filling *out);

#endif
