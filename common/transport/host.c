/* SPDX-License-Identifier: Apache-2.0 */
/* What this process and its host are, and whether they fit another one. */
#include "host.h"

#include "error_set.h"
#include "ucx.h"
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The number in "pid:[4026531836]"; false if the link is not there. */
static bool namespace_number(const char *link, unsigned long *out)
{
    char text[64];
    ssize_t length = readlink(link, text, sizeof text - 1);
    text[length > 0 ? length : 0] = '\0';
    const char *number = strchr(text, '[');
    if (!number)
        return false;
    *out = strtoul(number + 1, NULL, 10);
    return true;
}

/* The 32 hex digits of the kernel's random boot id. */
static bool boot_id(char out[33])
{
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    char text[64];
    ssize_t length = read(fd, text, sizeof text);
    close(fd);
    size_t digits = 0;
    for (ssize_t i = 0; i < length && digits < 32; i++)
        if (text[i] != '-' && text[i] != '\n')
            out[digits++] = text[i];
    out[digits] = '\0';
    return digits == 32;
}

void host_id(const logger *log, char out[HOST_ID_SIZE])
{
    char boot[33], reason[64];
    unsigned long pid_space, ipc_space;
    out[0] = '\0';
    errno = ENODATA; /* unless a call says what else */
    if (boot_id(boot) && namespace_number("/proc/self/ns/pid", &pid_space) &&
        namespace_number("/proc/self/ns/ipc", &ipc_space))
        snprintf(out, HOST_ID_SIZE, "%s-%lx-%lx", boot, pid_space & UINT32_MAX,
                 ipc_space & UINT32_MAX);
    int why = errno;
    if (!out[0] && log)
        log_write(log, FANIN_LOG_WARNING, "host-unknown",
                  "no path cma and no cuda_ipc for as long as this lives: "
                  "/proc/sys/kernel/random/boot_id and /proc/self/ns do not tell the "
                  "host (%s); %s",
                  strerror_r(why, reason, sizeof reason),
                  error_remedy(why, "is /proc mounted, and readable?"));
}

/* Length of "major.minor", 0 if the text has no such beginning. */
static size_t minor_end(const char *version)
{
    const size_t major = strspn(version, "0123456789");
    if (major == 0 || version[major] != '.')
        return 0;
    const size_t minor = strspn(version + major + 1, "0123456789");
    return minor == 0 ? 0 : major + 1 + minor;
}

bool ucx_versions_match(const char *a, const char *b)
{
    if (!a || !b)
        return false;
    const size_t length = minor_end(a);
    return length > 0 && length == minor_end(b) && memcmp(a, b, length) == 0;
}
