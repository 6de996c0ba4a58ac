/* SPDX-License-Identifier: Apache-2.0 */
/* A directory's place: errors that name it, who can have made what is there, and the lock beside
   it. In a directory of many users' the lock's file may be anybody's: it is judged before it is
   waited for. */
#include "adapter/adapter_internal.h"

#include "adapter/adapter.h"
#include "array.h"
#include "error_set.h"
#include <errno.h>
#include <fanin/client.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

/* flock() has no timed form: it is tried again at growing intervals. */
#define POLL_FIRST_NS ((uint64_t)1000 * 1000)
#define POLL_MAX_NS ((uint64_t)16 * 1000 * 1000)

#define OTHERS_WRITE (S_IWGRP | S_IWOTH)

static bool of_another(const struct stat *info, char why_out[OWNERSHIP_TEXT])
{
    snprintf(why_out, OWNERSHIP_TEXT, "belongs to uid %lu, this process is uid %lu",
             (unsigned long)info->st_uid, (unsigned long)geteuid());
    return true;
}

static bool writable(const struct stat *info, char why_out[OWNERSHIP_TEXT])
{
    snprintf(why_out, OWNERSHIP_TEXT, "may be written by other users (mode %04o)",
             (unsigned)info->st_mode & 07777);
    return true;
}

bool ownership_doubtful(const struct stat *info, char why_out[OWNERSHIP_TEXT])
{
    if (info->st_uid != geteuid())
        return of_another(info, why_out);
    return (info->st_mode & OTHERS_WRITE) && writable(info, why_out);
}

/* The same of what lies in a directory: true if another user may rename it there. A directory of
    root's is fine, and one that others may write to if it is sticky. */
static bool ownership_parent_doubtful(const struct stat *info,
                                      char why_out[OWNERSHIP_TEXT])
{
    /* Its owner may rename everything in it, sticky or not. */
    if (info->st_uid != geteuid() && info->st_uid != 0)
        return of_another(info, why_out);
    return (info->st_mode & OTHERS_WRITE) && !(info->st_mode & S_ISVTX) &&
           writable(info, why_out);
}

fanin_status adapter_check_parent(const adapter_place *place, fanin_error *error)
{
    struct stat info;
    char why[OWNERSHIP_TEXT];
    if (fstat(place->parent, &info) != 0)
        return adapter_io_error(place, errno, "cannot look at the parent of", NULL,
                                NULL, error);
    if (!ownership_parent_doubtful(&info, why))
        return FANIN_OK;
    error_place where = {.phase = "write",
                         .remedy = "pull into a directory that only you can write to, "
                                   "or set its sticky bit (chmod +t)"};
    return error_set(error, FANIN_ERR_EXISTS, &where,
                     "another user could exchange '%.200s' for something else: the "
                     "directory that it lies in %.120s",
                     place->directory, why);
}

static void lock_name(const adapter_place *place, char out[NAME_MAX + 1])
{
    snprintf(out, NAME_MAX + 1, ".%.200s" LOCK_SUFFIX, place->name);
}

fanin_status adapter_io_error(const adapter_place *place, int sys_errno,
                              const char *what, const char *file, const char *remedy,
                              fanin_error *error)
{
    error_place where = {.phase = "write", .remedy = error_remedy(sys_errno, remedy)};
    return error_set_errno(error, FANIN_ERR_IO, sys_errno, &where, "%s '%.300s%s%s'",
                           what, place->directory, file ? "/" : "", file ? file : "");
}

fanin_status adapter_may_go_on(const adapter *a, const char *doing, fanin_error *error)
{
    error_place place = {.phase = "write"};
    if (a->terms.cancelled && a->terms.cancelled(a->terms.cookie))
        return error_set(error, FANIN_ERR_CANCELLED, &place, "cancelled while %s '%s'",
                         doing, a->place.directory);
    if (deadline_passed(a->terms.at))
        return error_set(error, FANIN_ERR_TIMEOUT, &place,
                         "the deadline passed while %s '%s'", doing,
                         a->place.directory);
    return FANIN_OK;
}

