/* SPDX-License-Identifier: Apache-2.0 */
/* The temporary directory and the files in it, allocated and mapped before they are filled. */
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
        limit.rlim_cur < a->files.largest) {
        where.remedy = "raise the limit: ulimit -f unlimited";
        return error_set_errno(error, FANIN_ERR_IO, reason, &where,
                               "no file of %" PRIu64
                               " bytes can be made in '%.300s': this process may write "
                               "%" PRIu64 " (its limit of file sizes)",
                               a->files.largest, a->place.directory,
                               (uint64_t)limit.rlim_cur);
    }
    return error_set_errno(
        error, FANIN_ERR_IO, reason, &where,
        "no room for '%.300s': %" PRIu64 " bytes are needed, %" PRIu64 " are free",
        a->place.directory, a->files.bytes, (uint64_t)info.f_bavail * info.f_frsize);
}

static fanin_status no_space(const adapter *a, int reason, fanin_error *error)
{
    if (reason == ENOSPC || reason == EDQUOT || reason == EFBIG)
        return full_disk(a, reason, error);
    if (reason == ENOMEM)
        return error_set_memory(error);
    return adapter_io_error(&a->place, reason, "cannot allocate",
                            a->files.count == 1 ? a->files.files[0].name : NULL, NULL,
                            error);
}

/* Not even the space reserved for root would do: known before any of it is taken. */
static bool surely_full(const adapter *a)
{
    struct statvfs info;
    return fstatvfs(a->directory, &info) == 0 && info.f_blocks > 0 &&
           info.f_frsize > 0 && info.f_bfree < a->files.bytes / info.f_frsize;
}

static fanin_status too_large(const adapter *a, uint64_t most, const char *whose,
                              fanin_error *error)
{
    error_place where = {.phase = "plan",
                         .remedy = "if that is right, raise max_bytes (--max-bytes)"};
    return error_set(error, FANIN_ERR_LIMIT, &where,
                     "the %s has %" PRIu64 " bytes, more than the %" PRIu64
                     " that a pull into '%.256s' may bring (%s)",
                     adapter_kind(a), a->files.bytes, most, a->place.directory, whose);
}

fanin_status adapter_check_size(const adapter *a, uint64_t max_bytes,
                                fanin_error *error)
{
    struct statvfs info;
    if (max_bytes > 0 && a->files.bytes > max_bytes)
        return too_large(a, max_bytes, "max_bytes", error);
    if (fstatvfs(a->place.parent, &info) != 0 || info.f_blocks == 0 ||
        info.f_frsize == 0)
        return FANIN_OK; /* no size is known */
    /* A plan takes the longer the more there is said to be. */
    if (info.f_blocks < a->files.bytes / info.f_frsize)
        return full_disk(a, ENOSPC, error);
    uint64_t most = (uint64_t)info.f_blocks * info.f_frsize / 4;
    if (max_bytes > 0 || a->terms.is_model || a->files.bytes <= most ||
        info.f_bfree < a->files.bytes / info.f_frsize) /* adapter_map() says so */
        return FANIN_OK;
    return too_large(a, most, "a quarter of its file system", error);
}

static uint64_t mapped_size(const adapter *a, size_t file)
{
    return a->files.files[file].layout.file_size;
}

/* File systems that cannot make space piece by piece: all of it. */
static fanin_status allocate_whole(const adapter *a, size_t file, fanin_error *error)
{
    for (uint64_t at = 0; at < mapped_size(a, file);) {
        uint64_t left = mapped_size(a, file) - at;
        uint64_t step = left < ALLOCATE_STEP ? left : ALLOCATE_STEP;
        fanin_status status = adapter_may_go_on(a, "allocating", error);
        if (status != FANIN_OK)
            return status;
        int reason = file_space_make(a->mapped[file].memory.file, at, step);
        if (reason != 0)
            return no_space(a, reason, error);
        at += step;
    }
    return FANIN_OK;
}

static fanin_status allocate_files(adapter *a, fanin_error *error)
{
    int reason;
    fanin_status status = FANIN_OK;
    if (surely_full(a))
        return full_disk(a, ENOSPC, error);
    file_part *parts = calloc(a->n_mapped, sizeof parts[0]);
    if (!parts)
        return error_set_memory(error);
    for (size_t i = 0; i < a->n_mapped; i++)
        parts[i] = (file_part){a->mapped[i].memory.file, a->files.files[i].at,
                               mapped_size(a, i)};
    a->pages = file_pages_start(parts, a->n_mapped, &reason);
    free(parts);
    if (a->pages)
        return FANIN_OK;
    if (reason != EOPNOTSUPP)
        return no_space(a, reason, error);
    for (size_t i = 0; i < a->n_mapped && status == FANIN_OK; i++)
        status = allocate_whole(a, i, error);
    return status;
}

