/* SPDX-License-Identifier: Apache-2.0 */
#include "fetch/cache_memory.h"
#include "fetch/failure.h"
#include "fetch/interrupt.h"
#include "fetch/memory_left.h"
#include "fetch/output.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

/* For all that the process takes besides. */
#define SPARE_BYTES (UINT64_C(64) << 20)

/* -1 with errno. Not every file system makes files without names. */
static int make_file(const char *directory)
{
    char path[PATH_MAX];
    int file = open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL))
        return file;
    if (snprintf(path, sizeof path, "%s/.nixl-fetch-XXXXXX", directory) >=
        (int)sizeof path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    file = mkostemp(path, O_CLOEXEC);
    if (file >= 0)
        unlink(path);
    return file;
}

static fanin_status refuse_memory_directory(const char *directory, int reason,
                                            fanin_error *error)
{
    return failure_set(error, FANIN_ERR_IO,
                       "give --memory a directory in which you can make files",
                       "%s: %s", directory, strerror(reason));
}

fanin_status cache_memory_check(const char *directory, fanin_error *error)
{
    if (directory == NULL)
        return FANIN_OK;
    int file = make_file(directory);
    if (file < 0)
        return refuse_memory_directory(directory, errno, error);
    close(file);
    return FANIN_OK;
}

/* @p why: what the system says, or who has less. */
static fanin_status refuse_size(const char *directory, size_t count, uint64_t size,
                                const char *why, fanin_error *error)
{
    bool host = directory == NULL;
    return failure_set(error, host ? FANIN_ERR_MEMORY : FANIN_ERR_IO,
                       host ? "keep fewer steps (--keep), raise the limit, or give "
                              "--memory a directory on a disk"
                            : "keep fewer steps (--keep), or give --memory a directory "
                              "with more room",
                       "%s: %zu %s of %s %s %s: %s", host ? "memory" : directory, count,
                       count == 1 ? "copy" : "copies", output_bytes(size).s,
                       count == 1 ? "needs" : "need", output_bytes(count * size).s,
                       why);
}

/* 0, or an errno: EINTR when the process is to end. Blocks of a file are there before it is mapped:
   a disk that is full later would end the process. */
static int map_memory(const char *directory, cache_memory *m, size_t size)
{
    int file = directory != NULL ? make_file(directory) : -1;
    int reason = directory != NULL && file < 0 ? errno : 0;
    if (reason == 0 && file >= 0)
        do {
            reason = posix_fallocate(file, 0, (off_t)size);
        } while (reason == EINTR && !interrupt_requested());
    int flags = file >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    void *bytes = reason == 0 ? mmap(NULL, size, PROT_READ | PROT_WRITE, flags, file, 0)
                              : MAP_FAILED;
    if (reason == 0 && bytes == MAP_FAILED)
        reason = errno;
    if (file >= 0)
        close(file);
    if (reason == 0)
        *m = (cache_memory){.bytes = bytes, .size = size};
    return reason;
}

/* Of which the kernel promises more than there is. */
static bool is_memory(const char *directory)
{
    struct statfs fs;
    return directory == NULL ||
           (statfs(directory, &fs) == 0 && fs.f_type == TMPFS_MAGIC);
}

/* A promise of more than this would be kept by the end of the process, not by an error. */
static fanin_status check_memory_left(const char *directory, size_t count,
                                      uint64_t size, fanin_error *error)
{
    char why[400];
    memory_left left = memory_left_find("/proc", "/sys");
    uint64_t most = left.bytes > SPARE_BYTES ? left.bytes - SPARE_BYTES : 0;
    if (count == 0 || most / count >= size || !is_memory(directory))
        return FANIN_OK;
    snprintf(why, sizeof why, "%s has room for %s", left.who, output_bytes(most).s);
    return refuse_size(directory, count, size, why, error);
}

fanin_status cache_memory_take(const char *directory, cache_memory *const *list,
                               size_t count, uint64_t size, fanin_error *error)
{
    int reason = 0;
    for (size_t i = 0; i < count; i++)
        cache_memory_free(list[i]);
    fanin_status status = check_memory_left(directory, count, size, error);
    if (status != FANIN_OK)
        return status;
    for (size_t i = 0; reason == 0 && i < count; i++)
        reason = map_memory(directory, list[i], size > 0 ? (size_t)size : 1);
    if (reason == 0)
        return FANIN_OK;
    for (size_t i = 0; i < count; i++)
        cache_memory_free(list[i]);
    return refuse_size(directory, count, size, strerror(reason), error);
}

void cache_memory_free(cache_memory *memory)
{
    if (memory->bytes != NULL)
        munmap(memory->bytes, memory->size);
    *memory = (cache_memory){.bytes = NULL};
}
