/* SPDX-License-Identifier: Apache-2.0 */
#include "own_file.h"
#include "error_set.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

fanin_status own_file_refuse(const own_file_rules *rules, const char *path,
                             fanin_status status, const char *why, const char *remedy,
                             fanin_error *error)
{
    const error_place place = {.phase = rules->phase, .remedy = remedy};
    return error_set(error, status, &place, "the %s %s %s", rules->what, path, why);
}

static fanin_status refuse_errno(const own_file_rules *rules, const char *path,
                                 int code, fanin_error *error)
{
    error_place place = {.phase = rules->phase,
                         .remedy = error_remedy(code, rules->make)};
    if (code == EACCES)
        place.remedy = "let this process's user own it, mode 0400";
    return error_set_errno(error, code == ENOENT ? FANIN_ERR_NOT_FOUND : FANIN_ERR_IO,
                           code, &place, "cannot read the %s %s", rules->what, path);
}

static fanin_status refuse_mode(const own_file_rules *rules, const char *path,
                                const struct stat *s, fanin_error *error)
{
    char why[128], remedy[256];
    snprintf(why, sizeof why, "has mode %04o: others than its owner may %s it",
             (unsigned)(s->st_mode & 07777), rules->is_private ? "use" : "write");
    if (!rules->is_private)
        snprintf(remedy, sizeof remedy, "chmod go-w");
    else if (s->st_uid == 0)
        snprintf(remedy, sizeof remedy,
                 "chmod 0400, or 0440 for its group; in Kubernetes defaultMode: 0400");
    else
        snprintf(remedy, sizeof remedy,
                 "chmod 0600, and make a new %s if others could read this one",
                 rules->leaked);
    return own_file_refuse(rules, path, FANIN_ERR_AUTH, why, remedy, error);
}

/* Who may change or read it. */
static fanin_status check_owner(const own_file_rules *rules, int fd, const char *path,
                                fanin_error *error)
{
    struct stat s;
    char why[128];
    if (fstat(fd, &s) != 0)
        return refuse_errno(rules, path, errno, error);
    if (!S_ISREG(s.st_mode))
        return own_file_refuse(rules, path, FANIN_ERR_ARGUMENT, "is no file",
                               rules->make, error);
    if (s.st_uid != 0 && s.st_uid != geteuid()) {
        snprintf(why, sizeof why, "belongs to user %u, neither root nor this process's",
                 (unsigned)s.st_uid);
        return own_file_refuse(rules, path, FANIN_ERR_AUTH, why,
                               "let this process's user own it: chown", error);
    }
    /* What is executable does no harm. */
    mode_t others = rules->is_private ? 0 : 055;
    mode_t most = 0700 | others | (s.st_uid == 0 ? 040 : 0);
    return s.st_mode & 0777 & ~most ? refuse_mode(rules, path, &s, error) : FANIN_OK;
}

static fanin_status own_file_read_all(const own_file_rules *rules, int fd,
                                      const char *path, char *out, size_t room,
                                      size_t *size_out, fanin_error *error)
{
    *size_out = 0;
    while (*size_out < room) {
        ssize_t n = read(fd, out + *size_out, room - *size_out);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return refuse_errno(rules, path, errno, error);
        if (n == 0)
            break;
        *size_out += (size_t)n;
    }
    return FANIN_OK;
}

fanin_status own_file_read(const own_file_rules *rules, const char *path, void *out,
                           size_t room, size_t *size_out, fanin_error *error)
{
    /* Not to wait for a pipe's writer; what is no file is refused. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return refuse_errno(rules, path, errno, error);
    fanin_status status = check_owner(rules, fd, path, error);
    if (status == FANIN_OK)
        status = own_file_read_all(rules, fd, path, out, room, size_out, error);
    close(fd);
    return status;
}