fanin_status adapter_need(adapter *a, uint64_t offset, uint64_t length,
                          fanin_error *error)
{
    while (a->pages && length > 0) {
        uint64_t step = length < ALLOCATE_STEP ? length : ALLOCATE_STEP;
        int reason = file_pages_need(a->pages, offset, step);
        if (reason != 0)
            return no_space(a, reason, error);
        offset += step;
        length -= step;
        fanin_status status =
            length > 0 ? adapter_may_go_on(a, "allocating", error) : FANIN_OK;
        if (status != FANIN_OK)
            return status;
    }
    return FANIN_OK;
}

/* @p at: where in the reserved range, NULL: anywhere. */
static fanin_status map_tensor_file(adapter *a, size_t file, uint8_t *at,
                                    fanin_error *error)
{
    size_t size = (size_t)mapped_size(a, file);
    int fixed = at ? MAP_FIXED : 0;
    mapped_file *m = &a->mapped[file];
    void *base =
        mmap(at, size, PROT_READ | PROT_WRITE, MAP_SHARED | fixed, m->memory.file, 0);
    m->anonymous = false;
    if (base == MAP_FAILED && errno != ENOMEM) {
        char reason[64];
        log_write(
            &a->terms.log, FANIN_LOG_INFO, "adapter-no-mmap",
            "the filesystem of '%s' has no shared mappings (%s): writing from memory",
            a->place.directory, strerror_r(errno, reason, sizeof reason));
        m->anonymous = true;
        base = mmap(at, size, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | fixed, -1, 0);
    }
    if (base == MAP_FAILED)
        return error_set_memory(error);
    /* Nothing is read that was not written. Reading ahead of faults would make large folios of
       unwritten blocks, and ext4 goes through all blocks of a folio at each fault in it. */
    madvise(base, size, MADV_RANDOM);
    m->memory.base = base;
    m->memory.size = size;
    return FANIN_OK;
}