/* -1 with errno; EAGAIN: it was removed just now. */
static int open_lock_file(const adapter_place *place, const char *name, bool *made)
{
    int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY;
    int fd = openat(place->parent, name, flags | O_CREAT | O_EXCL, 0600);
    *made = fd >= 0;
    if (fd >= 0 || errno != EEXIST)
        return fd;
    fd = openat(place->parent, name, flags);
    if (fd < 0 && errno == ENOENT)
        errno = EAGAIN;
    return fd;
}

/* Whether @p info is of a lock file that we made. */
static bool is_ours(const struct stat *info, char why_out[OWNERSHIP_TEXT])
{
    if (!S_ISREG(info->st_mode))
        snprintf(why_out, OWNERSHIP_TEXT, "is no regular file");
    else if (info->st_nlink > 1)
        snprintf(why_out, OWNERSHIP_TEXT, "has other names (hard links)");
    else if (info->st_size != 0)
        snprintf(why_out, OWNERSHIP_TEXT, "is not empty");
    else
        return !ownership_doubtful(info, why_out);
    return false;
}

static fanin_status refuse_lock_file(const adapter *a, const char *name,
                                     const char *why, fanin_error *error)
{
    error_place where = {.phase = "write",
                         .remedy = "let its owner remove that file, or pull into a "
                                   "directory that only you can write to"};
    return error_set(error, FANIN_ERR_EXISTS, &where,
                     "'%.200s' cannot be locked: '%.120s' beside it %.120s",
                     a->place.directory, name, why);
}

/* A file system that gives files to others than who makes them. */
static fanin_status refuse_owners(const adapter *a, const char *name, const char *why,
                                  fanin_error *error)
{
    error_place where = {
        .phase = "write",
        .remedy =
            "pull as that user or onto another file system: root_squash, uid= and "
            "file_mode= of a mount do that"};
    unlinkat(a->place.parent, name, 0);
    return error_set(error, FANIN_ERR_IO, &where,
                     "a file that was just made beside '%.200s' %.120s",
                     a->place.directory, why);
}

/* @p reason: why it could not be opened. */
static fanin_status explain_holder(const adapter *a, const char *name, int reason,
                                   fanin_error *error)
{
    struct stat info;
    char why[OWNERSHIP_TEXT];
    if (fstatat(a->place.parent, name, &info, AT_SYMLINK_NOFOLLOW) == 0 &&
        !is_ours(&info, why))
        return refuse_lock_file(a, name, why, error);
    return adapter_io_error(&a->place, reason, "cannot write beside", NULL,
                            "make the parent directory writable, or give another "
                            "directory",
                            error);
}

/* The one who held the lock before may have removed the file that was locked just now. */
static bool is_current(const adapter_place *place, const char *name, int fd)
{
    struct stat held, there;
    return fstat(fd, &held) == 0 &&
           fstatat(place->parent, name, &there, AT_SYMLINK_NOFOLLOW) == 0 &&
           held.st_dev == there.st_dev && held.st_ino == there.st_ino;
}

static fanin_status wait_for_lock(const adapter *a, int fd, fanin_error *error)
{
    uint64_t pause = POLL_FIRST_NS;
    while (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        if (errno == EINTR)
            continue;
        if (errno != EWOULDBLOCK)
            return adapter_io_error(&a->place, errno, "cannot lock the place of", NULL,
                                    NULL, error);
        fanin_status status =
            adapter_may_go_on(a, "waiting for another process that makes", error);
        if (status != FANIN_OK)
            return status;
        uint64_t left = deadline_left_ns(a->terms.at);
        uint64_t ns = pause < left ? pause : left;
        struct timespec time = {.tv_nsec = (long)ns};
        nanosleep(&time, NULL);
        pause = pause * 2 < POLL_MAX_NS ? pause * 2 : POLL_MAX_NS;
    }
    return FANIN_OK;
}

