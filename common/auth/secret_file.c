/* SPDX-License-Identifier: Apache-2.0 */
#include "secret_file.h"
#include "error_set.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEX_SIZE ((size_t)2 * SECRET_SIZE)
#define MOST (HEX_SIZE + 1) /* the newline */

const char *secret_file_of(const char *configured)
{
    const char *path = configured ? configured : getenv(SECRET_ENV);
    return path && path[0] ? path : NULL;
}

static fanin_status refuse(fanin_error *error, fanin_status status, const char *path,
                           const char *why, const char *remedy)
{
    const error_place place = {.phase = "secret", .remedy = remedy};
    return error_set(error, status, &place, "the secret file %s %s", path, why);
}

static fanin_status refuse_errno(fanin_error *error, const char *path, int code)
{
    error_place place = {.phase = "secret",
                         .remedy = code == EACCES
                                       ? "let this process's user own it, mode 0400"
                                       : "make one: nixl-fetch secret FILE"};
    return error_set_errno(error, code == ENOENT ? FANIN_ERR_NOT_FOUND : FANIN_ERR_IO,
                           code, &place, "cannot read the secret file %s", path);
}

/* Who may change or read it. */
static fanin_status check_owner(int fd, const char *path, fanin_error *error)
{
    struct stat s;
    char why[128];
    if (fstat(fd, &s) != 0)
        return refuse_errno(error, path, errno);
    if (!S_ISREG(s.st_mode))
        return refuse(error, FANIN_ERR_ARGUMENT, path, "is no file",
                      "name a file with the launch's secret");
    if (s.st_uid != 0 && s.st_uid != geteuid()) {
        snprintf(why, sizeof why, "belongs to user %u, neither root nor this process's",
                 (unsigned)s.st_uid);
        return refuse(error, FANIN_ERR_AUTH, path, why,
                      "let this process's user own it: chown");
    }
    mode_t most = s.st_uid == 0 ? 0740 : 0700; /* what is executable does no harm */
    if (s.st_mode & 0777 & ~most) {
        snprintf(why, sizeof why, "has mode %04o: others than its owner may use it",
                 (unsigned)(s.st_mode & 07777));
        return refuse(error, FANIN_ERR_AUTH, path, why,
                      s.st_uid == 0
                          ? "chmod 0400, or 0440 for its group; in Kubernetes "
                            "defaultMode: 0400"
                          : "chmod 0600, and make a new secret if others "
                            "could read this one");
    }
    return FANIN_OK;
}

/* -1: it is no digit. */
static int hex_value(uint8_t c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

static bool parse(const uint8_t *text, size_t size, uint8_t out[SECRET_SIZE])
{
    if ((size == HEX_SIZE + 1 || size == SECRET_SIZE + 1) && text[size - 1] == '\n')
        size--;
    if (size == SECRET_SIZE) {
        memcpy(out, text, SECRET_SIZE);
        return true;
    }
    if (size != HEX_SIZE)
        return false;
    for (size_t i = 0; i < SECRET_SIZE; i++) {
        int high = hex_value(text[2 * i]), low = hex_value(text[2 * i + 1]);
        if (high < 0 || low < 0)
            return false;
        out[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

/* Bytes read, at most MOST + 1; -1: errno. */
static ssize_t read_all(int fd, uint8_t text[MOST + 1])
{
    size_t size = 0;
    while (size < MOST + 1) {
        ssize_t n = read(fd, text + size, MOST + 1 - size);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -1;
        if (n == 0)
            break;
        size += (size_t)n;
    }
    return (ssize_t)size;
}

fanin_status secret_file_read(const char *path, uint8_t out[SECRET_SIZE],
                              fanin_error *error)
{
    uint8_t text[MOST + 1];
    /* Not to wait for a pipe's writer; what is no file is refused. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return refuse_errno(error, path, errno);
    fanin_status status = check_owner(fd, path, error);
    ssize_t size = status == FANIN_OK ? read_all(fd, text) : 0;
    if (size < 0)
        status = refuse_errno(error, path, errno);
    else if (status == FANIN_OK && !parse(text, (size_t)size, out))
        status = refuse(error, FANIN_ERR_ARGUMENT, path,
                        "holds neither 64 hexadecimal digits nor 32 bytes",
                        "make one: nixl-fetch secret FILE");
    explicit_bzero(text, sizeof text);
    close(fd);
    return status;
}
