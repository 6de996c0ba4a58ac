/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * A file for the next adapter, made between pulls: its space allocated, its pages there, pinned
 * for CUDA's copy engine. It lies in the directory where the next adapter is expected, without a
 * name until it is taken, so that a process that dies leaves nothing behind.
 *
 * The thread that makes it also lets go of the mapping that the last pull wrote, which would cost
 * that pull as much as writing it.
 */
#ifndef SPARE_FILE_H
#define SPARE_FILE_H

#include "gpu.h"
#include "log.h"

/* What an adapter's files and directory are made with, less the umask: other users never get a
   descriptor that writes. */
#define ADAPTER_FILE_MODE 0644
#define ADAPTER_DIRECTORY_MODE 0755

/** A mapped file. */
typedef struct file_memory {
    int file; /**< -1: none */
    uint8_t *base;
    uint64_t size;
    bool populated; /**< all pages are there */
    gpu *pinned_by; /**< NULL: not pinned */
} file_memory;

/** Unpins, unmaps, closes. One that is empty is fine. */
void file_memory_release(file_memory *m);

typedef struct spare_file spare_file;

/**
 * Starts the thread that releases @p retired (taken over in any case, then empty) and makes a
 * file of @p size in the directory @p parent (only used during the call), pinned if @p g is not
 * NULL. NULL: there is neither a file nor anything to release, which costs nothing but time; @p log
 * says why if it is of interest. None is made where less than as many bytes again would be free
 * behind it: others write there too. @p size 0: only releases.
 */
spare_file *spare_file_start(int parent, uint64_t size, gpu *g, file_memory *retired,
                             const logger *log);
/** Whether it lies in @p parent and has @p size. @p s may be NULL. */
bool spare_file_fits(const spare_file *s, int parent, uint64_t size);
/** Ends the making, as far as it has come (a few MiB of pages; 70 ms if it is just being pinned),
    and hands the file out. False: there is nothing that could be used. *s is NULL after it. */
bool spare_file_take(spare_file **s, file_memory *out);
/** The same, and the file goes. NULL is fine. */
void spare_file_drop(spare_file **s);
/** The file goes in a thread, which *s is then; NULL is fine. Waits as spare_file_take(). */
void spare_file_retire(spare_file **s);

#endif