/* Takes it now or in a while; *lock_out -1 with FANIN_OK: it was removed meanwhile. */
static fanin_status try_file(const adapter *a, const char *name, int *lock_out,
                             fanin_error *error)
{
    struct stat info;
    char why[OWNERSHIP_TEXT];
    bool made;
    int fd = open_lock_file(&a->place, name, &made);
    *lock_out = -1;
    if (fd < 0)
        return errno == EAGAIN ? FANIN_OK : explain_holder(a, name, errno, error);
    fanin_status status = FANIN_OK;
    if (fstat(fd, &info) != 0)
        status = explain_holder(a, name, errno, error);
    else if (!is_ours(&info, why))
        status = (made ? refuse_owners : refuse_lock_file)(a, name, why, error);
    if (status == FANIN_OK)
        status = wait_for_lock(a, fd, error);
    if (status == FANIN_OK && is_current(&a->place, name, fd))
        *lock_out = fd;
    else
        close(fd);
    return status;
}

fanin_status adapter_take_lock(const adapter *a, int *lock_out, fanin_error *error)
{
    char name[NAME_MAX + 1];
    lock_name(&a->place, name);
    fanin_status status = try_file(a, name, lock_out, error);
    while (status == FANIN_OK && *lock_out < 0) {
        status = adapter_may_go_on(a, "waiting for another process that makes", error);
        if (status == FANIN_OK)
            status = try_file(a, name, lock_out, error);
    }
    return status;
}

/* Takes the lock if nobody holds it, without waiting; place->directory may be NULL. */
static bool adapter_try_lock(const adapter_place *place, int *lock_out)
{
    struct stat info;
    char name[NAME_MAX + 1], why[OWNERSHIP_TEXT];
    lock_name(place, name);
    bool made;
    int fd = open_lock_file(place, name, &made);
    if (fd < 0)
        return false;
    if (fstat(fd, &info) == 0 && is_ours(&info, why) &&
        flock(fd, LOCK_EX | LOCK_NB) == 0 && is_current(place, name, fd)) {
        *lock_out = fd;
        return true;
    }
    close(fd);
    return false;
}

void adapter_unlock(const adapter_place *place, int lock)
{
    char name[NAME_MAX + 1];
    lock_name(place, name);
    if (is_current(place, name, lock))
        unlinkat(place->parent, name, 0);
    /* Also for copies of the descriptor that a forked child holds. */
    flock(lock, LOCK_UN);
    close(lock);
}

/* ----------------------------------------------- what dead processes left */

/* Temporary directories, and what processes that were killed have left of them: of every name in a
   directory, as soon as nobody holds the lock of that name. */

#define TEMPORARY_INFIX ".fanin-tmp-"
#define TEMPORARY_DIGITS 16
#define HEX_DIGITS "0123456789abcdefABCDEF"
#define ZFS_MAGIC 0x2fc12fc1 /* of no header */

void adapter_temporary_name(const adapter_place *place, char out[NAME_MAX + 1])
{
    static atomic_uint counter;
    uint64_t id = 0;
    if (!random_bytes(&id, sizeof id))
        id = clock_ns() ^ (uint64_t)getpid() << 40 ^ atomic_fetch_add(&counter, 1);
    snprintf(out, NAME_MAX + 1, ".%.200s" TEMPORARY_INFIX "%0*" PRIx64, place->name,
             TEMPORARY_DIGITS, id);
}

DIR *adapter_list(int directory)
{
    int fd = openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    int reason = errno;
    if (!dir && fd >= 0)
        close(fd);
    errno = reason;
    return dir;
}

bool adapter_makes_file(const char *name)
{
    static const char *const files[] = {ADAPTER_FILE, ADAPTER_CONFIG_FILE,
                                        MODEL_CONFIG_FILE, MODEL_INDEX_FILE,
                                        IDENTITY_FILE};
    for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
        if (strcmp(name, files[i]) == 0)
            return true;
    }
    return tensor_files_is_model(name);
}

/* Needs no descriptor but this one, which it closes. While names go, some file systems leave out
   others. */
