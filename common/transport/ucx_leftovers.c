/* SPDX-License-Identifier: Apache-2.0 */
#include "ucx_leftovers.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PREFIX "ucx_shm_posix_"

static bool has_their_name(const char *name)
{
    size_t prefix = strlen(PREFIX);
    return strncmp(name, PREFIX, prefix) == 0 && name[prefix] != '\0' &&
           strspn(name + prefix, "0123456789abcdef") == strlen(name + prefix);
}

static bool is_ours_alone(int fd)
{
    struct stat info;
    return fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_nlink == 1 &&
           info.st_uid == geteuid() && (info.st_mode & 07777) == 0600;
}

/* The kernel grants a write lease only on a file that nobody else has open for writing; whoever
   maps it, as UCX does, has it open. Should somebody open it just now, the signal is one that
   nobody minds. */
static bool is_in_nobodys_use(int fd)
{
    return fcntl(fd, F_SETSIG, SIGURG) == 0 && fcntl(fd, F_SETLEASE, F_WRLCK) == 0;
}

static bool is_leftover(int fd)
{
    return is_ours_alone(fd) && is_in_nobodys_use(fd);
}

static unsigned ucx_leftovers_remove_all(int directory, DIR *entries)
{
    unsigned removed = 0;
    const struct dirent *entry;
    while ((entry = readdir(entries))) {
        if (!has_their_name(entry->d_name))
            continue;
        int fd = openat(directory, entry->d_name,
                        O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
        if (fd < 0)
            continue;
        if (is_leftover(fd))
            removed += unlinkat(directory, entry->d_name, 0) == 0;
        close(fd); /* ends the lease as well */
    }
    return removed;
}

void ucx_leftovers_remove(const char *directory, const logger *log)
{
    DIR *entries = opendir(directory);
    if (!entries)
        return;
    unsigned removed = ucx_leftovers_remove_all(dirfd(entries), entries);
    closedir(entries);
    if (removed > 0)
        log_write(log, FANIN_LOG_INFO, "ucx-leftovers",
                  "removed %u segments of shared memory from %s that killed processes "
                  "had left",
                  removed, directory);
}
