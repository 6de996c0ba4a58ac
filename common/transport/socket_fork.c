/* SPDX-License-Identifier: Apache-2.0 */
#include "socket_fork.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Held while a socket is made and noted, and across every fork. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
/* By descriptor: the inode of the socket that was made under this number last, 0: none. A number
   that is closed and used again for something else has another inode now. */
static ino_t *inodes;
static int capacity;

static void before(void)
{
    pthread_mutex_lock(&lock);
}

static void socket_fork_in_parent(void)
{
    pthread_mutex_unlock(&lock);
}

static bool is_still_ours(int fd)
{
    struct stat info;
    return inodes[fd] != 0 && fstat(fd, &info) == 0 && S_ISSOCK(info.st_mode) &&
           info.st_ino == inodes[fd];
}

/* Calls nothing but what is safe between fork and exec. */
static void socket_fork_in_child(void)
{
    int nothing = -1;
    for (int fd = 0; fd < capacity; fd++) {
        if (!is_still_ours(fd))
            continue;
        if (nothing < 0)
            nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
        if (nothing < 0 || dup3(nothing, fd, O_CLOEXEC) < 0)
            close(fd);
        inodes[fd] = 0;
    }
    if (nothing >= 0)
        close(nothing);
    pthread_mutex_unlock(&lock);
}

static void socket_fork_install(void)
{
    (void)pthread_atfork(before, socket_fork_in_parent, socket_fork_in_child);
}

static bool socket_fork_make_room(int fd)
{
    if (fd < capacity)
        return true;
    int wanted = fd < 32 ? 64 : 2 * (fd + 1);
    ino_t *grown = realloc(inodes, (size_t)wanted * sizeof *grown);
    if (!grown)
        return false;
    memset(grown + capacity, 0, (size_t)(wanted - capacity) * sizeof *grown);
    inodes = grown;
    capacity = wanted;
    return true;
}

static int socket_fork_note(int fd)
{
    struct stat info;
    if (fd < 0)
        return fd;
    if (fstat(fd, &info) == 0 && socket_fork_make_room(fd)) {
        inodes[fd] = info.st_ino;
        return fd;
    }
    close(fd);
    errno = ENOMEM;
    return -1;
}

int socket_make(int family)
{
    pthread_once(&once, socket_fork_install);
    pthread_mutex_lock(&lock);
    int fd =
        socket_fork_note(socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    int code = errno;
    pthread_mutex_unlock(&lock);
    errno = code;
    return fd;
}

int socket_take(int listener, struct sockaddr *peer, socklen_t *length)
{
    pthread_mutex_lock(&lock);
    int fd =
        socket_fork_note(accept4(listener, peer, length, SOCK_NONBLOCK | SOCK_CLOEXEC));
    int code = errno;
    pthread_mutex_unlock(&lock);
    errno = code;
    return fd;
}