static void remove_files(int directory)
{
    bool some;
    DIR *dir = fdopendir(directory);
    if (!dir) {
        close(directory);
        return;
    }
    do {
        some = false;
        rewinddir(dir);
        for (struct dirent *entry; (entry = readdir(dir)) != NULL;)
            some = (adapter_makes_file(entry->d_name) &&
                    unlinkat(directory, entry->d_name, 0) == 0) ||
                   some;
    } while (some);
    closedir(dir);
}

/* Made under a umask that denies it to us, or when there was no descriptor any more: empty then. */
static bool remove_unopened(int parent, const char *name, int reason)
{
    struct stat info;
    if (reason == ENOENT ||
        (fstatat(parent, name, &info, AT_SYMLINK_NOFOLLOW) == 0 &&
         info.st_uid == geteuid() && unlinkat(parent, name, AT_REMOVEDIR) == 0))
        return true;
    errno = reason;
    return false;
}

bool adapter_remove_directory(int parent, const char *name, int held)
{
    struct stat info;
    int fd = held;
    if (fd < 0)
        fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return remove_unopened(parent, name, errno);
    if (fstat(fd, &info) == 0 && info.st_uid == geteuid()) {
        (void)fchmod(fd, S_IRWXU); /* it may have been made read-only */
        remove_files(fd);
        return unlinkat(parent, name, AT_REMOVEDIR) == 0;
    }
    close(fd);
    errno = EPERM;
    return false;
}

/* What an entry of a directory is a leftover of; *name_out is the adapter's. */
typedef enum leftover { LEFT_NOTHING, LEFT_DIRECTORY, LEFT_LOCK } leftover;

static leftover parse_temporary(const char *entry, char name_out[NAME_MAX + 1])
{
    static const struct {
        const char *text;
        size_t digits;
        leftover kind;
    } ends[] = {{TEMPORARY_INFIX, TEMPORARY_DIGITS, LEFT_DIRECTORY},
                {LOCK_SUFFIX, 0, LEFT_LOCK}};
    size_t size = strlen(entry);
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        size_t text = strlen(ends[i].text), tail = text + ends[i].digits;
        if (size < tail + 2 || size > tail + 1 + ADAPTER_NAME_MAX || entry[0] != '.' ||
            memcmp(entry + size - tail, ends[i].text, text) != 0 ||
            strspn(entry + size - ends[i].digits, HEX_DIGITS) != ends[i].digits)
            continue;
        snprintf(name_out, NAME_MAX + 1, "%.*s", (int)(size - tail - 1), entry + 1);
        return ends[i].kind;
    }
    return LEFT_NOTHING;
}

/* Where leftovers are removed, and what came of it. */
typedef struct sweep {
    int parent;
    const char *own; /* the name whose lock the caller holds, NULL: none */
    logger log;
    uint64_t removed;
} sweep;

/* A network's filesystem may keep flock() to each host: a lock that is free proves nothing. */
static bool locks_prove_death(int directory)
{
    struct statfs info;
    if (fstatfs(directory, &info) != 0)
        return false;
    switch ((unsigned long)info.f_type) {
    case TMPFS_MAGIC:
    case RAMFS_MAGIC:
    case EXT4_SUPER_MAGIC:
    case XFS_SUPER_MAGIC:
    case BTRFS_SUPER_MAGIC:
    case F2FS_SUPER_MAGIC:
    case OVERLAYFS_SUPER_MAGIC:
    case ZFS_MAGIC:
        return true;
    default:
        return false;
    }
}

static void remove_own_directory(sweep *s, const char *entry)
{
    char reason[64];
    if (adapter_remove_directory(s->parent, entry, -1)) {
        s->removed++;
        log_write(&s->log, FANIN_LOG_INFO, "adapter-leftover",
                  "removed %s, left by a process that died", entry);
    } else {
        log_write(&s->log, FANIN_LOG_WARNING, "adapter-leftover",
                  "could not remove %s, left by a process that died (%s)", entry,
                  strerror_r(errno, reason, sizeof reason));
    }
}

