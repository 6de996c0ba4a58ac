/* SPDX-License-Identifier: Apache-2.0 */
/* A directory's place: errors that name it, who can have made what is there, and the lock beside
   it. In a directory of many users' the lock's file may be anybody's: it is judged before it is
   waited for. */
#include "adapter/adapter_internal.h"
#include "error_set.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
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

bool ownership_parent_doubtful(const struct stat *info, char why_out[OWNERSHIP_TEXT])
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
    if (a->cancelled && a->cancelled(a->cookie))
        return error_set(error, FANIN_ERR_CANCELLED, &place, "cancelled while %s '%s'",
                         doing, a->place.directory);
    if (deadline_passed(a->at))
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
static fanin_status explain(const adapter *a, const char *name, int reason,
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
        uint64_t left = deadline_left_ns(a->at);
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
        return errno == EAGAIN ? FANIN_OK : explain(a, name, errno, error);
    fanin_status status = FANIN_OK;
    if (fstat(fd, &info) != 0)
        status = explain(a, name, errno, error);
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

bool adapter_try_lock(const adapter_place *place, int *lock_out)
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