/* Several files lie side by side in a range of addresses that is reserved for them. */
static fanin_status map_all(adapter *a, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    if (a->n_mapped > 1) {
        void *range = mmap(NULL, (size_t)a->files.span, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (range == MAP_FAILED)
            return error_set_memory(error);
        a->base = range;
        a->span = a->files.span;
    }
    for (size_t i = 0; i < a->n_mapped && status == FANIN_OK; i++)
        status = map_tensor_file(a, i, a->base ? a->base + a->files.files[i].at : NULL,
                                 error);
    if (a->span == 0)
        a->base = a->mapped[0].memory.base; /* else the first one is mapped there */
    bool anonymous = false;
    for (size_t i = 0; i < a->n_mapped; i++)
        anonymous = anonymous || a->mapped[i].anonymous;
    if (status == FANIN_OK && a->pages && !anonymous)
        file_pages_go_ahead(a->pages, a->base);
    return status;
}

/* The file that was made beforehand gets its name. False: there is none, or it cannot. */
static bool take_spare(adapter *a)
{
    file_memory *memory = &a->mapped[0].memory;
    if (!a->terms.spare || a->n_mapped != 1 ||
        !spare_file_fits(*a->terms.spare, a->place.parent, mapped_size(a, 0)) ||
        !spare_file_take(a->terms.spare, memory))
        return false;
    char self[40], reason[64];
    snprintf(self, sizeof self, "/proc/self/fd/%d", memory->file);
    if (linkat(AT_FDCWD, self, a->directory, a->files.files[0].name,
               AT_SYMLINK_FOLLOW) == 0) {
        a->base = memory->base;
        return true;
    }
    log_write(&a->terms.log, FANIN_LOG_INFO, "spare-file",
              "the spare file cannot be used for '%s' (%s)", a->place.directory,
              strerror_r(errno, reason, sizeof reason));
    file_memory_release(memory);
    return false;
}

static fanin_status no_file(const adapter *a, const char *name, int reason,
                            fanin_error *error)
{
    error_place where = {.phase = "write",
                         .remedy = "raise ulimit -n, or let a file have more bytes"};
    if (reason == EMFILE && a->n_mapped > 1)
        return error_set_errno(error, FANIN_ERR_IO, reason, &where,
                               "cannot make '%.300s/%s'", a->place.directory, name);
    return adapter_io_error(&a->place, reason, "cannot make", name, NULL, error);
}

static fanin_status make_fresh(adapter *a, fanin_error *error)
{
    for (size_t i = 0; i < a->n_mapped; i++) {
        const char *name = a->files.files[i].name;
        int file = openat(a->directory, name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC,
                          ADAPTER_FILE_MODE);
        if (file < 0)
            return no_file(a, name, errno, error);
        a->mapped[i].memory.file = file;
    }
    fanin_status status = allocate_files(a, error);
    return status != FANIN_OK ? status : map_all(a, error);
}

static fanin_status start_digests(adapter *a, fanin_error *error)
{
    a->pool = piece_digests_pool(a->files.bytes);
    for (size_t i = 0; i < a->n_mapped && a->pool; i++) {
        mapped_file *m = &a->mapped[i];
        bool write_out = a->terms.is_model && !m->anonymous;
        m->digests = piece_digests_start(m->memory.base, m->memory.size, a->pool,
                                         write_out ? m->memory.file : -1);
        if (!m->digests)
            return error_set_memory(error);
    }
    return a->pool ? FANIN_OK : error_set_memory(error);
}

static fanin_status make_mapped_files(adapter *a, fanin_error *error)
{
    a->mapped = calloc(a->files.count, sizeof a->mapped[0]);
    if (!a->mapped)
        return error_set_memory(error);
    a->n_mapped = a->files.count;
    for (size_t i = 0; i < a->n_mapped; i++)
        a->mapped[i].memory.file = -1;
    fanin_status status = take_spare(a) ? FANIN_OK : make_fresh(a, error);
    return status != FANIN_OK ? status : start_digests(a, error);
}

/* Not every file system can: known before anything is read. */
static fanin_status try_to_exchange(const adapter *a, fanin_error *error)
{
    char other[NAME_MAX + 1];
    int parent = a->place.parent, reason = 0;
    adapter_temporary_name(&a->place, other);
    if (mkdirat(parent, other, ADAPTER_DIRECTORY_MODE) != 0 ||
        renameat2(parent, a->temporary, parent, other, RENAME_EXCHANGE) != 0)
        reason = errno;
    unlinkat(parent, other, AT_REMOVEDIR);
    if (reason == 0)
        return FANIN_OK;
    return adapter_io_error(&a->place, reason, "cannot replace", NULL,
                            "remove it, or pull into another directory", error);
}

static fanin_status make_directory(adapter *a, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    adapter_temporary_name(&a->place, a->temporary);
    if (mkdirat(a->place.parent, a->temporary, ADAPTER_DIRECTORY_MODE) != 0) {
        int reason = errno;
        a->temporary[0] = '\0';
        return adapter_io_error(&a->place, reason, "cannot make a directory beside",
                                NULL, NULL, error);
    }
    if (a->replaced >= 0)
        status = try_to_exchange(a, error);
    if (status != FANIN_OK)
        return status;
    a->directory = openat(a->place.parent, a->temporary,
                          O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    struct stat info;
    char why[OWNERSHIP_TEXT];
    if (a->directory < 0 || fstat(a->directory, &info) != 0)
        return adapter_io_error(&a->place, errno, "cannot make", NULL, NULL, error);
    if (ownership_doubtful(&info, why))
        return error_set(error, FANIN_ERR_EXISTS, NULL,
                         "the directory made beside '%.300s' was exchanged: it %s",
                         a->place.directory, why);
    return make_mapped_files(a, error);
}

/* Headers are final as soon as they are there. */
static fanin_status land_headers(adapter *a, fanin_error *error)
{
    for (size_t i = 0; i < a->n_mapped; i++) {
        const safetensors_layout *layout = &a->files.files[i].layout;
        fanin_status status =
            adapter_need(a, a->files.files[i].at, layout->header_size, error);
        if (status != FANIN_OK)
            return status;
        if (!a->headed)
            memcpy(a->mapped[i].memory.base, layout->header, layout->header_size);
        piece_digests_landed(a->mapped[i].digests, 0, layout->header_size);
    }
    a->headed = true;
    return FANIN_OK;
}

/* Whether the files that are mapped are as those that were prepared; their names follow then. */
static bool fits_file_system(const adapter *a)
{
    bool same = a->n_mapped > 0 && a->n_mapped == a->files.count;
    for (size_t i = 0; i < a->n_mapped && same; i++)
        same = a->mapped[i].digests && a->mapped[i].memory.size == mapped_size(a, i);
    return same;
}

/* All at once: they share threads. */
static void restart_digests(adapter *a)
{
    for (size_t i = 0; i < a->n_mapped; i++)
        piece_digests_restart(a->mapped[i].digests);
}

fanin_status adapter_map(adapter *a, uint8_t **base_out, fanin_error *error)
{
    fanin_status status = FANIN_OK;
    if (a->files.count == 0)
        return error_set(error, FANIN_ERR_INTERNAL, NULL, "nothing was prepared");
    bool there = fits_file_system(a);
    /* Prepared again in between: perhaps other names of the same sizes. */
    bool anew = there && !a->headed;
    if (anew)
        restart_digests(a);
    if (!there) {
        adapter_discard(a);
        status = make_directory(a, error);
    }
    if (status == FANIN_OK && (anew || !there))
        status = land_headers(a, error);
    if (status != FANIN_OK) {
        adapter_discard(a);
        return status;
    }
    *base_out = a->base;
    return FANIN_OK;
}

bool adapter_is_pinned(const adapter *a)
{
    return a->n_mapped == 1 && a->mapped[0].memory.pinned_by != NULL;
}

static void stop_threads(adapter *a)
{
    file_pages_stop(&a->pages);
    for (size_t i = 0; i < a->n_mapped; i++)
        piece_digests_stop(&a->mapped[i].digests);
    worker_pool_destroy(&a->pool);
}

void adapter_make_spare(adapter *a, spare_file **spare, gpu *g)
{
    if (a->n_mapped == 0)
        spare_file_retire(spare);
    if (a->n_mapped != 1 || a->mapped[0].anonymous ||
        spare_file_fits(*spare, a->place.parent, mapped_size(a, 0)))
        return;
    stop_threads(a);
    spare_file_drop(spare);
    *spare = spare_file_start(a->place.parent, mapped_size(a, 0), g,
                              &a->mapped[0].memory, &a->terms.log);
}

void adapter_landed(adapter *a, uint64_t offset, uint64_t length)
{
    size_t file = tensor_files_at(&a->files, offset);
    piece_digests_landed(a->mapped[file].digests, offset - a->files.files[file].at,
                         length);
    if (a->pages)
        file_pages_landed(a->pages, length);
}

void adapter_digested(adapter *a, uint64_t offset, const digest *known)
{
    piece_digests_known(a->mapped[0].digests, offset, known);
    if (a->pages)
        file_pages_landed(a->pages, DIGEST_PIECE);
}

void adapter_recalled(adapter *a)
{
    for (size_t i = 0; i < a->n_mapped; i++) {
        const safetensors_layout *layout = &a->files.files[i].layout;
        piece_digests_landed(a->mapped[i].digests, layout->header_size,
                             layout->file_size - layout->header_size);
    }
}

void adapter_restart(adapter *a)
{
    if (!fits_file_system(a))
        return;
    restart_digests(a);
    (void)land_headers(a, NULL); /* they have their space */
}

static void unmap_files(adapter *a)
{
    for (size_t i = 0; i < a->n_mapped; i++) {
        if (a->span > 0)
            a->mapped[i].memory.base = NULL; /* of the range */
        file_memory_release(&a->mapped[i].memory);
    }
    if (a->span > 0)
        munmap(a->base, (size_t)a->span);
    free(a->mapped);
    a->mapped = NULL;
    a->n_mapped = 0;
    a->base = NULL;
    a->span = 0;
}

void adapter_discard(adapter *a)
{
    stop_threads(a);
    unmap_files(a);
    a->headed = a->recalled = false;
    int held = a->directory;
    a->directory = -1;
    if (a->temporary[0] == '\0') {
        if (held >= 0)
            close(held);
    } else if (!adapter_remove_directory(a->place.parent, a->temporary, held))
        log_write(&a->terms.log, FANIN_LOG_WARNING, "adapter-leftover",
                  "could not remove %s beside '%s'", a->temporary, a->place.directory);
    a->temporary[0] = '\0';
}