/* The entry was a leftover when the directory was read; it may have gone since. */
static void clear_directory(sweep *s, const char *entry)
{
    adapter_place place = {.parent = s->parent};
    leftover kind = parse_temporary(entry, place.name);
    bool own = s->own && strcmp(s->own, place.name) == 0;
    int lock = -1;
    if ((own && kind == LEFT_LOCK) || (!own && !adapter_try_lock(&place, &lock)))
        return;
    if (kind == LEFT_DIRECTORY)
        remove_own_directory(s, entry);
    if (!own) /* removes the lock's file */
        adapter_unlock(&place, lock);
}

static bool may_be_ours(const sweep *s, const char *entry, bool others)
{
    char name[NAME_MAX + 1];
    struct stat info;
    leftover kind = parse_temporary(entry, name);
    return kind != LEFT_NOTHING && (others || (s->own && strcmp(s->own, name) == 0)) &&
           fstatat(s->parent, entry, &info, AT_SYMLINK_NOFOLLOW) == 0 &&
           info.st_uid == geteuid() &&
           (kind == LEFT_DIRECTORY ? S_ISDIR(info.st_mode) : S_ISREG(info.st_mode));
}

/* Names are collected before any of them goes: locks come and go while they are tried. False with
   errno: the directory cannot be read. */
static bool sweep_run(sweep *s)
{
    DIR *dir = adapter_list(s->parent);
    if (!dir)
        return false;
    bool others = locks_prove_death(s->parent);
    buffer names = {0};
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        if (may_be_ours(s, entry->d_name, others))
            buffer_append(&names, entry->d_name, strlen(entry->d_name) + 1);
    }
    closedir(dir);
    for (size_t at = 0; at < names.size && !names.failed;) {
        const char *entry = (const char *)names.data + at;
        at += strlen(entry) + 1;
        clear_directory(s, entry);
    }
    buffer_free(&names);
    return true;
}

/* Where others may rename, what bears a leftover's name may be anything of ours. */
static bool is_safe(int parent, char why_out[OWNERSHIP_TEXT])
{
    char reason[64];
    struct stat info;
    if (fstat(parent, &info) == 0)
        return !ownership_parent_doubtful(&info, why_out);
    snprintf(why_out, OWNERSHIP_TEXT, "cannot be looked at (%s)",
             strerror_r(errno, reason, sizeof reason));
    return false;
}

void adapter_remove_leftovers(const adapter *a)
{
    char why[OWNERSHIP_TEXT];
    sweep s = {.parent = a->place.parent, .own = a->place.name, .log = a->terms.log};
    if (is_safe(s.parent, why))
        sweep_run(&s);
    else
        log_write(&a->terms.log, FANIN_LOG_INFO, "adapter-leftover",
                  "leftovers beside '%s' stay: the directory %s", a->place.directory,
                  why);
}

fanin_status fanin_sweep_adapter_directory(const char *directory, uint64_t *removed_out,
                                           fanin_error *error)
{
    char why[OWNERSHIP_TEXT];
    error_place where = {.phase = "sweep"};
    if (removed_out)
        *removed_out = 0;
    if (!directory || !directory[0])
        return error_set(error, FANIN_ERR_ARGUMENT, &where, "no directory was given");
    int parent = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (parent < 0)
        return error_set_errno(error, FANIN_ERR_IO, errno, &where,
                               "cannot open '%.300s'", directory);
    fanin_status status = FANIN_OK;
    sweep s = {.parent = parent};
    where.remedy = "keep adapters in a directory that only you can write to";
    if (!is_safe(parent, why))
        status =
            error_set(error, FANIN_ERR_ARGUMENT, &where,
                      "nothing can be removed safely: '%.300s' %s", directory, why);
    else if (!sweep_run(&s))
        status = error_set_errno(error, FANIN_ERR_IO, errno, &where,
                                 "cannot read '%.300s'", directory);
    close(parent);
    if (status == FANIN_OK && removed_out)
        *removed_out = s.removed;
    return status;
}
