/* SPDX-License-Identifier: Apache-2.0 */
/* The temporary directory and the file in it, allocated and mapped before it is filled. */
#include "adapter/adapter_internal.h"
#include "error_set.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* Between two steps of the allocation the deadline and cancel are looked at. */
#define ALLOCATE_STEP ((uint64_t)256 << 20)

static fanin_status full_disk(const adapter *a, int reason, fanin_error *error)
{
    struct statvfs info = {0};
    struct rlimit limit = {.rlim_cur = RLIM_INFINITY};
    fstatvfs(a->place.parent, &info);
    error_place where = {.phase = "write",
                         .remedy = "free space there, or give a directory elsewhere"};
    if (reason == EFBIG && getrlimit(RLIMIT_FSIZE, &limit) == 0 &&
        limit.rlim_cur < a->layout.file_size) {
        where.remedy = "raise the limit: ulimit -f unlimited";
        return error_set_errno(error, FANIN_ERR_IO, reason, &where,
                               "no file of %" PRIu64
                               " bytes can be made in '%.300s': this process may write "
                               "%" PRIu64 " (its limit of file sizes)",
                               a->layout.file_size, a->place.directory,
                               (uint64_t)limit.rlim_cur);
    }
    return error_set_errno(error, FANIN_ERR_IO, reason, &where,
                           "no room for '%.300s': %" PRIu64
                           " bytes are needed, %" PRIu64 " are free",
                           a->place.directory, a->layout.file_size,
                           (uint64_t)info.f_bavail * info.f_frsize);
}

static fanin_status no_space(const adapter *a, int reason, fanin_error *error)
{
    if (reason == ENOSPC || reason == EDQUOT || reason == EFBIG)
        return full_disk(a, reason, error);
    if (reason == ENOMEM)
        return error_set_memory(error);
    return adapter_io_error(&a->place, reason, "cannot allocate", MODEL_FILE, NULL,
                            error);
}

/* Not even the space reserved for root would do: known before any of it is taken. */
static bool surely_full(const adapter *a)
{
    struct statvfs info;
    return fstatvfs(a->memory.file, &info) == 0 && info.f_blocks > 0 &&
           info.f_frsize > 0 && info.f_bfree < a->layout.file_size / info.f_frsize;
}

fanin_status adapter_check_size(const adapter *a, uint64_t max_bytes,
                                fanin_error *error)
{
    struct statvfs info;
    uint64_t most = max_bytes;
    error_place where = {.phase = "plan",
                         .remedy = "if that is right, raise max_bytes (--max-bytes)"};
    if (max_bytes == 0) {
        if (fstatvfs(a->place.parent, &info) != 0 || info.f_blocks == 0 ||
            info.f_bfree < a->layout.file_size / info.f_frsize)
            return FANIN_OK; /* no size is known, or it will not fit: adapter_map() says so */
        most = (uint64_t)info.f_blocks * info.f_frsize / 4;
    }
    if (a->layout.file_size <= most)
        return FANIN_OK;
    return error_set(error, FANIN_ERR_LIMIT, &where,
                     "the adapter has %" PRIu64 " bytes, more than the %" PRIu64
                     " that a pull into '%.256s' may bring (%s)",
                     a->layout.file_size, most, a->place.directory,
                     max_bytes ? "max_bytes" : "a quarter of its file system");
}

/* File systems that cannot make space piece by piece: all of it. */
static fanin_status allocate_whole(const adapter *a, fanin_error *error)
{
    for (uint64_t at = 0; at < a->layout.file_size;) {
        uint64_t left = a->layout.file_size - at;
        uint64_t step = left < ALLOCATE_STEP ? left : ALLOCATE_STEP;
        fanin_status status = adapter_may_go_on(a, "allocating", error);
        if (status != FANIN_OK)
            return status;
        file_limit_guard guard = file_limit_enter();
        int reason = posix_fallocate(a->memory.file, (off_t)at, (off_t)step);
        file_limit_leave(&guard);
        if (reason == EINTR)
            continue;
        if (reason != 0)
            return no_space(a, reason, error);
        at += step;
    }
    return FANIN_OK;
}

static fanin_status allocate(adapter *a, fanin_error *error)
{
    int reason;
    if (surely_full(a))
        return full_disk(a, ENOSPC, error);
    a->pages = file_pages_start(a->memory.file, a->layout.file_size, &reason);
    if (a->pages)
        return FANIN_OK;
    return reason == EOPNOTSUPP ? allocate_whole(a, error) : no_space(a, reason, error);
}

fanin_status adapter_need(adapter *a, uint64_t offset, uint64_t length,
                          fanin_error *error)
{
    int reason = a->pages ? file_pages_need(a->pages, offset, length) : 0;
    return reason == 0 ? FANIN_OK : no_space(a, reason, error);
}

static fanin_status map(adapter *a, fanin_error *error)
{
    size_t size = (size_t)a->layout.file_size;
    void *base =
        mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, a->memory.file, 0);
    a->anonymous = false;
    if (base == MAP_FAILED && errno != ENOMEM) {
        char reason[64];
        log_write(
            &a->log, FANIN_LOG_INFO, "adapter-no-mmap",
            "the filesystem of '%s' has no shared mappings (%s): writing from memory",
            a->place.directory, strerror_r(errno, reason, sizeof reason));
        a->anonymous = true;
        base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                    0);
    }
    if (base == MAP_FAILED)
        return error_set_memory(error);
    a->memory.base = base;
    a->memory.size = size;
    if (a->pages && !a->anonymous)
        file_pages_go_ahead(a->pages, base);
    return FANIN_OK;
}

