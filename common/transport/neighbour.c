/* SPDX-License-Identifier: Apache-2.0 */
/* A uid tells users apart, and containers do not: root of each is root. Namespaces do. */
#include "neighbour.h"

#include "socket.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* Linux 6.5; the headers may be older than the kernel */
#endif

/* "pid:[4026531836]"; false: it cannot be read. */
static bool read_link(int directory, const char *name, char out[64])
{
    ssize_t length = readlinkat(directory, name, out, 63);
    out[length > 0 ? length : 0] = '\0';
    return length > 0;
}

/* Whether numbers in /proc are this process's own: it may have been mounted in a pid namespace above. */
static bool proc_is_ours(void)
{
    char self[64];
    return read_link(AT_FDCWD, "/proc/self", self) && atol(self) == (long)getpid();
}

/* The namespaces of a folder of /proc against those of this process. */
static unsigned compare_spaces(int directory)
{
    static const struct {
        const char *link, *own;
        unsigned differs;
    } spaces[] = {
        {"ns/user", "/proc/self/ns/user", NEIGHBOUR_USER_SPACE},
        {"ns/pid", "/proc/self/ns/pid", NEIGHBOUR_PID_SPACE},
        {"ns/ipc", "/proc/self/ns/ipc", NEIGHBOUR_IPC_SPACE},
        {"ns/mnt", "/proc/self/ns/mnt", NEIGHBOUR_MOUNT_SPACE},
    };
    unsigned differs = 0;
    for (size_t i = 0; i < sizeof spaces / sizeof spaces[0]; i++) {
        char there[64], here[64];
        if (!read_link(AT_FDCWD, spaces[i].own, here)) {
            if (errno == ENOENT) /* a kernel that has one namespace of this kind */
                continue;
            return NEIGHBOUR_UNSEEN;
        }
        if (!read_link(directory, spaces[i].link, there))
            return NEIGHBOUR_UNSEEN;
        if (strcmp(there, here) != 0)
            differs |= spaces[i].differs;
    }
    return differs;
}

/* A descriptor of the peer's process itself: its number may be another's by now. -1: a kernel that
   has none, or, with *gone_out, a process that nothing more can be said of. */
static int open_process(int fd, bool *gone_out)
{
    int process = -1;
    socklen_t size = sizeof process;
    *gone_out = false;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &process, &size) == 0)
        return process;
    *gone_out = errno != ENOPROTOOPT;
    return -1;
}

static unsigned look_at(int fd, pid_t pid)
{
    char path[32];
    bool gone;
    int process = open_process(fd, &gone);
    snprintf(path, sizeof path, "/proc/%d", (int)pid);
    /* The folder stays that of one process: the links in it are of no later one. */
    int directory =
        gone ? -1 : open(path, O_PATH | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    unsigned differs = directory < 0 ? NEIGHBOUR_UNSEEN : compare_spaces(directory);
    /* If the peer is alive now, the number was its own when the folder was opened. */
    struct pollfd ended = {.fd = process, .events = POLLIN};
    if (process >= 0 && poll(&ended, 1, 0) != 0)
        differs = NEIGHBOUR_UNSEEN;
    if (directory >= 0)
        close(directory);
    if (process >= 0)
        close(process);
    return differs;
}

unsigned neighbour_differs(int fd)
{
    uid_t uid;
    pid_t pid;
    if (!socket_peer_credentials(fd, &uid, &pid) || uid != geteuid())
        return NEIGHBOUR_UID;
    /* 0: its pid namespace is neither this one nor below. */
    if (pid <= 0 || !proc_is_ours())
        return NEIGHBOUR_UNSEEN;
    return look_at(fd, pid);
}

const char *neighbour_why(unsigned differs)
{
    static const struct {
        unsigned differs;
        const char *why;
    } reasons[] = {
        {NEIGHBOUR_UID, "the peer's process is another user's"},
        {NEIGHBOUR_UNSEEN, "the peer's process is in a pid namespace that cannot be "
                           "seen from here, has ended, or hides its namespaces"},
        {NEIGHBOUR_USER_SPACE, "the peer's process is in another user namespace"},
        {NEIGHBOUR_PID_SPACE, "the peer's process is in another pid namespace"},
        {NEIGHBOUR_IPC_SPACE, "the peer's process is in another ipc namespace"},
        {NEIGHBOUR_MOUNT_SPACE, "the peer's process is in another mount namespace"},
    };
    for (size_t i = 0; i < sizeof reasons / sizeof reasons[0]; i++) {
        if (differs & reasons[i].differs)
            return reasons[i].why;
    }
    return "";
}
