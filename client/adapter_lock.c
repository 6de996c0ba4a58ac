/* SPDX-License-Identifier: Apache-2.0 */
/* The lock beside a directory, and the leftovers of those who held it and died. */
#include "adapter_internal.h"
#include "error_set.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define TEMPORARY_DIGITS 16
/* flock() has no timed form: it is tried again at growing intervals. */
#define POLL_FIRST_NS ((uint64_t)1000 * 1000)
#define POLL_MAX_NS ((uint64_t)16 * 1000 * 1000)

static void lock_name(const adapter_place *place, char out[NAME_MAX + 1])
{
    snprintf(out, NAME_MAX + 1, ".%.200s.fanin-lock", place->name);
}

static void temporary_prefix(const adapter_place *place, char out[NAME_MAX + 1])
{
    snprintf(out, NAME_MAX + 1, ".%.200s.fanin-tmp-", place->name);
}

void adapter_temporary_name(const adapter_place *place, char out[NAME_MAX + 1])
{
    static atomic_uint counter;
    uint64_t id = 0;
    if (!random_bytes(&id, sizeof(id)))
        id = clock_ns() ^ (uint64_t)getpid() << 40 ^ atomic_fetch_add(&counter, 1);
    temporary_prefix(place, out);
    size_t size = strlen(out);
    snprintf(out + size, NAME_MAX + 1 - size, "%016llx", (unsigned long long)id);
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

static int open_lock_file(const adapter_place *place, const char *name)
{
    int flags = O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY;
    int fd = openat(place->parent, name, O_RDWR | O_CREAT | flags, 0666);
    /* Another user's: reading is enough for a lock. */
    if (fd < 0 && errno == EACCES) {
        fd = openat(place->parent, name, O_RDONLY | flags);
        if (fd < 0 && errno == ENOENT)
            errno = EACCES; /* it is not there because it must not be made */
    }
    return fd;
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
        if (status)
            return status;
        uint64_t left = deadline_left_ns(a->at);
        uint64_t ns = pause < left ? pause : left;
        struct timespec time = {.tv_nsec = (long)ns};
        nanosleep(&time, NULL);
        pause = pause * 2 < POLL_MAX_NS ? pause * 2 : POLL_MAX_NS;
    }
    return FANIN_OK;
}

fanin_status adapter_take_lock(const adapter *a, int *lock_out, fanin_error *error)
{
    char name[NAME_MAX + 1];
    lock_name(&a->place, name);
    for (;;) {
        int fd = open_lock_file(&a->place, name);
        if (fd < 0)
            return adapter_io_error(
                &a->place, errno, "cannot write beside", NULL,
                "make the parent directory writable, or give another "
                "directory",
                error);
        fanin_status status = wait_for_lock(a, fd, error);
        if (!status && is_current(&a->place, name, fd)) {
            *lock_out = fd;
            return FANIN_OK;
        }
        close(fd);
        if (!status)
            status =
                adapter_may_go_on(a, "waiting for another process that makes", error);
        if (status)
            return status;
    }
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

bool adapter_remove_directory(int parent, const char *name)
{
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (!dir) {
        int reason = errno;
        if (fd >= 0)
            close(fd);
        errno = reason;
        return reason == ENOENT;
    }
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            unlinkat(dirfd(dir), entry->d_name, 0);
    }
    closedir(dir);
    return unlinkat(parent, name, AT_REMOVEDIR) == 0;
}

static bool is_temporary(const char *name, const char *prefix)
{
    size_t size = strlen(prefix);
    if (strncmp(name, prefix, size) != 0 || strlen(name) != size + TEMPORARY_DIGITS)
        return false;
    for (const char *at = name + size; *at; at++) {
        if (!isxdigit((unsigned char)*at))
            return false;
    }
    return true;
}

void adapter_remove_leftovers(const adapter *a)
{
    char prefix[NAME_MAX + 1];
    temporary_prefix(&a->place, prefix);
    int fd = openat(a->place.parent, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (!dir) {
        if (fd >= 0)
            close(fd);
        return;
    }
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        if (!is_temporary(entry->d_name, prefix))
            continue;
        bool removed = adapter_remove_directory(a->place.parent, entry->d_name);
        log_write(&a->log, removed ? FANIN_LOG_INFO : FANIN_LOG_WARNING,
                  "adapter-leftover", "%s %s beside '%s', left by a process that died",
                  removed ? "removed" : "could not remove", entry->d_name,
                  a->place.directory);
    }
    closedir(dir);
}
