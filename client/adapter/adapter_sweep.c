/* SPDX-License-Identifier: Apache-2.0 */
/* Temporary directories, and what processes that were killed have left of them: of every name in a
   directory, as soon as nobody holds the lock of that name. */
#include "adapter/adapter_internal.h"
#include "adapter/model_config.h"
#include "buffer.h"
#include "error_set.h"

#include <inttypes.h>
#include <errno.h>
#include <fanin/client.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

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

/* What a pull puts into a directory. */
static bool is_made_by_pulls(const char *name)
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
            some = (is_made_by_pulls(entry->d_name) &&
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
        remove_files(fd);
        return unlinkat(parent, name, AT_REMOVEDIR) == 0;
    }
    close(fd);
    errno = EPERM;
    return false;
}

/* What an entry of a directory is a leftover of; *name_out is the adapter's. */
typedef enum leftover { LEFT_NOTHING, LEFT_DIRECTORY, LEFT_LOCK } leftover;

static leftover parse(const char *entry, char name_out[NAME_MAX + 1])
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

static void remove_directory(sweep *s, const char *entry)
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
static void clear(sweep *s, const char *entry)
{
    adapter_place place = {.parent = s->parent};
    leftover kind = parse(entry, place.name);
    bool own = s->own && strcmp(s->own, place.name) == 0;
    int lock = -1;
    if ((own && kind == LEFT_LOCK) || (!own && !adapter_try_lock(&place, &lock)))
        return;
    if (kind == LEFT_DIRECTORY)
        remove_directory(s, entry);
    if (!own) /* removes the lock's file */
        adapter_unlock(&place, lock);
}

static bool may_be_ours(const sweep *s, const char *entry, bool others)
{
    char name[NAME_MAX + 1];
    struct stat info;
    leftover kind = parse(entry, name);
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
        clear(s, entry);
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
    sweep s = {.parent = a->place.parent, .own = a->place.name, .log = a->log};
    if (is_safe(s.parent, why))
        sweep_run(&s);
    else
        log_write(&a->log, FANIN_LOG_INFO, "adapter-leftover",
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
