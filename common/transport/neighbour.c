/* SPDX-License-Identifier: Apache-2.0 */
/* A uid tells users apart, and containers do not: root of each is root. Namespaces do. */
#include "neighbour.h"

#include "socket.h"
#include "load_lock.h"
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

/* "pid:[4026531836]"; false: it cannot be read. Takes no descriptor. */
static bool read_link(const char *path, char out[64])
{
    ssize_t length = readlinkat(AT_FDCWD, path, out, 63);
    out[length > 0 ? length : 0] = '\0';
    return length > 0;
}

/* Whether numbers in /proc are this process's own: it may have been mounted in a pid namespace above. */
static bool proc_is_ours(void)
{
    char self[64];
    return read_link("/proc/self", self) && atol(self) == (long)getpid();
}

/* The namespaces of the process that has this number now against those of this process. */
static unsigned compare_spaces(pid_t pid)
{
    static const struct {
        const char *name;
        unsigned differs;
    } spaces[] = {
        {"user", NEIGHBOUR_USER_SPACE},
        {"pid", NEIGHBOUR_PID_SPACE},
        {"ipc", NEIGHBOUR_IPC_SPACE},
        {"mnt", NEIGHBOUR_MOUNT_SPACE},
    };
    unsigned differs = 0;
    for (size_t i = 0; i < sizeof spaces / sizeof spaces[0]; i++) {
        char path[48], there[64], here[64];
        snprintf(path, sizeof path, "/proc/self/ns/%s", spaces[i].name);
        if (!read_link(path, here)) {
            if (errno == ENOENT) /* a kernel that has one namespace of this kind */
                continue;
            return NEIGHBOUR_UNSEEN;
        }
        snprintf(path, sizeof path, "/proc/%d/ns/%s", (int)pid, spaces[i].name);
        if (!read_link(path, there))
            return NEIGHBOUR_UNSEEN;
        if (strcmp(there, here) != 0)
            differs |= spaces[i].differs;
    }
    return differs;
}

/* -------------------------------------------------------------- who it was */

/* A descriptor that is given back when there is no other for a moment: with none this process would
   take its own user for a stranger. */
static load_lock reserve_lock = LOAD_LOCK_INIT;
static int reserve = -1;

/* -1: there is none to be had. */
static int take_another(void)
{
    return open("/dev/null", O_RDONLY | O_CLOEXEC);
}

void neighbour_prepare(void)
{
    if (!load_lock_take(&reserve_lock))
        return;
    if (reserve < 0)
        reserve = take_another();
    load_lock_give(&reserve_lock);
}

/* A descriptor of the peer's process itself, or -1 and errno. */
static int open_process(int fd)
{
    int process = -1;
    socklen_t size = sizeof process;
    return getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &process, &size) == 0 ? process
                                                                          : -1;
}

/* Whether it is alive: then its number was its own all the time. A kernel that has no such
   descriptors takes every number for its first owner's. */
static bool is_alive(int fd)
{
    bool held = load_lock_take(&reserve_lock);
    int process = open_process(fd);
    bool lacks =
        process < 0 && (errno == EMFILE || errno == ENFILE) && held && reserve >= 0;
    if (lacks) {
        close(reserve);
        process = open_process(fd);
    }
    bool alive = process < 0 && errno == ENOPROTOOPT;
    if (process >= 0) {
        alive = poll(&(struct pollfd){.fd = process, .events = POLLIN}, 1, 0) == 0;
        close(process);
    }
    if (lacks)
        reserve = take_another();
    if (held)
        load_lock_give(&reserve_lock);
    return alive;
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
    unsigned differs = compare_spaces(pid);
    return is_alive(fd) ? differs : NEIGHBOUR_UNSEEN;
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
