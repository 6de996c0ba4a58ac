/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * Copies of host memory that another part of the process may free or protect at any moment. The
 * kernel copies, into a buffer that it shares with the process: what is not there is an error, and
 * no signal. It reads all that the process could read itself, memory that a driver has mapped
 * included.
 */
#ifndef GUARDED_H
#define GUARDED_H

#include "copy_entry.h"

#include <fanin/error.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#define GUARDED_RUNS 1024 /**< of one call */

typedef struct guarded {
    int fd;
    uint8_t *data; /**< NULL: not open */
    size_t size;
    /** is told what guarded_run() has copied to @p to, piece by piece, while @p bytes are in the
        cache; NULL: nobody. Of entries that lie packed where they are copied to */
    void (*seen)(void *cookie, uint64_t to, const uint8_t *bytes, uint64_t length);
    void *cookie;
} guarded;

/** FANIN_ERR_IO, FANIN_ERR_MEMORY. */
fanin_status guarded_open(guarded *g, size_t size, fanin_error *error);
/** Of one that is zeroed or open. */
void guarded_close(guarded *g);
/** Copies to data + @p at, where there must be room for all. How many bytes came: those before the
    first that cannot be read. */
size_t guarded_read(const guarded *g, size_t at, const struct iovec *from, int n);
/** copy_entries_run() without bases, by way of the buffer. False: the byte at *@p bad cannot be
    read. */
bool guarded_run(const guarded *g, const copy_entry *entries, uint64_t n,
                 uint64_t to_add, uint64_t *bad);

#endif