/* The file that was made beforehand gets its name. False: there is none, or it cannot. */
static bool take_spare(adapter *a)
{
    if (!a->spare ||
        !spare_file_fits(*a->spare, a->place.parent, a->layout.file_size) ||
        !spare_file_take(a->spare, &a->memory))
        return false;
    char self[40], reason[64];
    snprintf(self, sizeof self, "/proc/self/fd/%d", a->memory.file);
    if (linkat(AT_FDCWD, self, a->directory, MODEL_FILE, AT_SYMLINK_FOLLOW) == 0) {
        a->anonymous = false;
        return true;
    }
    log_write(&a->log, FANIN_LOG_INFO, "spare-file",
              "the spare file cannot be used for '%s' (%s)", a->place.directory,
              strerror_r(errno, reason, sizeof reason));
    file_memory_release(&a->memory);
    return false;
}

static fanin_status make_fresh(adapter *a, fanin_error *error)
{
    a->memory.file = openat(a->directory, MODEL_FILE,
                            O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, ADAPTER_FILE_MODE);
    if (a->memory.file < 0)
        return adapter_io_error(&a->place, errno, "cannot make", MODEL_FILE, NULL,
                                error);
    fanin_status status = allocate(a, error);
    return status != FANIN_OK ? status : map(a, error);
}

static fanin_status make_file(adapter *a, fanin_error *error)
{
    adapter_temporary_name(&a->place, a->temporary);
    if (mkdirat(a->place.parent, a->temporary, ADAPTER_DIRECTORY_MODE) != 0) {
        int reason = errno;
        a->temporary[0] = '\0';
        return adapter_io_error(&a->place, reason, "cannot make a directory beside",
                                NULL, NULL, error);
    }
    a->directory = openat(a->place.parent, a->temporary,
                          O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    struct stat info;
    char why[OWNERSHIP_TEXT];
    if (a->directory < 0 || fstat(a->directory, &info) != 0)
        return adapter_io_error(&a->place, errno, "cannot make", MODEL_FILE, NULL,
                                error);
    if (ownership_doubtful(&info, why))
        return error_set(error, FANIN_ERR_EXISTS, NULL,
                         "the directory made beside '%.300s' was exchanged: it %s",
                         a->place.directory, why);
    fanin_status status = take_spare(a) ? FANIN_OK : make_fresh(a, error);
    if (status == FANIN_OK &&
        !(a->digests = piece_digests_start(a->memory.base, a->memory.size)))
        status = error_set_memory(error);
    return status;
}

/* The header is final as soon as it is there. */
static fanin_status land_header(adapter *a, fanin_error *error)
{
    fanin_status status = adapter_need(a, 0, a->header_size, error);
    if (status != FANIN_OK)
        return status;
    if (a->layout.header) {
        memcpy(a->memory.base, a->layout.header, a->layout.header_size);
        free(a->layout.header);
        a->layout.header = NULL;
    }
    piece_digests_landed(a->digests, 0, a->header_size);
    return FANIN_OK;
}

fanin_status adapter_map(adapter *a, uint8_t **base_out, fanin_error *error)
{
    if (a->layout.file_size == 0)
        return error_set(error, FANIN_ERR_INTERNAL, NULL, "nothing was prepared");
    if (a->memory.base && a->memory.size == a->layout.file_size) {
        /* Prepared again in between: perhaps other names of the same sizes. */
        if (a->layout.header) {
            piece_digests_restart(a->digests);
            fanin_status status = land_header(a, error);
            if (status != FANIN_OK)
                return status;
        }
        *base_out = a->memory.base;
        return FANIN_OK;
    }
    adapter_discard(a);
    fanin_status status = make_file(a, error);
    if (status == FANIN_OK)
        status = land_header(a, error);
    if (status != FANIN_OK) {
        adapter_discard(a);
        return status;
    }
    *base_out = a->memory.base;
    return FANIN_OK;
}

bool adapter_is_pinned(const adapter *a)
{
    return a->memory.pinned_by != NULL;
}

void adapter_make_spare(adapter *a, spare_file **spare, gpu *g)
{
    uint64_t size = a->layout.file_size;
    if (size == 0 || a->anonymous || spare_file_fits(*spare, a->place.parent, size))
        return;
    file_pages_stop(&a->pages);
    piece_digests_stop(&a->digests);
    spare_file_drop(spare);
    *spare = spare_file_start(a->place.parent, size, g, &a->memory, &a->log);
}

void adapter_landed(adapter *a, uint64_t offset, uint64_t length)
{
    piece_digests_landed(a->digests, offset, length);
    if (a->pages)
        file_pages_landed(a->pages, length);
}

void adapter_restart(adapter *a)
{
    if (!a->digests)
        return;
    piece_digests_restart(a->digests);
    (void)land_header(a, NULL); /* it has its space */
}

void adapter_discard(adapter *a)
{
    file_pages_stop(&a->pages);
    piece_digests_stop(&a->digests);
    file_memory_release(&a->memory);
    if (a->directory >= 0)
        close(a->directory);
    a->directory = -1;
    if (a->temporary[0] != '\0' &&
        !adapter_remove_directory(a->place.parent, a->temporary))
        log_write(&a->log, FANIN_LOG_WARNING, "adapter-leftover",
                  "could not remove %s beside '%s'", a->temporary, a->place.directory);
    a->temporary[0] = '\0';
}
